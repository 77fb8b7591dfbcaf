"""Offers and the devices that carry them, over the cluster (pure but for a memory)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from controller.fenced import PoolDevice
from controller.fleet import Fleet, FleetGpu, Hardware
from controller.picture import NodeView
from driver.kube.plans import GpuNodePlan
from driver.model.plan import Offer


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """What ``view`` and its GPUs come to: the devices that nobody holds, by their offers, and which are open."""

    view: NodeView
    standing: Mapping[Offer, PoolDevice]
    open: frozenset[Offer]


@dataclass
class Remembered:
    """What was found for nodes that have not changed since; ``some`` are those with devices that nobody holds."""

    hardware: Hardware | None = None
    views: Sequence[NodeView] = ()
    by_pool: dict[str, NodeDevices] = field(default_factory=dict)
    some: dict[str, NodeDevices] = field(default_factory=dict)
    pools: dict[str, str] = field(default_factory=dict)
    """The names of the pools, by node."""

    def renew(self, views: Sequence[NodeView], fleet: Fleet) -> None:
        pairs = [(was, now) for was, now in zip(self.views, views, strict=False) if was is not now]
        changed = [now for _, now in pairs]
        same = self.hardware is fleet.hardware and len(self.views) == len(views)
        if not same or any(was.name != now.name for was, now in pairs):
            changed, self.by_pool, self.some = list(views), {}, {}
            self.pools = {view.name: view.pool for view in views}
        for view in changed:
            found = _of_node(view, fleet.nodes.get(view.name, ()))
            self.by_pool[view.pool] = found
            self.some.pop(view.pool, None)
            if found.standing:
                self.some[view.pool] = found
        self.hardware, self.views = fleet.hardware, views


class Devices:
    """``known`` is what an earlier one found, and then what this one has."""

    def __init__(self, views: Sequence[NodeView], fleet: Fleet, known: Remembered | None = None) -> None:
        self._known = known or Remembered()
        self._known.renew(views, fleet)
        self.standing: dict[Offer, PoolDevice] = {}
        """What the slices have and nobody holds."""
        self.open: set[Offer] = set()
        """Of these what new claims may get."""
        self.obeying: dict[Offer, PoolDevice] = {}
        """Of these what is on nodes that do what their plans say; others offer as they or a person like."""
        self._fleet = fleet
        for found in self._known.some.values():
            self.standing.update(found.standing)
            self.open |= found.open
            self.obeying.update(found.standing if found.view.follows else {})

    def is_published(self, device: PoolDevice) -> bool:
        """Whether it is in the slices."""
        found = self._known.by_pool.get(device.pool)
        return found is not None and device.device in found.view.published

    def offerable(self, offers: Iterable[Offer], plans: Mapping[str, GpuNodePlan]) -> set[Offer]:
        """Without those that a node was told to take away and has not yet: it may be doing so just now.

        Offered again and let out of the fence, they could be given to somebody while they leave the slices.
        """
        told = (
            PoolDevice(self._known.pools[name], device)
            for name, plan in plans.items()
            if plan.spec.withdrawn and name in self._known.pools
            for device in plan.spec.withdrawn
        )
        going = set(filter(self.is_published, told))
        return {offer for offer in offers if not going & self.of([offer])} if going else set(offers)

    def of(self, offers: Iterable[Offer]) -> set[PoolDevice]:
        """The devices that would carry ``offers``; those of GPUs that are gone, or have no such device, have none."""
        return {device for offer in offers if (device := self._of(offer)) is not None}

    def _of(self, offer: Offer) -> PoolDevice | None:
        gpu = self._fleet.gpus.get(offer.gpu)
        name = gpu.name(offer) if gpu is not None else None
        return None if gpu is None or name is None else PoolDevice(self._known.pools[gpu.node], name)


def _of_node(view: NodeView, gpus: Collection[FleetGpu]) -> NodeDevices:
    free = view.published.keys() - view.held.keys()
    pairs = ((gpu.offer(name), name) for gpu in gpus for name in free)
    names = {offer: name for offer, name in pairs if offer is not None}
    standing = {offer: PoolDevice(view.pool, name) for offer, name in names.items()}
    return NodeDevices(view, standing, frozenset(offer for offer, name in names.items() if name in view.offered))
