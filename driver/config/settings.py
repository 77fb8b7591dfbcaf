"""Settings of the node plugin: parsed once, at the edge, and frozen."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from driver.config.listen import ListenAddress, parse_listen_address
from driver.config.sockets import SOCKET_PATH_LIMIT, check_pod_uid, plugin_socket, registration_socket
from driver.errors import UsageError
from driver.model.selection import EVERY_GPU, NO_GPU, Selection
from driver.model.shares import NO_SHARES, ShareCounts

DEFAULT_DRIVER = "gpu.tessera.dev"
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DRIVER_LIMIT = 63
NODE_LIMIT = 253


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


def check_namespace(value: str) -> str:
    """Check a namespace's name. Raises ValueError."""
    if not LABEL.fullmatch(value):
        raise ValueError("must be the name of a namespace: a DNS label such as tessera")
    return value


def _absolute(value: str | Path) -> Path:
    if not Path(value).is_absolute():
        raise ValueError("must be an absolute path")
    return Path(value)


def _existing_partitions(value: str) -> str:
    if value not in {"ignore", "publish"}:
        raise ValueError("must be ignore or publish")
    return value


def _neighbours(value: str) -> str:
    if value not in {"refuse", "exclude"}:
        raise ValueError("must be refuse or exclude")
    return value


# No pydantic here: it costs the node plugin 8 MiB, and nothing else in it needs it before a claim has parameters.
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What ``tessera node`` is told; field names are the flags' names."""

    node_name: str
    driver_name: str = DEFAULT_DRIVER
    kubeconfig: Path | None = None
    namespace: str = "tessera"
    gpus: str = "nvml"
    kubelet_dir: Path = Path("/var/lib/kubelet")
    cdi_dir: Path = Path("/var/run/cdi")
    state_dir: Path
    driver_root: Path = Path("/")
    host_root: Path = Path("/")
    nvml_library: Path | None = None
    include_gpus: Selection = EVERY_GPU
    exclude_gpus: Selection = NO_GPU
    mig_gpus: Selection = NO_GPU
    shares: ShareCounts = NO_SHARES
    shares_only: Selection = NO_GPU
    existing_partitions: str = "ignore"
    neighbours: str = "refuse"
    sim_latency: str = "default"
    metrics_address: ListenAddress | None = None
    health_address: ListenAddress | None = None
    pod_uid: str = ""

    @property
    def simulated(self) -> str | None:
        """The name or file of the simulated node, or None for real GPUs."""
        return self.gpus.removeprefix("sim:") if self.gpus.startswith("sim:") else None

    @property
    def plugin_socket(self) -> Path:
        return plugin_socket(self.kubelet_dir / "plugins" / self.driver_name, self.pod_uid)

    @property
    def registration_socket(self) -> Path:
        return registration_socket(self.kubelet_dir / "plugins_registry", self.driver_name, self.pod_uid)


READ: Mapping[str, Callable[[Any], object]] = {
    "node_name": _node_name,
    "driver_name": check_driver_name,
    "kubeconfig": Path,
    "namespace": check_namespace,
    "gpus": _gpus,
    "kubelet_dir": _absolute,
    "cdi_dir": _absolute,
    "state_dir": _absolute,
    "driver_root": _absolute,
    "host_root": _absolute,
    "nvml_library": Path,
    "include_gpus": Selection.parse,
    "exclude_gpus": Selection.parse,
    "mig_gpus": Selection.parse,
    "shares": ShareCounts.parse,
    "shares_only": Selection.parse,
    "existing_partitions": _existing_partitions,
    "neighbours": _neighbours,
    "sim_latency": str,
    "metrics_address": parse_listen_address,
    "health_address": parse_listen_address,
    "pod_uid": check_pod_uid,
}
"""What a flag's value comes to; raises ValueError."""


def node_settings(**values: object) -> NodeSettings:
    """Settings from flags; None means the default. Raises UsageError naming every flag that is wrong."""
    given = {name: value for name, value in values.items() if value is not None}
    driver = str(given.get("driver_name", DEFAULT_DRIVER))
    kubelet = Path(str(given.get("kubelet_dir", "/var/lib/kubelet")))
    given.setdefault("state_dir", kubelet / "plugins" / driver)
    settings = NodeSettings(**_read(given))
    for path in (settings.plugin_socket, settings.registration_socket):
        if len(str(path)) > SOCKET_PATH_LIMIT:
            raise UsageError(
                f"--kubelet-dir {settings.kubelet_dir}: the socket path {path} has {len(str(path))} characters, "
                f"Linux takes {SOCKET_PATH_LIMIT}: choose a shorter directory"
            )
    return settings


def _read(given: Mapping[str, object]) -> dict[str, Any]:
    read, faults = {}, []
    for name in sorted(given, key=[field.name for field in fields(NodeSettings)].index):
        try:
            read[name] = READ[name](given[name])
        except ValueError as error:
            faults.append(f"--{name.replace('_', '-')} {given[name]}: {error}")
    if "node_name" not in given:
        faults.append("--node-name: is needed")
    if faults:
        raise UsageError("; ".join(faults))
    return read
