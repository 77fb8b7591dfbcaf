"""Offers and the devices that carry them, over the whole cluster."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from controller.cluster.claim_index import PoolDevice
from controller.cluster.fleet import Fleet, FleetGpu
from controller.cluster.node_views import NodeChanges, NodeView
from driver.kube.types import GpuNodePlan
from driver.model.device import Device
from driver.model.offer import Offer
from driver.placement.occupancy import overlap


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """The published devices of one node that no claim holds, by their offers; ``offered`` are those that fit.

    ``shared``: the shared devices that claims hold and that new claims can be allocated, too; among ``offered``.
    """

    view: NodeView
    free: Mapping[Offer, PoolDevice]
    offered: frozenset[Offer]
    shared: Mapping[Offer, PoolDevice]


class ComparedPlan(NamedTuple):
    """A plan, and what its node has not done yet of it: devices that are still published, offers that are not."""

    plan: GpuNodePlan
    leaving: frozenset[PoolDevice] = frozenset()
    unpublished: frozenset[Offer] = frozenset()


class UnheldDevices:
    """The published devices of all nodes that no claim holds.

    ``free`` are all of them, by offer; ``offered`` those that new claims can be allocated; ``managed`` those on nodes
    that follow their plans (other nodes offer what they or an operator chose). A shared device that claims hold and
    that has room is only in ``offered``: its node closes it without a fence, and must keep it published.
    """

    def __init__(self) -> None:
        self.free: dict[Offer, PoolDevice] = {}
        self.offered: set[Offer] = set()
        self.managed: dict[Offer, PoolDevice] = {}
        self._shared: dict[Offer, PoolDevice] = {}
        self._complete_nodes: set[str] = set()
        """Names of the nodes that publish every device."""
        self._complete: set[str] = set()
        """UUIDs of their GPUs."""
        self._fleet = Fleet()
        self._by_pool: dict[str, NodeDevices] = {}
        self._with_free: dict[str, NodeDevices] = {}
        """By pool, the nodes with free devices, or with room on shared ones."""
        self._pools: dict[str, str] = {}
        """The names of the pools, by node."""
        self._compared: dict[str, ComparedPlan] = {}
        """By node, until plan or node change."""
        self._plans: Mapping[str, GpuNodePlan] | None = None
        """The plans for which the next two were found; None: a node has changed since."""
        self._leaving: frozenset[PoolDevice] = frozenset()
        self._not_published: frozenset[Offer] = frozenset()

    def update(self, views: Sequence[NodeView], changes: NodeChanges, fleet: Fleet) -> None:
        """Take over ``views`` and the fleet built from them; nodes that did not change are not looked at again."""
        renewed = changes.views
        if changes.membership or self._fleet.hardware is not fleet.hardware:
            renewed, self._by_pool, self._with_free = views, {}, {}
            self._complete_nodes, self._compared = set(), {}
            self._pools = {view.name: view.pool for view in views}
        self._fleet = fleet
        if not renewed and not changes.membership:
            return
        self._plans = None
        for view in renewed:
            self._update_node(view)
        self._complete = {gpu.gpu.uuid for node in self._complete_nodes for gpu in fleet.nodes.get(node, ())}
        self.free, self.offered, self.managed, self._shared = {}, set(), {}, {}
        for node in self._with_free.values():
            self.free.update(node.free)
            self._shared.update(node.shared)
            self.offered |= node.offered
            if node.view.follows_plan:
                self.managed.update(node.free)

    def _update_node(self, view: NodeView) -> None:
        node = self._by_pool[view.pool] = _node_devices(view, self._fleet.nodes.get(view.name, ()))
        self._with_free.pop(view.pool, None)
        if node.free or node.shared:
            self._with_free[view.pool] = node
        self._complete_nodes.discard(view.name)
        if view.is_complete:
            self._complete_nodes.add(view.name)
        self._compared.pop(view.name, None)

    def is_published(self, device: PoolDevice) -> bool:
        node = self._by_pool.get(device.pool)
        return node is not None and device.device in node.view.published

    def lacks_held(self, gpu: FleetGpu) -> bool:
        """Whether the slices lack a device of ``gpu`` that a claim holds."""
        pool = self._pools[gpu.node]
        return not all(self.is_published(PoolDevice(pool, device.name)) for device in gpu.held)

    def on_unable_nodes(self, devices: Iterable[PoolDevice]) -> set[PoolDevice]:
        """Those of ``devices`` on nodes that can start no pod: their plugins may be waiting for the driver, so that no
        taint keeps the scheduler away."""
        nodes = ((device, self._by_pool.get(device.pool)) for device in devices)
        return {device for device, node in nodes if node is not None and node.view.unable}

    def offerable(self, offers: Iterable[Offer], plans: Mapping[str, GpuNodePlan]) -> set[Offer]:
        """``offers`` without devices of complete nodes, and those that ``plans`` withdraw and that are still published.

        The nodes of the latter may be removing them at this moment. If they were offered again and unfenced, they could
        be allocated while they leave the slices.
        """
        self._compare(plans)
        possible = {offer for offer in offers if offer.gpu not in self._complete}
        if not self._leaving:
            return possible
        return {offer for offer in possible if self._leaving.isdisjoint(self.of([offer]))}

    def allocatable(self, fenced: Container[PoolDevice]) -> dict[Offer, PoolDevice]:
        """The ``offered`` devices without ``fenced`` ones."""
        devices = ((offer, self.free.get(offer) or self._shared[offer]) for offer in self.offered)
        return {offer: device for offer, device in devices if device not in fenced}

    def leaving(self, plans: Mapping[str, GpuNodePlan]) -> frozenset[PoolDevice]:
        """The published devices that ``plans`` let nodes remove."""
        self._compare(plans)
        return self._leaving

    def unpublished(self, plans: Mapping[str, GpuNodePlan]) -> frozenset[Offer]:
        """What ``plans`` offer on nodes that follow them, and that is neither in the slices nor held."""
        self._compare(plans)
        return self._not_published

    def _compare(self, plans: Mapping[str, GpuNodePlan]) -> None:
        """Find what nodes have not done yet of what ``plans`` ask for."""
        if self._plans is plans:
            return
        for name, plan in plans.items():
            compared = self._compared.get(name)
            if compared is None or compared.plan is not plan:
                self._compared[name] = self._compare_node(name, plan)
        self._plans = plans
        self._leaving = frozenset().union(*(compared.leaving for compared in self._compared.values()))
        self._not_published = frozenset().union(*(compared.unpublished for compared in self._compared.values()))

    def _compare_node(self, node: str, plan: GpuNodePlan) -> ComparedPlan:
        devices = self._by_pool.get(self._pools.get(node, ""))
        if devices is None:
            return ComparedPlan(plan)
        view = devices.view
        leaving = frozenset(PoolDevice(view.pool, name) for name in plan.spec.withdrawn if name in view.published)
        if not view.follows_plan or view.is_complete:
            return ComparedPlan(plan, leaving)
        gpus = ((offer, self._fleet.gpus.get(offer.gpu)) for offer in plan.spec.offered)
        names = {offer: gpu.device_name(offer.spot) for offer, gpu in gpus if gpu is not None}
        published = view.published.keys() | view.held.keys()
        return ComparedPlan(plan, leaving, frozenset(offer for offer, name in names.items() if name not in published))

    def obstacles(self, offers: Collection[Offer], withdrawn: Collection[PoolDevice]) -> dict[Offer, set[PoolDevice]]:
        """Those of ``offers`` that overlap published devices which no claim holds, except ``withdrawn``, with these.

        On complete nodes counters keep devices apart.
        """
        on_gpu: dict[str, list[tuple[Offer, Device]]] = {}
        gpus = {offer.gpu for offer in offers} - self._complete
        for offer, name in self.free.items():
            if offer.gpu in gpus and name not in withdrawn and (device := self._fleet.device(offer)) is not None:
                on_gpu.setdefault(offer.gpu, []).append((offer, device))
        obstacles: dict[Offer, set[PoolDevice]] = {}
        for offer in offers:
            others = [(other, free) for other, free in on_gpu.get(offer.gpu, ()) if other != offer]
            device = self._fleet.device(offer) if others else None
            overlapping = {self.free[other] for other, free in others if device is not None and overlap(device, free)}
            if overlapping:
                obstacles[offer] = overlapping
        return obstacles

    def of(self, offers: Iterable[Offer]) -> set[PoolDevice]:
        """The devices that carry ``offers``; offers of GPUs that are gone, or lack such a device, are skipped."""
        gpus = ((offer, self._fleet.gpus.get(offer.gpu)) for offer in offers)
        names = ((gpu.node, gpu.device_name(offer.spot)) for offer, gpu in gpus if gpu is not None)
        return {PoolDevice(self._pools[node], name) for node, name in names if name is not None}


def _node_devices(view: NodeView, gpus: Collection[FleetGpu]) -> NodeDevices:
    free = view.published.keys() - view.held.keys()
    names = {
        Offer(gpu.gpu.uuid, spot): name
        for gpu in gpus
        for name in free
        if (spot := gpu.layout.spots.get(name)) is not None
    }
    devices = {offer: PoolDevice(view.pool, name) for offer, name in names.items()}
    states = {gpu.gpu.uuid: gpu.state for gpu in gpus}
    offered = [offer for offer, name in names.items() if name in view.offered]
    fitting = (offer for offer in offered if not view.is_complete or states[offer.gpu].admits(offer.spot))
    shared = {
        Offer(gpu.gpu.uuid, spot): PoolDevice(view.pool, name)
        for gpu in (gpus if view.shared else ())
        for spot in gpu.state.open_spots
        if (name := gpu.device_name(spot)) in view.shared and name in view.offered
    }
    return NodeDevices(view, devices, frozenset(fitting) | shared.keys(), shared)
