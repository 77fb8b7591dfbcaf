"""One node of a simulated fleet: the node plugin without hardware, sockets and watches of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from driver.errors import ApiError
from driver.kube.client import KubeClient, Object
from driver.kube.controller_heartbeat import HeartbeatWatch
from driver.kube.get_and_list import read_all
from driver.kube.types import GpuNodePlan, Key
from driver.kube.watch_cache import WatchCache
from driver.kube.work_loop import MakeLoop
from driver.model.device import Device, number_gpus
from driver.model.gpu import Gpu
from driver.model.plan import PlanMode
from driver.slices.build import Content, SliceBuilder
from driver.slices.dropped_fields import KeptFields
from driver.slices.publisher import SLICES, PresentSlices, Publisher, SliceWriteObserver
from driver.slices.slice_names import Pool
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.inventory.inventory import ClaimReference, Inventory
from kubelet_plugin.plan.follower import PlanFollower
from kubelet_plugin.plan.instructions import Instructions
from kubelet_plugin.plan.plan_file import PlanMemory, RememberedPlan, new_epoch
from kubelet_plugin.plan.plan_status import FenceRelease, PlanReport, PlanStatusWriter


class OwnSlices(SliceWriteObserver):
    """Name, version and pool of each slice of a node, without a watch: this process is the only writer.

    The publisher knows the content (``driver.slices.publisher.Stored``). If a write fails, all slices are read, because
    another client may have changed them.
    """

    synced = True

    def __init__(self, client: KubeClient, pool: Pool, fields: KeptFields) -> None:
        self._client, self._fields = client, fields
        self._query = {"fieldSelector": f"spec.nodeName={pool.node},spec.driver={pool.driver}"}
        self._kept: dict[Key, Object] = {}

    def snapshot(self) -> Mapping[Key, Object]:
        return self._kept

    def observe(self, stored: Object) -> None:
        metadata, spec = stored["metadata"], stored["spec"]
        names = {name: metadata[name] for name in ("name", "uid", "resourceVersion")}
        self._kept[Key("", metadata["name"])] = {"metadata": names, "spec": {"pool": spec["pool"]}}

    def forget(self, key: Key) -> None:
        self._kept.pop(key, None)

    @contextmanager
    def step(self, *_: object) -> Iterator[None]:
        try:
            yield
        except ApiError:
            self._fields.expire()
            stored_slices = list(read_all(self._client, SLICES, Object, self._query))
            self._kept.clear()
            for stored in stored_slices:
                self.observe(stored)
            raise


@dataclass(frozen=True)
class FleetSettings:
    """``gpus``: those of each node, which get UUIDs of their own. ``leases``: renew the nodes' Leases; otherwise
    Kubernetes marks the nodes not ready."""

    name: str
    nodes: int
    gpus: Sequence[Gpu]
    driver: str
    namespace: str
    mode: PlanMode
    leases: bool


class FleetInstructions:
    """``Instructions`` for one node, by the watches of the whole fleet."""

    def __init__(self, plans: WatchCache[GpuNodePlan, GpuNodePlan], heartbeat: HeartbeatWatch, node: str) -> None:
        self._plans, self._key = plans, Key("", node)
        self.controller_is_alive = heartbeat.alive

    def plan(self) -> GpuNodePlan | None:
        return self._plans.get(self._key)

    def has_controller(self) -> bool:
        return False

    def lacks_plan(self) -> bool:
        return False

    def publishes_all(self) -> bool | None:
        return False


class FleetNode:
    """One node; in mode PLANNED it starts like a node that followed plans before and offers nothing yet."""

    def __init__(
        self,
        client: KubeClient,
        settings: FleetSettings,
        instructions: Instructions,
        loop: MakeLoop,
        owner: Mapping[str, str],
        gpus: Sequence[Gpu],
        fields: KeptFields,
    ) -> None:
        """``owner``: reference to its Node object. ``fields`` is the fleet's."""
        self.name = owner["name"]
        self.pool = Pool(self.name, settings.driver)
        self.inventory = Inventory(gpus, number_gpus(gpus, {}))
        self._owner = owner
        changes = ChangeNotifier()
        memory = RememberedPlan(PlanMemory(new_epoch(), settings.mode))
        self.follower = PlanFollower(instructions, self.inventory, fields, memory, changes)
        self._builder = SliceBuilder(self.pool)
        slices = OwnSlices(client, self.pool, fields)
        self._publisher = Publisher(client, self.pool, self, fields, slices, slices, loop)
        self._plan_status = PlanStatusWriter(client, self.name, PlanReport(self.follower), loop=loop)
        self._fence_release = FenceRelease(client, settings.namespace, self.pool, self.follower.mode_choice, loop)
        changes.subscribe(NodeChange.MODE, self.plan_changed)
        changes.subscribe(NodeChange.PUBLISHED, self._plan_status.notify)

    def desired(self, slices: PresentSlices) -> Mapping[str, Content]:
        return self._builder.build(self.follower.published(slices))

    def monitors(self) -> Mapping[str, Content] | None:
        monitors = self.follower.monitors()
        return None if monitors is None else self._builder.monitors(monitors)

    def is_complete(self) -> bool:
        return True

    def creation_delay(self, absent_since: float | None) -> float:
        return 0.0

    def owner(self) -> Mapping[str, Any]:
        return self._owner

    @property
    def published(self) -> bool:
        return self._publisher.published.is_set()

    def devices(self, names: Sequence[str]) -> list[Device]:
        """Its devices of these names, without those that do not exist."""
        return [device for device in map(self.inventory.device, names) if device is not None]

    def hold(self, holder: ClaimReference, names: Sequence[str]) -> str | None:
        """Hold a claim's devices as the plugin does; returns an error if another claim holds them."""
        devices = self.devices(names)
        for device in devices:
            conflict = self.inventory.conflict(holder.uid, device)
            if conflict is not None:
                other, held = conflict
                return f"{device.name} overlaps {held.name}, which {other.as_holder()} holds"
        self.inventory.hold(holder, devices)
        self._held_changed()
        return None

    def release(self, uid: str) -> None:
        self.inventory.release(uid)
        self._held_changed()

    def plan_changed(self) -> None:
        self._publisher.notify()
        self._plan_status.notify()
        self._fence_release.notify()

    def _held_changed(self) -> None:
        self._publisher.notify_within(self.follower.mode_choice.held_lag_seconds)
        self._plan_status.notify()
