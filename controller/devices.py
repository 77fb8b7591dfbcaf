"""Offers and the devices that carry them, over the cluster (pure but for a memory)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from controller.fenced import PoolDevice
from controller.fleet import Fleet, FleetGpu
from controller.picture import NodeView
from driver.kube.plans import GpuNodePlan
from driver.model.plan import Offer


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """What ``view`` and ``gpus`` come to: the devices that nobody holds, by their offers, and which are open."""

    view: NodeView
    gpus: tuple[FleetGpu, ...]
    standing: Mapping[Offer, PoolDevice]
    open: frozenset[Offer]


Remembered = dict[str, NodeDevices]
"""By node; where nothing has changed it holds on."""


class Devices:
    """``known`` is what an earlier one found, and then what this one has."""

    def __init__(self, views: Iterable[NodeView], fleet: Fleet, known: Remembered | None = None) -> None:
        known = {} if known is None else known
        self.standing: dict[Offer, PoolDevice] = {}
        """What the slices have and nobody holds."""
        self.open: set[Offer] = set()
        """Of these what new claims may get."""
        self.obeying: dict[Offer, PoolDevice] = {}
        """Of these what is on nodes that do what their plans say; others offer as they or a person like."""
        self._views = {view.pool: view for view in views}
        self._pools = {view.name: pool for pool, view in self._views.items()}
        self._fleet = fleet
        for view in self._views.values():
            gpus, found = fleet.nodes.get(view.name, ()), known.get(view.name)
            if found is None or found.view is not view or found.gpus is not gpus:
                found = known[view.name] = _of_node(view, gpus)
            if found.standing:
                self.standing.update(found.standing)
                self.open |= found.open
                self.obeying.update(found.standing if view.follows else {})

    def is_published(self, device: PoolDevice) -> bool:
        """Whether it is in the slices."""
        view = self._views.get(device.pool)
        return view is not None and device.device in view.published

    def offerable(self, offers: Iterable[Offer], plans: Mapping[str, GpuNodePlan]) -> set[Offer]:
        """Without those that a node was told to take away and has not yet: it may be doing so just now.

        Offered again and let out of the fence, they could be given to somebody while they leave the slices.
        """
        found = ((view, plans[view.name].spec.withdrawn) for view in self._views.values() if view.name in plans)
        going = {PoolDevice(view.pool, name) for view, names in found for name in names if name in view.published}
        return {offer for offer in offers if not going & self.of([offer])} if going else set(offers)

    def of(self, offers: Iterable[Offer]) -> set[PoolDevice]:
        """The devices that would carry ``offers``; those of GPUs that are gone, or have no such device, have none."""
        return {device for offer in offers if (device := self._of(offer)) is not None}

    def _of(self, offer: Offer) -> PoolDevice | None:
        gpu = self._fleet.gpus.get(offer.gpu)
        name = gpu.name(offer) if gpu is not None else None
        return None if gpu is None or name is None else PoolDevice(self._pools[gpu.node], name)


def _of_node(view: NodeView, gpus: Collection[FleetGpu]) -> NodeDevices:
    free = view.published.keys() - view.held.keys()
    pairs = ((gpu.offer(name), name) for gpu in gpus for name in free)
    names = {offer: name for offer, name in pairs if offer is not None}
    standing = {offer: PoolDevice(view.pool, name) for offer, name in names.items()}
    return NodeDevices(
        view, tuple(gpus), standing, frozenset(offer for offer, name in names.items() if name in view.offered)
    )
