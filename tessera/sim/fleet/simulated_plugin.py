"""One node of a simulated fleet: the node plugin without hardware, sockets and watches of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from driver.errors import ApiError
from driver.kube.client import KubeClient, Object
from driver.kube.reads import read_all
from driver.kube.types import GpuNodePlan, Key
from driver.kube.work_loop import MakeLoop
from driver.model.device import Device, number_gpus
from driver.model.gpu import Gpu
from driver.model.plan import PlanMode
from driver.slices.build import SliceBuilder
from driver.slices.kept_fields import KeptFields
from driver.slices.pool_names import Pool
from driver.slices.publisher import SLICES, Publisher
from kubelet_plugin.inventory.inventory import ClaimReference, Inventory
from kubelet_plugin.plan.api import FenceRelease, PlanStatusWriter
from kubelet_plugin.plan.follower import PlanFollower, PlanMemory, new_epoch


class OwnSlices:
    """Name, version and pool of each slice of a node, without a watch: this process is the only writer.

    The publisher knows the content (``driver.slices.publisher.Stored``).
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
    def read_again_after_failure(self, *_: object) -> Iterator[None]:
        """Around a write: if it fails, read all slices, because another client may have changed them."""
        try:
            yield
        except ApiError:
            self._fields.expire()
            found = list(read_all(self._client, SLICES, Object, self._query))
            self._kept.clear()
            for item in found:
                self.observe(item)
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


class FleetNode:
    """One node; in mode PLANNED it starts like a node that followed plans before and offers nothing yet."""

    def __init__(
        self,
        client: KubeClient,
        settings: FleetSettings,
        plan: Callable[[], GpuNodePlan | None],
        alive: Callable[[], bool],
        loop: MakeLoop,
        owner: Mapping[str, str],
        gpus: Sequence[Gpu],
        fields: KeptFields,
    ) -> None:
        """``plan`` and ``alive``: its plan and the heartbeat, by the watches of the fleet. ``owner``: reference to its
        Node object. ``fields`` is the fleet's."""
        self.name = owner["name"]
        self.pool = Pool(self.name, settings.driver)
        self.inventory = Inventory(gpus, number_gpus(gpus, {}))
        self.follower = PlanFollower(
            plan,
            alive,
            self.inventory,
            PlanMemory(new_epoch(), settings.mode),
            save=lambda *_: None,
            published_before=tuple,
            on_mode=self.plan_changed,
            on_published=lambda: self._plan_status.notify(),
            dropped=lambda: fields.dropped,
        )
        self._builder = SliceBuilder(self.pool)
        slices = OwnSlices(client, self.pool, fields)
        self._publisher = Publisher(
            client,
            self.pool,
            lambda: self._builder.build(self.follower.published()),
            lambda: owner,
            slices.read_again_after_failure,
            store=slices,
            loop=loop,
            fields=fields,
        )
        self._plan_status = PlanStatusWriter(client, self.name, plan, self.follower.status, loop=loop)
        self._fence_release = FenceRelease(
            client, settings.namespace, self.pool.name, self.follower.unplanned_epoch, loop
        )

    @property
    def published(self) -> bool:
        """Whether its slices have been written."""
        return self._publisher.published.is_set()

    def devices(self, names: Sequence[str]) -> list[Device]:
        """Its devices of these names, as far as they exist."""
        return [device for device in map(self.inventory.device, names) if device is not None]

    def hold(self, holder: ClaimReference, names: Sequence[str]) -> str | None:
        """Hold a claim's devices as the plugin does; returns an error if another claim holds them."""
        devices = self.devices(names)
        for device in devices:
            if (conflict := self.inventory.conflict(holder.uid, device)) is not None:
                return f"{device.name} overlaps {conflict[1].name}, which {conflict[0].as_holder()} holds"
        self.inventory.hold(holder, devices)
        self._held_changed()
        return None

    def release(self, uid: str) -> None:
        """Unprepare a claim."""
        self.inventory.release(uid)
        self._held_changed()

    def plan_changed(self) -> None:
        """React to a changed plan or a changed mode."""
        self._publisher.notify()
        self._plan_status.notify()
        self._fence_release.notify()

    def _held_changed(self) -> None:
        self._publisher.notify_within(self.follower.held_lag_seconds)
        self._plan_status.notify()
