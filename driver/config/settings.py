"""Settings of the node plugin: parsed once, at the edge, and frozen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from driver.config.listen import Listen
from driver.errors import UsageError
from driver.model.selection import EVERY_GPU, NO_GPU, Selection
from driver.model.shares import NO_SHARES, ShareCounts

DEFAULT_DRIVER = "gpu.tessera.dev"
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
DRIVER_LIMIT = 63
NODE_LIMIT = 253
SOCKET_PATH_LIMIT = 107
"""Characters of a unix socket's path that Linux takes (unix(7))."""


def check_driver_name(value: str) -> str:
    """Check a DRA driver's name. Raises ValueError."""
    if len(value) > DRIVER_LIMIT or not SUBDOMAIN.fullmatch(value) or not value[0].isalpha():
        # The letter is CDI's rule: the name is the vendor part of every CDI device (specification, "kind").
        raise ValueError(
            f"must be a DNS subdomain of at most {DRIVER_LIMIT} characters that begins with a letter, "
            f"such as {DEFAULT_DRIVER}"
        )
    return value


def _node_name(value: str) -> str:
    if len(value) > NODE_LIMIT or not SUBDOMAIN.fullmatch(value):
        raise ValueError("must be the name of a Node object: a DNS subdomain such as worker-1")
    return value


def _gpus(value: str) -> str:
    if value != "nvml" and not (value.startswith("sim:") and len(value) > len("sim:")):
        raise ValueError("must be nvml, sim:NAME (see `tessera sim list`) or sim:FILE")
    return value


def _selection(value: object) -> object:
    return Selection.parse(value) if isinstance(value, str) else value


def _share_counts(value: object) -> object:
    return ShareCounts.parse(value) if isinstance(value, str) else value


def _absolute(value: Path) -> Path:
    if not value.is_absolute():
        raise ValueError("must be an absolute path")
    return value


Namespace = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]


class NodeSettings(BaseModel):
    """What ``tessera node`` is told; field names are the flags' names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node_name: Annotated[str, AfterValidator(_node_name)]
    driver_name: Annotated[str, AfterValidator(check_driver_name)] = DEFAULT_DRIVER
    kubeconfig: Path | None = None
    namespace: Namespace = "tessera"
    gpus: Annotated[str, AfterValidator(_gpus)] = "nvml"
    kubelet_dir: AbsolutePath = Path("/var/lib/kubelet")
    cdi_dir: AbsolutePath = Path("/var/run/cdi")
    state_dir: AbsolutePath
    driver_root: AbsolutePath = Path("/")
    host_root: AbsolutePath = Path("/")
    nvml_library: Path | None = None
    include_gpus: Annotated[Selection, BeforeValidator(_selection)] = EVERY_GPU
    exclude_gpus: Annotated[Selection, BeforeValidator(_selection)] = NO_GPU
    mig_gpus: Annotated[Selection, BeforeValidator(_selection)] = NO_GPU
    shares: Annotated[ShareCounts, BeforeValidator(_share_counts)] = NO_SHARES
    shares_only: Annotated[Selection, BeforeValidator(_selection)] = NO_GPU
    existing_partitions: Literal["ignore", "publish"] = "ignore"
    sim_latency: str = "default"
    metrics_address: Listen = None

    @property
    def simulated(self) -> str | None:
        """The name or file of the simulated node, or None for real GPUs."""
        return self.gpus.removeprefix("sim:") if self.gpus.startswith("sim:") else None

    @property
    def plugin_socket(self) -> Path:
        return self.kubelet_dir / "plugins" / self.driver_name / "dra.sock"

    @property
    def registration_socket(self) -> Path:
        return self.kubelet_dir / "plugins_registry" / f"{self.driver_name}-reg.sock"


def node_settings(**values: object) -> NodeSettings:
    """Settings from flags; None means the default. Raises UsageError naming every flag that is wrong."""
    given = {name: value for name, value in values.items() if value is not None}
    driver = str(given.get("driver_name", DEFAULT_DRIVER))
    kubelet = Path(str(given.get("kubelet_dir", "/var/lib/kubelet")))
    given.setdefault("state_dir", kubelet / "plugins" / driver)
    try:
        settings = NodeSettings.model_validate(given)
    except ValidationError as error:
        faults = (describe_fault(fault["loc"], fault["msg"], fault["input"]) for fault in error.errors())
        raise UsageError("; ".join(faults)) from error
    for path in (settings.plugin_socket, settings.registration_socket):
        if len(str(path)) > SOCKET_PATH_LIMIT:
            raise UsageError(
                f"--kubelet-dir {settings.kubelet_dir}: the socket path {path} has {len(str(path))} characters, "
                f"Linux takes {SOCKET_PATH_LIMIT}: choose a shorter directory"
            )
    return settings


def describe_fault(location: tuple[int | str, ...], message: str, found: object) -> str:
    flag = "--" + ".".join(str(part) for part in location).replace("_", "-")
    if found is None or isinstance(found, dict):
        return f"{flag}: {message}"
    return f"{flag} {found}: {message.removeprefix('Value error, ')}"
