"""Watching for others who hand out GPUs of this node, from before the first slice is published."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from driver.errors import ApiError
from driver.kube.claims import GROUP
from driver.kube.objects import ObjectMeta
from driver.kube.transport import KubeClient
from driver.kube.watch_cache import WatchCache
from driver.model.gpu import Gpu
from kubelet_plugin.inventory import Inventory
from kubelet_plugin.neighbours import NVIDIA_DRIVER, OWNED, Neighbour, Neighbours, Signs, advice, neighbours_of, owners
from kubelet_plugin.ownership import is_listening

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Between two looks at the kubelet's directories."""

NODE_EVERY = 6
"""So many of them for one at the Node: no right to watch it is asked for, and a node more is a request more."""

LISTED_S = 15.0
"""How long to wait for the first list of the DRA driver's slices."""

SOCKETS = ("device-plugins/nvidia*.sock", f"plugins_registry/{NVIDIA_DRIVER}*-reg.sock")

FOUND, GONE = "NeighbourFound", "NeighbourGone"
"""Reasons of Events on the node."""


class _Attributes(msgspec.Struct, frozen=True):
    attributes: dict[str, dict[str, Any]] = {}


class _SliceSpec(msgspec.Struct, frozen=True):
    driver: str
    devices: tuple[_Attributes, ...] | None = None


class TheirSlice(msgspec.Struct, frozen=True):
    """A ResourceSlice, as far as it says whose GPUs it has."""

    metadata: ObjectMeta
    spec: _SliceSpec


class _Metadata(msgspec.Struct, frozen=True):
    labels: dict[str, str] = {}


class _Status(msgspec.Struct, frozen=True):
    allocatable: dict[str, str] = {}


