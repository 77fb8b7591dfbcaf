"""Other GPU drivers on the node, and the GPUs that are reserved for them: rules, and the watch that applies them.

Three are detected: NVIDIA's device plugin (and others with its resource names), NVIDIA's DRA driver, and the GPU
Operator's mig-manager. Only the DRA driver publishes which GPUs it owns. For the others ``--exclude-gpus`` decides:
excluded GPUs belong to them, the others to Tessera. Without excluded GPUs every GPU belongs to them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from driver.config.flag_values import NVIDIA_DRIVER
from driver.errors import ApiError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import NODE, RESOURCE_GROUP, read_object
from driver.kube.slice_types import ResourceSlice
from driver.kube.types import Metadata, Node
from driver.kube.watch_cache import WatchCache
from driver.model.reported_gpus import OWNED_SUFFIX
from kubelet_plugin.changes import ChangeNotifier, NodeChange, NodeEventSink
from kubelet_plugin.inventory.inventory import Inventory
from kubelet_plugin.inventory.scan import Scanner
from kubelet_plugin.settings import NodeSettings
from kubelet_plugin.upgrade.instance_lock import is_listening

log = logging.getLogger(__name__)

GPU_RESOURCE, MIG_RESOURCE_PREFIX = "nvidia.com/gpu", "nvidia.com/mig-"
REPLICAS = "nvidia.com/gpu.replicas"
"""Label of NVIDIA's GPU feature discovery: as how many GPUs the device plugin advertises each GPU."""

MIG_CONFIG, MIG_STATE = "nvidia.com/mig.config", "nvidia.com/mig.config.state"
MIG_MANAGER = "nvidia.com/gpu.deploy.mig-manager"
"""Label of the GPU Operator: whether mig-manager runs on the node. The operator sets MIG_CONFIG even if it does not."""

DIRECTORY_CHECK_INTERVAL_SECONDS = 5.0
"""Time between two checks of the kubelet's directories."""

CHECKS_PER_NODE_READ = 6
"""Checks per read of the Node. The Node is not watched, which would need another permission."""

LIST_TIMEOUT_SECONDS = 15.0
"""Timeout of the first list of the DRA driver's slices."""

SOCKETS = ("device-plugins/nvidia*.sock", f"plugins_registry/{NVIDIA_DRIVER}*-reg.sock")

NEIGHBOUR_FOUND, NEIGHBOUR_GONE = "NeighbourFound", "NeighbourGone"
"""Reasons of Events on the node."""


@dataclass(frozen=True, slots=True)
class NodeSigns:
    """Observations of other drivers: the Node object, the GPU UUIDs in the slices of NVIDIA's DRA driver (None: it has
    no slices), and sockets with a listener, relative to the kubelet's directory."""

    allocatable: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    published: frozenset[str] | None = None
    sockets: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class OtherDriver:
    """Another driver. ``sign`` is how it was detected. ``gpus`` are the UUIDs it publishes; None: it publishes none.
    ``count`` is the minimum number of GPUs that it offers."""

    name: str
    sign: str
    gpus: frozenset[str] | None = None
    count: int = 0

    def __str__(self) -> str:
        return f"{self.name} ({self.sign})"


def find_other_drivers(signs: NodeSigns, driver: str) -> list[OtherDriver]:
    drivers = [_device_plugin(signs), _dra_driver(signs) if driver != NVIDIA_DRIVER else None, _mig_manager(signs)]
    return [other for other in drivers if other is not None]


def is_gpu_resource(name: str) -> bool:
    """Whether an extended resource has the name that device plugins give GPUs or their parts."""
    return name == GPU_RESOURCE or name.startswith((f"{GPU_RESOURCE}.", MIG_RESOURCE_PREFIX))


