"""Settings of the node plugin, parsed once at the start, and the names of its unix sockets."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from driver.config.flag_values import (
    DEFAULT_DRIVER,
    SUBDOMAIN,
    ListenAddress,
    check_driver_name,
    check_namespace,
    matching,
    parse_listen_address,
)
from driver.config.node_configs import NO_CONFIG, PARSERS, NodeConfig
from driver.errors import UsageError
from driver.model.gpu import Gpu
from driver.model.gpu_settings import (
    EVERY_GPU,
    NO_GPU,
    NO_LAYOUTS,
    NO_SHARED,
    NO_SHARED_PROFILES,
    NO_SHARES,
    GpuSelection,
    GpuSharing,
    Layouts,
    ShareCounts,
    SharedGpus,
    SharedProfiles,
)
from driver.model.plan import CURATED

NODE_NAME = re.compile(rf"(?=.{{1,253}}$){SUBDOMAIN.pattern}")

SOCKET_PATH_LIMIT = 107
"""Maximum length of a unix socket's path (unix(7))."""

UID_HASH_LENGTH = 8
"""Characters that replace a uid that does not fit."""

INTERVAL = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,3})?)(s|m)")
INTERVAL_UNITS = {"s": 1.0, "m": 60.0}
SHORTEST_USAGE_INTERVAL_SECONDS, LONGEST_USAGE_INTERVAL_SECONDS = 1.0, 600.0

POD_UID = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?")


def _absolute(value: str | Path) -> Path:
    if not Path(value).is_absolute():
        raise ValueError("must be an absolute path")
    return Path(value)


def _usage_interval(value: str) -> float:
    match = INTERVAL.fullmatch(value)
    seconds = float(match[1]) * INTERVAL_UNITS[match[2]] if match else 0.0
    if not SHORTEST_USAGE_INTERVAL_SECONDS <= seconds <= LONGEST_USAGE_INTERVAL_SECONDS:
        raise ValueError("must be a duration from 1s to 10m, such as 15s")
    return seconds


_node_name = matching(NODE_NAME, "the name of a Node object: a DNS subdomain such as worker-1")
_cdi_hook = matching(re.compile("auto|none|/.+"), "auto, none or the absolute path of nvidia-cdi-hook on the host")
_gpus = matching(re.compile("nvml|sim:.+", re.DOTALL), "nvml, sim:NAME (see `tessera sim list`) or sim:FILE")
_pod_uid = matching(POD_UID, "the uid of this process' pod (metadata.uid): letters, digits and dashes")


# No pydantic here: it costs the node plugin 8 MiB, and nothing else in it needs it before a claim has parameters.
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The flags of ``tessera node``: field names are the flags' names, annotations their parsers (raise ValueError)."""

    node_name: Annotated[str, _node_name]
    driver_name: Annotated[str, check_driver_name] = DEFAULT_DRIVER
    kubeconfig: Annotated[Path | None, Path] = None
    namespace: Annotated[str, check_namespace] = "tessera"
    gpus: Annotated[str, _gpus] = "nvml"
    kubelet_dir: Annotated[Path, _absolute] = Path("/var/lib/kubelet")
    cdi_dir: Annotated[Path, _absolute] = Path("/var/run/cdi")
    state_dir: Annotated[Path, _absolute]
    driver_root: Annotated[Path, _absolute] = Path("/")
    cdi_hook: Annotated[str, _cdi_hook] = "auto"
    host_root: Annotated[Path, _absolute] = Path("/")
    nvml_library: Annotated[Path | None, Path] = None
    include_gpus: Annotated[GpuSelection, PARSERS["include_gpus"]] = EVERY_GPU
    exclude_gpus: Annotated[GpuSelection, PARSERS["exclude_gpus"]] = NO_GPU
    mig_gpus: Annotated[GpuSelection, PARSERS["mig_gpus"]] = NO_GPU
    shares: Annotated[ShareCounts, PARSERS["shares"]] = NO_SHARES
    shared: Annotated[SharedGpus, PARSERS["shared"]] = NO_SHARED
    shares_only: Annotated[GpuSelection, PARSERS["shares_only"]] = NO_GPU
    compute_instances: Annotated[SharedProfiles, PARSERS["compute_instances"]] = NO_SHARED_PROFILES
    memory_hook: Annotated[str, PARSERS["memory_hook"]] = "auto"
    framework_variables: Annotated[str, PARSERS["framework_variables"]] = "none"
    publish: Annotated[str, PARSERS["publish"]] = CURATED
    layout: Annotated[Layouts, PARSERS["layout"]] = NO_LAYOUTS
    existing_partitions: Annotated[str, PARSERS["existing_partitions"]] = "ignore"
    neighbours: Annotated[str, PARSERS["neighbours"]] = "refuse"
    sim_latency: Annotated[str, str] = "default"
    metrics_address: Annotated[ListenAddress | None, parse_listen_address] = None
    usage_interval: Annotated[float | None, _usage_interval] = None
    health_address: Annotated[ListenAddress | None, parse_listen_address] = None
    pod_uid: Annotated[str, _pod_uid] = ""
    config: NodeConfig = NO_CONFIG
    """The node's configuration; it replaces some of ``flags``."""
    flags: NodeSettings | None = None
    """The settings without the configuration; None: there is none in these settings."""

    @property
    def simulated(self) -> str | None:
        """The name or file of the simulated node, or None for real GPUs."""
        return self.gpus.removeprefix("sim:") if self.gpus.startswith("sim:") else None

    def configured(self, config: NodeConfig) -> NodeSettings:
        """The flags, with the settings of ``config`` instead of those that it replaces."""
        flags, parsed = self.flags or self, {name: PARSERS[name](value) for name, value in config.settings.items()}
        return replace(flags, config=config, flags=flags, **parsed)

    def manages(self, gpu: Gpu) -> bool:
        """Whether the plugin uses ``gpu``."""
        return gpu in self.include_gpus and gpu not in self.exclude_gpus

    def reason_against(self, gpu: Gpu, held: Collection[str]) -> str | None:
        """Why a node can't have these settings while claims have the devices ``held`` of ``gpu``; None: it can.

        Only a plugin that manages the GPU can prepare its devices, and remove the partitions of claims.
        """
        if not held or self.manages(gpu):
            return None
        return f"GPU {gpu.index} would not be managed, and claims have {', '.join(sorted(held))}"

    @property
    def sharing(self) -> GpuSharing:
        """How several claims can have one GPU at once; nothing holds them to their memory."""
        return GpuSharing(self.shares.of, self.shares_only, self.shared.of)

    @property
    def publish_existing(self) -> bool:
        """Whether partitions that Tessera did not create are published as they are."""
        return self.existing_partitions == "publish"

    @property
    def plugin_socket(self) -> Path:
        return plugin_socket(self.kubelet_dir / "plugins" / self.driver_name, self.pod_uid)

    @property
    def registration_socket(self) -> Path:
        return registration_socket(self.kubelet_dir / "plugins_registry", self.driver_name, self.pod_uid)


