"""The spec of each node's plan, from what is to be offered and what is held (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from controller.cluster.claim_index import PoolDevice
from controller.cluster.fleet import Fleet, FleetGpu
from controller.cluster.node_views import NodeChanges, NodeView
from driver.model.offer import Offer
from driver.model.plan import OfferMode, PlanSpec, PublishHeld


class PlanSpecs:
    """The spec of each node's plan, brought up to date at every decision for the nodes that it concerns.

    ``owners`` are the uids of the Nodes. ``changed`` are nodes whose spec is another than when ``changed`` was cleared.
    """

    def __init__(self) -> None:
        self.specs: dict[str, PlanSpec] = {}
        self.owners: dict[str, str] = {}
        self.changed: set[str] = set()
        self._views: dict[str, NodeView] = {}
        self._node_of_pool: dict[str, str] = {}
        self._dedicated: set[str] = set()
        """Nodes with a use for single GPUs: their specs depend on the fleet, too."""
        self._special: set[str] = set()
        """Nodes that had offers or withdrawn devices last time."""
        self._publish_held: Mapping[str, PublishHeld] = {}
        self._offer_mode = OfferMode.COUNTERS

    def update(
        self,
        views: Sequence[NodeView],
        changes: NodeChanges,
        fleet: Fleet,
        offers: Collection[Offer],
        withdrawn: Collection[PoolDevice],
        publish_held: Mapping[str, PublishHeld],
        offer_mode: OfferMode = OfferMode.COUNTERS,
        listed: Collection[Offer] = (),
    ) -> Mapping[str, PlanSpec]:
        """The specs by node, given what is to be offered and withdrawn, and what each node does with held devices.

        ``listed`` are to be published whether they are offered or not.
        """
        offers_of, listed_of = _by_node(fleet, offers), _by_node(fleet, listed)
        withdrawn_of: dict[str, list[str]] = defaultdict(list)
        for device in withdrawn:
            withdrawn_of[device.pool].append(device.device)
        renewed = self._take_over(views, changes)
        nodes_of_withdrawn = {self._node_of_pool[pool] for pool in withdrawn_of if pool in self._node_of_pool}
        special = offers_of.keys() | listed_of.keys() | self._dedicated | nodes_of_withdrawn
        turned = {name for name, held in publish_held.items() if self._publish_held.get(name) is not held}
        if offer_mode is not self._offer_mode:
            turned = {*self._views}
        self._publish_held, self._offer_mode = dict(publish_held), offer_mode
        for name in renewed | ((self._special | turned) & self._views.keys()) | special:
            view = self._views[name]
            gpus, gone = fleet.nodes.get(name, ()), withdrawn_of.get(view.pool, ())
            offered, published = offers_of.get(name, ()), listed_of.get(name, ())
            self._put(name, _spec(view, gpus, offered, published, gone, publish_held[name], offer_mode))
        self._special = special
        return self.specs

    def _take_over(self, views: Sequence[NodeView], changes: NodeChanges) -> set[str]:
        """Returns the nodes whose views are new."""
        renewed = changes.views
        if changes.membership:
            self.specs, self.owners, self._views, self._node_of_pool, self._dedicated = {}, {}, {}, {}, set()
            renewed = views
        for view in renewed:
            self._views[view.name], self._node_of_pool[view.pool], self.owners[view.name] = view, view.name, view.uid
            (self._dedicated.add if view.dedication.gpus else self._dedicated.discard)(view.name)
        return {view.name for view in renewed}

    def _put(self, name: str, spec: PlanSpec) -> None:
        """Store ``spec``; an equal one stays the same object."""
        if spec != self.specs.get(name):
            self.specs[name] = spec
            self.changed.add(name)


def _by_node(fleet: Fleet, offers: Iterable[Offer]) -> dict[str, list[Offer]]:
    by_node: dict[str, list[Offer]] = defaultdict(list)
    for offer in offers:
        by_node[fleet.gpus[offer.gpu].node].append(offer)
    return by_node


def _spec(
    node: NodeView,
    gpus: tuple[FleetGpu, ...],
    offers: Iterable[Offer],
    listed: Iterable[Offer],
    gone: Sequence[str],
    publish_held: PublishHeld,
    offer_mode: OfferMode,
) -> PlanSpec:
    return PlanSpec(
        epoch=node.status.epoch,
        held=tuple(sorted(map(str, node.held.values()))),
        offers=tuple(sorted(map(str, offers))),
        listed=tuple(sorted(map(str, listed))),
        withdrawn=tuple(sorted(gone)),
        publish_held=publish_held,
        offer_mode=offer_mode,
        dedicated_to=node.dedication.node,
        dedicated_gpus=_dedicated_gpus(node, gpus),
    )


def _dedicated_gpus(node: NodeView, gpus: tuple[FleetGpu, ...]) -> tuple[str, ...]:
    """``UUID=USE`` of the GPUs that have a use of their own."""
    uses = node.dedication.gpus
    return tuple(f"{gpu.gpu.uuid}={uses[gpu.number]}" for gpu in gpus if gpu.number in uses)
