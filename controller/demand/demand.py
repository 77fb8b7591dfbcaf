"""The devices to offer so that pending claims can be allocated (pure): which kind, and on which GPUs.

A larger kind than the smallest that a claim accepts is demanded only where no smaller one has room. Kinds that are
offered without a pending claim are those of ``default_kinds`` (``controller.curation.ranked_fleet``).

For a claim that requests one device, demand names the GPUs that have such a device; for several devices it names sets
of GPUs, one of which must provide them all. Some requirements can't be expressed so: devices of different kinds on one
node, different values of an attribute, certain placements. For these it names the fullest node that satisfies them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from controller.demand.feasibility import Feasibility, Group, Nodes, SelectedKind
from controller.demand.gpu_equivalence_classes import PLACEMENT_ATTRIBUTE
from controller.demand.pending_claims import PendingClaim, Queue
from controller.demand.requirements import ClaimRequirements, DeviceRequest, joined
from driver.model.offer import OfferKind

NONE: Mapping[str, Nodes] = MappingProxyType({})

Eligible = frozenset[str] | None
"""UUIDs of the eligible GPUs; None: every GPU."""


@dataclass(frozen=True)
class Demand:
    """Devices that pending claims need: ``count`` of ``kind`` on the GPUs of ``eligible``.

    ``together``: sets of GPUs, one of which must provide all ``count`` devices: the GPUs of each node or, with
    matchAttribute constraints, those of a node with equal values (an NVLink clique; a single GPU for partitions of one
    GPU). Empty if any GPUs of ``eligible`` will do. ``all_devices``: offer all devices of ``kind`` that are possible on
    ``eligible``: sets of GPUs can't describe what the claim needs, it requests all devices, or no offer served it.
    ``gib``: what each claim needs of a shared device.
    """

    kind: OfferKind
    count: int = 1
    eligible: Eligible = None
    together: tuple[frozenset[str], ...] = ()
    all_devices: bool = False
    gib: int = 0


def demand_of(queue: Queue, widened: Mapping[str, Nodes] = NONE) -> list[Demand]:
    """Demand for every pending claim, except those of gangs that the scheduler can not place at present.

    A gang's pods that are not created yet count, too: their offers must be published before the scheduler's first
    attempt, since it tries again only after a second, and then at growing intervals. Claims for one device with equal
    eligible GPUs make one demand.

    ``widened``: by key of a claim, the nodes that offer all matching devices (``controller.curation.overdue_claims``).
    """
    placeable = (pending for pending in queue.pending if pending.key not in queue.gangs_without_room)
    demands = [demand for pending in placeable for demand in _of_claim(queue, pending)]
    for pending, count in queue.future_claims:
        for demand in _of_claim(queue, pending):
            demands += [demand] * count if demand.together else [replace(demand, count=count * demand.count)]
    for pending in queue.pending:
        if pending.key in widened:
            demands += _all_of_claim(queue, pending, widened[pending.key])
    demands += [Demand(selected.kind, 1, gpus, all_devices=True) for selected, gpus in _kinds_of_request_for_all(queue)]
    plain: Counter[tuple[OfferKind, Eligible, int]] = Counter()
    rest: list[Demand] = []
    for demand in demands:
        if demand.together or demand.all_devices:
            rest.append(demand)
        else:
            plain[demand.kind, demand.eligible, demand.gib] += demand.count
    return [*(Demand(kind, count, eligible, gib=gib) for (kind, eligible, gib), count in plain.items()), *rest]


def nodes_with_requests_for_all(queue: Queue) -> Nodes:
    """The nodes that must publish their held devices, because a pending claim requests all devices of a node."""
    gpus = frozenset[str]().union(*(gpus for _, gpus in _kinds_of_request_for_all(queue)))
    return frozenset(queue.feasibility.fleet.gpus[uuid].node for uuid in gpus)


def _kinds_of_request_for_all(queue: Queue) -> Iterator[tuple[SelectedKind, Group]]:
    """The kinds of devices, and their GPUs, that requests for all devices select, held or not."""
    for pending, request in queue.requests_for_all:
        yield from queue.feasibility.kinds(request.selector, queue.nodes(pending)).items()


def _of_claim(queue: Queue, pending: PendingClaim) -> Iterator[Demand]:
    """For each request, demand for the smallest kind of device that it selects and that there is room for.

    Meanwhile larger kinds are not offered for it, because the scheduler might allocate them: a whole GPU for a claim of
    2 GiB.
    """
    requirements = queue.preferred_requirements(pending)
    if requirements is None:
        return
    nodes = queue.nodes(pending)
    on_one_node = _on_one_node(queue, pending, requirements, nodes)
    if on_one_node is not None:
        yield from on_one_node
        return
    for index, request in enumerate(requirements.requests):
        attributes = _equal_attributes(requirements, index) if requirements.constraints else ()
        kinds = queue.feasibility.smallest_first(request.selector, nodes)
        if len(kinds) > 1 and request.count is not None:
            with_room = (kind for kind in kinds if queue.feasibility.has_room(request, kind, nodes, attributes))
            kinds = [next(with_room, kinds[0])]
        for selected in kinds:
            yield from _of_kind(queue.feasibility, request, selected, nodes, attributes)


def _all_of_claim(queue: Queue, pending: PendingClaim, nodes: Nodes) -> Iterator[Demand]:
    """All devices on ``nodes`` for a claim and the other claims of its pods, for every alternative."""
    companions = queue.companions(pending)
    for request in {request for companion in companions for request in queue.requests(companion)}:
        for selected, gpus in queue.feasibility.kinds(request.selector, nodes).items():
            yield Demand(selected.kind, request.count or 1, gpus, all_devices=True)


def _of_kind(
    feasibility: Feasibility, request: DeviceRequest, selected: SelectedKind, nodes: Nodes, attributes: tuple[str, ...]
) -> Iterator[Demand]:
    """``attributes``: each device must have them, and all the same values."""
    count = feasibility.count(request, selected, nodes)
    eligible = feasibility.kinds(request.selector, nodes)[selected]
    if attributes:
        eligible = frozenset().union(*feasibility.gpu_sets(request, selected, nodes, attributes))
    if not count or not eligible:
        return
    by_placement = selected.starts is not None
    anywhere = not by_placement and len(eligible) == feasibility.gpus_with(selected.kind)
    together: tuple[frozenset[str], ...] = ()
    if request.count != 1:
        query = (request, selected, nodes, attributes)
        together = feasibility.sufficient_gpu_sets(*query) or tuple(map(frozenset, feasibility.gpu_sets(*query)))
    chosen = None if anywhere else eligible
    yield Demand(selected.kind, count, chosen, together, all_devices=by_placement, gib=selected.gib)


def _on_one_node(
    queue: Queue, pending: PendingClaim, requirements: ClaimRequirements, nodes: Nodes
) -> Iterable[Demand] | None:
    """Demand on the node found for a claim; None if the demand of each request is enough, or if no node is found.

    One node is chosen if the claim has several requests or companions, or if all matching devices must be offered
    because sets of GPUs can't describe it: it selects or constrains placements, needs different values, has constraints
    of several requests, or devices of several kinds are allocated together. Of several kinds, the best place of one may
    lie on the very GPU that another one needs. The kinds are the smallest that the node can provide together.
    """
    feasibility, companions = queue.feasibility, queue.companions(pending)
    all_claims = [claim for claim in map(queue.preferred_requirements, companions) if claim is not None]
    requests = [request for claim in all_claims for request in claim.requests]
    kinds = {selected for request in requests for selected in feasibility.kinds(request.selector, nodes)}
    several = len(requirements.requests) > 1
    constrains_placement = any(
        constraint.attribute.rpartition("/")[2] == PLACEMENT_ATTRIBUTE for constraint in requirements.constraints
    )
    constrained = constrains_placement or any(constraint.distinct or several for constraint in requirements.constraints)
    single = len(requirements.requests) == len(companions) == 1
    mixed = len(kinds) > 1 and not (single and _is_of_one_kind(feasibility, requirements, kinds, nodes))
    offers_all = constrained or mixed or any(selected.starts is not None for selected in kinds)
    if single and not offers_all:
        return None
    node = queue.find_node(pending).node
    if node is None:
        return None
    only = frozenset({node})
    small = feasibility.smallest_kinds(joined(all_claims), node) if len(kinds) > 1 else frozenset()
    return [
        Demand(selected.kind, count, gpus, all_devices=offers_all, gib=selected.gib)
        for request in requirements.requests
        for selected, gpus in feasibility.kinds(request.selector, only).items()
        if (not small or selected.kind in small) and (count := feasibility.count(request, selected, only))
    ]


def _is_of_one_kind(
    feasibility: Feasibility, requirements: ClaimRequirements, kinds: Iterable[SelectedKind], nodes: Nodes
) -> bool:
    """Whether devices of one kind can satisfy the only request on some node, or it asks for all devices of a node."""
    (request,), attributes = requirements.requests, _equal_attributes(requirements, 0)
    return request.count in {1, None} or any(feasibility.has_room(request, kind, nodes, attributes) for kind in kinds)


def _equal_attributes(requirements: ClaimRequirements, index: int) -> tuple[str, ...]:
    """The attributes of which all devices of the request at ``index`` must have the same values."""
    constraints = requirements.constraints
    return tuple(
        constraint.attribute for constraint in constraints if index in constraint.requests and not constraint.distinct
    )