class _Node(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    status: _Status = _Status()


NODE = msgspec.json.Decoder(_Node)


def gpus_of(item: TheirSlice) -> frozenset[str] | None:
    """UUIDs of the GPUs that the devices of a slice are or lie on; None: it is not the other driver's."""
    if item.spec.driver != NVIDIA_DRIVER:
        return None
    found = [
        device.attributes.get(key, {}).get("string")
        for device in item.spec.devices or ()
        for key in ("uuid", "parentUUID")
    ]
    return frozenset(uuid for uuid in found if isinstance(uuid, str) and uuid.startswith("GPU-"))


class NeighbourWatch:
    """Tells the inventory which GPUs are others'. ``on_change`` is called after that changed; it must return quickly.

    ``tell`` takes (reason, message, whether it is a warning) about the node.
    """

    def __init__(
        self,
        client: KubeClient,
        node: str,
        driver: str,
        kubelet_dir: Path,
        mode: Neighbours,
        on_change: Callable[[], None],
        tell: Callable[[str, str, bool], None],
    ) -> None:
        self._client = client
        self._node, self._driver, self._kubelet_dir, self._mode = node, driver, kubelet_dir, mode
        self._on_change, self._tell = on_change, tell
        self._inventory: Inventory | None = None
        self._excluded: Callable[[], int] = lambda: 0
        self._owned: Mapping[str, Neighbour] = {}
        self._said: dict[str, str] = {}
        self._known = False
        self._object = _Node()
        self._news = threading.Event()
        self._listed = threading.Event()
        self._looking = threading.Lock()
        selector = {"fieldSelector": f"spec.nodeName={node},spec.driver={NVIDIA_DRIVER}"}
        self.cache = WatchCache(
            client, f"{GROUP}/resourceslices", TheirSlice, gpus_of, lambda _: self._heard(), selector
        )

    def serve(self, inventory: Inventory, excluded: Callable[[], int]) -> None:
        """The node's GPUs are known; ``excluded`` is how many ``--exclude-gpus`` leaves out."""
        self._inventory, self._excluded = inventory, excluded

    def hands_off(self, gpu: Gpu) -> bool:
        """Whether nothing may be done to ``gpu``: it is a neighbour's, or nobody knows yet."""
        return not self._known or gpu.uuid in self._owned

    def first(self) -> None:
        """Return when neighbours are known; what they own must never be published. Raises ApiError."""
        if not self._known:
            self._look(read_node=True)

    def look(self) -> str | None:
        """Why a node with such neighbours is not ready, or None."""
        if not self._known:
            return "it is not known yet who else hands out GPUs of this node"
        if self._mode is Neighbours.EXCLUDE or not self._owned:
            return None
        said = self._said  # a moment behind what is owned
        return "; ".join(sorted({said.get(each.name, str(each)) for each in self._owned.values()}))

    def run(self, stop: threading.Event) -> None:
        """Look until ``stop`` is set (then call ``wake``)."""
        turn, sockets = 0, frozenset[str]()
        while not stop.is_set():
            now = self._sockets()
            fresh = turn % NODE_EVERY == 0 or now != sockets
            turn, sockets = (1 if fresh else turn + 1), now
            try:
                self._look(read_node=fresh)
            except ApiError as error:
                log.warning("can't look for neighbours, trying again", extra={"error": str(error)})
            except Exception:
                log.exception("defect while looking for neighbours")
            self._news.wait(LOOK_S)
            self._news.clear()

    def wake(self) -> None:
        """Look soon."""
        self._news.set()

    def _heard(self) -> None:
        self._listed.set()
        self.wake()

    def _look(self, *, read_node: bool) -> None:
        with self._looking:
            if read_node or not self._known:
                self._object = self._read_node()
                if not self._listed.wait(LISTED_S):
                    raise ApiError(f"the ResourceSlices of {NVIDIA_DRIVER} can't be listed")
            self._judge(self._signs())
            self._known = True

    def _read_node(self) -> _Node:
        path = f"/api/v1/nodes/{self._node}"
        try:
            return NODE.decode(self._client.get(path, {"resourceVersion": "0"}))
        except msgspec.MsgspecError as error:
            raise ApiError(f"GET {path}: the answer is no Node: {error}") from error

    def _signs(self) -> Signs:
        slices = self.cache.snapshot().values()
        published = frozenset[str]().union(*slices) if slices else None
        return Signs(self._object.status.allocatable, self._object.metadata.labels, published, self._sockets())

    def _judge(self, signs: Signs) -> None:
        inventory = self._inventory
        if inventory is None:
            return
        ours = [gpu.uuid for gpu in inventory.gpus]
        neighbours = neighbours_of(signs, self._driver)
        owned = owners(neighbours, ours, self._excluded(), self._mode)
        told = {
            each.name: advice(each, sum(by is each for by in owned.values()), len(ours), self._mode)
            for each in neighbours
        }
        before, self._owned = self._owned, owned
        self._report(told, {each.name for each in owned.values()})
        changed = inventory.note_owned({uuid: f"{each}{OWNED}" for uuid, each in owned.items()})
        if changed or before.keys() != owned.keys():
            self._on_change()

    def _report(self, told: dict[str, str], owning: set[str]) -> None:
        for name, sentence in told.items():
            if self._said.get(name) != sentence:
                serious = name in owning
                log.log(logging.WARNING if serious else logging.INFO, "neighbour", extra={"why": sentence})
                self._tell(FOUND, sentence, serious)
        for name in self._said.keys() - told.keys():
            log.info("neighbour is gone", extra={"neighbour": name})
            self._tell(GONE, f"{name} is gone from this node", False)
        self._said = told

    def _sockets(self) -> frozenset[str]:
        """Those that somebody listens at: a plugin that was killed leaves its own."""
        wanted = SOCKETS if self._driver != NVIDIA_DRIVER else SOCKETS[:1]
        paths = [path for pattern in wanted for path in self._kubelet_dir.glob(pattern)]
        return frozenset(str(path.relative_to(self._kubelet_dir)) for path in paths if is_listening(path))
