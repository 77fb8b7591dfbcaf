"""One node of the fleet: the node plugin's parts, but for hardware, sockets and watches of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from driver.errors import ApiError
from driver.kube.loop import MakeLoop, Repeating
from driver.kube.plans import GpuNodePlan
from driver.kube.transport import KubeClient, Object
from driver.model.device import Device, number_gpus
from driver.model.gpu import Gpu
from driver.model.plan import PlanMode
from driver.slices.build import Content, SliceBuilder
from driver.slices.names import Pool
from driver.slices.publisher import Publisher
from kubelet_plugin.inventory import Holder, Inventory
from kubelet_plugin.plan import PlanFollower
from kubelet_plugin.plan_fence import OwnFence
from kubelet_plugin.plan_memory import Memory, Unkept, new_epoch
from kubelet_plugin.plan_status import PlanStatusWriter
from tessera.fleet.slices import OwnSlices


@dataclass(frozen=True)
class Heard:
    """What a node hears from the controller, through the one watch of the fleet (``kubelet_plugin.plan.Word``)."""

    plan: Callable[[], GpuNodePlan | None]
    alive: Callable[[], bool]


@dataclass(frozen=True)
class Shared:
    """What all nodes have in common. ``plan_of`` is told a node's name; ``follows``: plans, or offers whatever fits."""

    client: KubeClient
    driver: str
    namespace: str
    loop: MakeLoop
    plan_of: Callable[[str], GpuNodePlan | None]
    controller_lives: Callable[[], bool]
    follows: bool


class FleetNode:
    """Begins as a node that followed plans before and has nothing offered yet, or, without plans, alone."""

    def __init__(self, shared: Shared, owner: Mapping[str, str], gpus: Sequence[Gpu]) -> None:
        """``owner`` is the reference to its Node object."""
        self._shared = shared
        client, loop, name = shared.client, shared.loop, owner["name"]
        self.name = name
        self.pool = Pool(name, shared.driver)
        self.inventory = Inventory(gpus, number_gpus(gpus, {}))
        heard = Heard(partial(shared.plan_of, name), shared.controller_lives) if shared.follows else DEAF
        mode = PlanMode.PLANNED if shared.follows else PlanMode.ALONE
        kept = Unkept(Memory(new_epoch(), mode))
        self.follower = PlanFollower(heard, self.inventory, kept, tuple, self.plan_heard)
        self._builder = SliceBuilder(self.pool)
        self._slices = OwnSlices(client, self.pool)
        self._publisher = Publisher(
            client, self.pool, self._desired, lambda: owner, store=self._slices, loop=self._slices_loop
        )
        self._plan_status = PlanStatusWriter(client, heard.plan, self.follower.status, loop=loop)
        self._own_fence = OwnFence(client, shared.namespace, self.pool.name, self.follower.alone, loop)

    @property
    def published(self) -> bool:
        """Whether its slices have been written once."""
        return self._publisher.published.is_set()

    @property
    def slices(self) -> Sequence[Object]:
        """Its slices, by name, uid and version."""
        return tuple(self._slices.snapshot().values())

    def devices(self, names: Sequence[str]) -> list[Device]:
        """Those of its devices that there are."""
        return [device for device in map(self.inventory.device, names) if device is not None]

    def hold(self, holder: Holder, names: Sequence[str]) -> str | None:
        """Prepare a claim's devices, as the plugin does; says what else holds them where that is so."""
        devices = self.devices(names)
        for device in devices:
            if (conflict := self.inventory.conflict(holder.uid, device)) is not None:
                return f"{device.name} overlaps {conflict[1].name}, which {conflict[0]} holds"
        self.inventory.hold(holder, devices)
        self._held_changed()
        return None

    def release(self, uid: str) -> None:
        """Unprepare a claim."""
        self.inventory.release(uid)
        self._held_changed()

    def plan_heard(self) -> None:
        """Look at the plan: it has changed, or how it is taken."""
        self._publisher.notify()
        self._plan_status.notify()
        self._own_fence.notify()

    def _held_changed(self) -> None:
        self._publisher.notify_within(self.follower.held_lag_s)
        self._plan_status.notify()

    def _desired(self) -> Mapping[str, Content]:
        return self._builder.build(self.follower.published())

    def _slices_loop(self, what: str, work: Callable[[], float | None], coalesce_s: float) -> Repeating:
        return self._shared.loop(what, partial(self._reading_after_failure, work), coalesce_s)

    def _reading_after_failure(self, work: Callable[[], float | None]) -> float | None:
        try:
            return work()
        except ApiError:
            self._slices.read()
            raise


DEAF = Heard(lambda: None, lambda: False)
"""Hears nothing: offers whatever fits."""