def node_settings(**values: object) -> NodeSettings:
    """Settings from flags; None means the default. Raises UsageError naming every flag that is wrong."""
    given = {name: value for name, value in values.items() if value is not None}
    driver = str(given.get("driver_name", DEFAULT_DRIVER))
    kubelet = Path(str(given.get("kubelet_dir", "/var/lib/kubelet")))
    given.setdefault("state_dir", kubelet / "plugins" / driver)
    settings = NodeSettings(**_read(given))
    if settings.usage_interval is not None and settings.metrics_address is None:
        raise UsageError("--usage-interval: needs --metrics-address, such as :9400, where the usage is served")
    for path in (settings.plugin_socket, settings.registration_socket):
        if len(str(path)) > SOCKET_PATH_LIMIT:
            raise UsageError(
                f"--kubelet-dir {settings.kubelet_dir}: the socket path {path} has {len(str(path))} characters, "
                f"Linux takes {SOCKET_PATH_LIMIT}: choose a shorter directory"
            )
    return settings


def _read(given: Mapping[str, object]) -> dict[str, Any]:
    read, faults = {}, []
    for name, annotated in get_type_hints(NodeSettings, include_extras=True).items():
        if name in given:
            try:
                read[name] = annotated.__metadata__[0](given[name])
            except ValueError as error:
                faults.append(f"--{name.replace('_', '-')} {given[name]}: {error}")
    if "node_name" not in given:
        faults.append("--node-name: is needed")
    if faults:
        raise UsageError("; ".join(faults))
    return read


def plugin_socket(directory: Path, uid: str) -> Path:
    """Socket for the kubelet's calls; with the ``uid`` of a pod each plugin of the node has its own."""
    if not uid:
        return directory / "dra.sock"
    return _fitting(directory, f"dra-{uid}.sock", f"dra-{_short(uid)}.sock")


def registration_socket(directory: Path, driver: str, uid: str) -> Path:
    """Socket on which the kubelet discovers the plugin."""
    if not uid:
        return directory / f"{driver}-reg.sock"
    anonymous = f"dra-{_short(f'{driver} {uid}')}-reg.sock"
    return _fitting(directory, f"{driver}-{uid}-reg.sock", f"{driver}-{_short(uid)}-reg.sock", anonymous)


def _fitting(directory: Path, *names: str) -> Path:
    """The first path that fits, else the last. The first name is the one that the Go helper for plugins uses
    (kubeletplugin.RollingUpdate); it shortens names, too, with another hash."""
    paths = [directory / name for name in names]
    return next((path for path in paths if len(str(path)) <= SOCKET_PATH_LIMIT), paths[-1])


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:UID_HASH_LENGTH]