def _device_plugin(signs: NodeSigns) -> OtherDriver | None:
    offered = {name: amount for name, amount in signs.allocatable.items() if is_gpu_resource(name) and amount != "0"}
    if offered:
        whole = sum(_number(amount) for name, amount in offered.items() if not name.startswith(MIG_RESOURCE_PREFIX))
        replicas = max(1, _number(signs.labels.get(REPLICAS, "1")))
        sign = ", ".join(f"{name}: {amount}" for name, amount in sorted(offered.items()))
        return OtherDriver("a device plugin", f"{sign} in the Node's status.allocatable", count=-(-whole // replicas))
    sockets = sorted(path for path in signs.sockets if path.startswith("device-plugins/"))
    return OtherDriver("a device plugin", f"it listens at {', '.join(sockets)}") if sockets else None


def _dra_driver(signs: NodeSigns) -> OtherDriver | None:
    name = f"the DRA driver {NVIDIA_DRIVER}"
    if signs.published is not None:
        return OtherDriver(name, f"its ResourceSlices have {len(signs.published)} GPUs of this node", signs.published)
    sockets = sorted(path for path in signs.sockets if path.startswith("plugins_registry/"))
    return OtherDriver(name, f"it listens at {', '.join(sockets)}") if sockets else None


def _mig_manager(signs: NodeSigns) -> OtherDriver | None:
    labels = {key: signs.labels[key] for key in (MIG_CONFIG, MIG_STATE) if signs.labels.get(key)}
    if not labels or signs.labels.get(MIG_MANAGER) == "false":
        return None
    return OtherDriver("mig-manager", f"{', '.join(f'{k}={v}' for k, v in labels.items())} on the Node")


def _number(amount: str) -> int:
    """Extended resources are whole numbers; any other text counts as one."""
    return int(amount) if amount.isdigit() else 1


def owners_of(
    drivers: Iterable[OtherDriver], ours: Collection[str], excluded: int, *, trusting: bool
) -> dict[str, OtherDriver]:
    """The owner of each GPU in ``ours`` that belongs to another driver, by UUID; the first if there are several.

    Of a driver that does not publish its GPUs, ``excluded`` is the number that ``--exclude-gpus`` leaves to it. Unless
    ``trusting`` (``--neighbours exclude``), that is ignored if the driver offers more GPUs.
    """
    owners: dict[str, OtherDriver] = {}
    for driver in drivers:
        separated = excluded > 0 and (trusting or driver.count <= excluded)
        for uuid in () if driver.gpus is None and separated else ours:
            if driver.gpus is None or uuid in driver.gpus:
                owners.setdefault(uuid, driver)
    return owners


def advice(other: OtherDriver, owned: int, all_gpus: int, *, trusting: bool) -> str:
    """The Event message: the driver, the GPUs it owns, the consequence, and the remedy."""
    presence = f"{other} is on this node"
    if not owned:
        return f"{presence}; it owns none of the GPUs of Tessera"
    share = f"all {all_gpus} GPUs" if owned == all_gpus else f"{owned} of {all_gpus} GPUs"
    reason = "" if other.gpus is not None else " because it does not publish which"
    message = f"{presence} and owns {share}{reason}: nothing of them is offered"
    if trusting and other.gpus is not None:
        return message
    return f"{message}; remove it from this node, or leave exactly its GPUs to it with --exclude-gpus"


def gpus_of(item: ResourceSlice) -> frozenset[str] | None:
    """UUIDs of the GPUs and parent GPUs in a slice; None if the slice is not of NVIDIA's driver."""
    return item.spec.gpu_uuids if item.spec.driver == NVIDIA_DRIVER else None


class OtherDriverWatch:
    """Sets the GPUs that are reserved for other drivers in the inventory."""

    def __init__(
        self,
        client: KubeClient,
        settings: NodeSettings,
        inventory: Inventory,
        scanner: Scanner,
        changes: ChangeNotifier,
        events: NodeEventSink,
    ) -> None:
        self._client = client
        self._node, self._driver = settings.node_name, settings.driver_name
        self._kubelet_dir, self._trusting = settings.kubelet_dir, settings.neighbours == "exclude"
        self._inventory, self._scanner = inventory, scanner
        self._known, self._owners = False, dict[str, OtherDriver]()
        self._changes, self._events = changes, events
        self._reported: dict[str, str] = {}
        self._object = Node(Metadata(self._node))
        self._wake = threading.Event()
        self._listed = threading.Event()
        self._checking = threading.Lock()
        selector = {"fieldSelector": f"spec.nodeName={self._node},spec.driver={NVIDIA_DRIVER}"}
        self.cache = WatchCache(
            client,
            f"{RESOURCE_GROUP}/resourceslices",
            ResourceSlice,
            gpus_of,
            lambda _: self._slices_changed(),
            selector,
        )

    def wait_until_known(self) -> None:
        """Return when other drivers are known; their GPUs must never be published. Raises ApiError."""
        if not self._known:
            self._check(read_node=True)

    def not_ready(self) -> str | None:
        """Why the node is not ready because of other drivers, or None."""
        owners = self._owners
        if not self._known:
            return "it is not known yet whether other drivers use GPUs of this node"
        if self._trusting or not owners:
            return None
        reported = self._reported  # may lag behind ``owners``
        return "; ".join(sorted({reported.get(owner.name, str(owner)) for owner in owners.values()}))

    def run(self, stop: threading.Event) -> None:
        """Check until ``stop`` is set (then call ``wake``)."""
        checks, sockets = 0, frozenset[str]()
        while not stop.is_set():
            now = self._sockets()
            fresh = checks % CHECKS_PER_NODE_READ == 0 or now != sockets
            checks, sockets = (1 if fresh else checks + 1), now
            try:
                self._check(read_node=fresh)
            except ApiError as error:
                log.warning("can't check for other GPU drivers, trying again", extra={"error": str(error)})
            except Exception:
                log.exception("internal error while checking for other GPU drivers")
            self._wake.wait(DIRECTORY_CHECK_INTERVAL_SECONDS)
            self._wake.clear()

    def wake(self) -> None:
        self._wake.set()

    def _slices_changed(self) -> None:
        self._listed.set()
        self.wake()

    def _check(self, *, read_node: bool) -> None:
        with self._checking:
            if read_node or not self._known:
                self._object = read_object(self._client, f"/api/v1/nodes/{self._node}", NODE, any_age=True)
                if not self._listed.wait(LIST_TIMEOUT_SECONDS):
                    raise ApiError(f"the ResourceSlices of {NVIDIA_DRIVER} can't be listed")
            slices = self.cache.snapshot().values()
            published = frozenset[str]().union(*slices) if slices else None
            node = self._object
            self._apply(NodeSigns(node.status.allocatable, node.metadata.labels, published, self._sockets()))
            self._known = True

    def _apply(self, signs: NodeSigns) -> None:
        ours = [gpu.uuid for gpu in self._inventory.gpus]
        drivers = find_other_drivers(signs, self._driver)
        owners = owners_of(drivers, ours, self._scanner.excluded_count, trusting=self._trusting)
        messages = {
            driver.name: advice(driver, list(owners.values()).count(driver), len(ours), trusting=self._trusting)
            for driver in drivers
        }
        before, self._owners = self._owners, owners
        self._report(messages, {owner.name for owner in owners.values()})
        changed = self._inventory.set_reserved({uuid: f"{owner}{OWNED_SUFFIX}" for uuid, owner in owners.items()})
        if changed or before.keys() != owners.keys():
            self._changes.report(NodeChange.RESERVATIONS)

    def _report(self, messages: dict[str, str], owning: set[str]) -> None:
        for name, message in messages.items():
            if self._reported.get(name) != message:
                serious = name in owning
                log.log(
                    logging.WARNING if serious else logging.INFO, "found another GPU driver", extra={"why": message}
                )
                self._events.node(NEIGHBOUR_FOUND, message, serious, name)
        for name in self._reported.keys() - messages.keys():
            log.info("the other GPU driver is gone", extra={"neighbour": name})
            self._events.node(NEIGHBOUR_GONE, f"{name} is gone from this node", False, name)
        self._reported = messages

    def _sockets(self) -> frozenset[str]:
        """Sockets with a listener; a killed plugin leaves its socket behind."""
        patterns = SOCKETS if self._driver != NVIDIA_DRIVER else SOCKETS[:1]
        paths = [path for pattern in patterns for path in self._kubelet_dir.glob(pattern)]
        return frozenset(str(path.relative_to(self._kubelet_dir)) for path in paths if is_listening(path))
