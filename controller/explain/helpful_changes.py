"""Changes after which a pending claim would fit at once, each found by trying it (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, islice
from math import comb
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from controller.cluster.fleet import Fleet, FleetGpu
from controller.demand.device_search import SearchOutcome
from controller.demand.feasibility import Feasibility, Nodes
from controller.demand.node_eligibility import Excluded, Exclusion
from controller.demand.pending_claims import Holders, PendingClaim, Queue, holders_of, without_claims
from controller.demand.requirements import ClaimRequirements, DeviceRequest, RefusedRequest, joined
from controller.explain.sources.no_free_device import Reasoning
from controller.explain.sources.selected_gpus import (
    Availability,
    Obstacle,
    by_obstacle,
    listed,
    tainting_rules,
    without,
)
from driver.kube.types import PAUSED, CapacityRequirements
from driver.model.gpu import MigMode
from driver.model.shared_memory import MEMORY_CAPACITY

MAX_TRIED = 20_000
"""Sets of claims that are tried on one node in the search for the smallest."""

MAX_NODES = 64
"""Nodes on which releases are tried; pairs of node and obstacle for which changes of several GPUs are tried."""

MAX_UNITS = 512
"""GPUs, or nodes, from each of which the removal of an obstacle is tried."""

MAX_CHANGES = 5
"""Changes of one kind that are listed."""

REQUEST_CHANGES = {"count", "memory", "constraint"}
"""Kinds of changes of the claim itself: if nothing else helps, changes of several GPUs are tried, too."""


class HelpfulChange(msgspec.Struct, frozen=True):
    """``text`` completes "it would fit if"; ``claims``: those that would have to end."""

    kind: str
    text: str
    claims: tuple[str, ...] = ()


class Release(NamedTuple):
    """Claims on ``node`` after whose end it would fit. ``smallest``: no smaller set on any node is enough."""

    node: str
    claims: tuple[str, ...]
    smallest: bool


def changes_that_help(reasoning: Reasoning, pending: PendingClaim) -> list[HelpfulChange]:
    """What would make room at once for ``pending`` and the other claims of its pod.

    Empty if there is room, if its gang lacks room, or if no change was found.
    """
    queue = reasoning.queue
    if not queue.alternatives(pending) or pending.key in queue.gangs_without_room or queue.satisfiable(pending):
        return []
    alternatives = list(queue.combinations(pending.pods[0]))
    feasibility, nodes = queue.feasibility, queue.nodes(pending)
    changes: list[HelpfulChange] = []
    releases = (smallest_release(feasibility, requirements, nodes, queue.holders) for requirements in alternatives)
    release = min(filter(None, releases), key=lambda release: len(release.claims), default=None)
    if release is not None:
        fewest = ", the fewest possible" if release.smallest else ""
        where = f"({len(release.claims)} on node {release.node}{fewest})"
        changes.append(HelpfulChange("release", f"{_ended(release.claims)} {where}", release.claims))
    seen = [[reasoning.availability(request, pending) for request in chosen.requests] for chosen in alternatives]
    for requirements, available in zip(alternatives, seen, strict=True):
        changes += _of_gpus(feasibility, requirements, nodes, available)
        changes += _of_nodes(reasoning, pending, requirements)
        changes += _of_count(feasibility, requirements, nodes)
        changes += _of_constraints(feasibility, requirements, nodes)
    if all(change.kind in REQUEST_CHANGES for change in changes):
        several = map(partial(_of_several, feasibility, queue.holders), alternatives, seen)
        changes = [*filter(None, several), *changes]
    failures = [availability.request.name for available in seen for availability in available if availability.failure]
    failing = list(dict.fromkeys(failures))
    if failing:  # the scheduler places no pod while one of its selectors fails on a device that it meets
        also = f", and the selectors of request {listed(failing)} failed on no device"
        changes = [replace(change, text=change.text + also) for change in changes]
    if len(queue.of_pod(pending.pods[0])) == 1 and not pending.not_created:
        changes += [*_of_memory(queue, pending), *_of_class(queue, pending)]
    return list({change.text: change for change in changes}.values())


def _ended(claims: Sequence[str]) -> str:
    return f"{'claim' if len(claims) == 1 else 'claims'} {', '.join(claims)} ended"


def smallest_release(
    feasibility: Feasibility,
    requirements: ClaimRequirements,
    nodes: Nodes,
    claims: Holders,
) -> Release | None:
    """The fewest claims of one node after whose end it satisfies ``requirements``; None if even all are not enough."""
    best: Release | None = None
    smallest = True
    candidates = [node for node, _ in feasibility.unheld.outcomes(requirements, nodes)]
    for node in candidates[:MAX_NODES]:
        gpus = feasibility.fleet.nodes[node]
        if not feasibility.fits_on([entry.unheld for entry in gpus], requirements):
            continue
        holders = holders_of(gpus, claims)
        limit = len(best.claims) - 1 if best is not None else len(holders)
        ended, exact = _fewest(feasibility, gpus, requirements, holders, claims, limit)
        smallest &= exact
        if ended is not None:
            best = Release(node, ended, smallest=True)
    if best is None:
        return None
    return best._replace(smallest=smallest and len(candidates) <= MAX_NODES)


def _fewest(
    feasibility: Feasibility,
    gpus: Sequence[FleetGpu],
    requirements: ClaimRequirements,
    holders: Sequence[str],
    claims: Holders,
    limit: int,
) -> tuple[tuple[str, ...] | None, bool]:
    """At most ``limit`` of ``holders`` that must end, None if no such set was found; and whether the answer is certain.

    Sets are tried by size. If there are too many, claims are left out one by one while the rest is enough.
    """

    def enough(ended: Iterable[str]) -> bool:
        gone = frozenset(ended)
        return feasibility.fits_on([without_claims(entry, claims, gone) for entry in gpus], requirements)

    tried = 0
    for size in range(1, limit + 1):
        tried += comb(len(holders), size)
        if tried > MAX_TRIED:
            ended = tuple(holders)
            for holder in holders:
                others = tuple(claim for claim in ended if claim != holder)
                ended = others if enough(others) else ended
            return (ended if len(ended) <= limit else None), False
        fewest = next((chosen for chosen in combinations(holders, size) if enough(chosen)), None)
        if fewest is not None:
            return fewest, True
    return None, True


NODE_WIDE_OBSTACLES = {Obstacle.CLOSED, Obstacle.TAINTED}
"""Obstacles whose removal is tried on all GPUs of a node together."""


def _limited_by_node(available: Sequence[Availability]) -> Iterator[tuple[Obstacle, tuple[FleetGpu, ...]]]:
    """For each node and obstacle, the GPUs that it keeps from providing some selected device."""
    for obstacle, gpus in by_obstacle(availability.selected for availability in available).items():
        by_node: dict[str, list[FleetGpu]] = {}
        for fleet_gpu in gpus:
            by_node.setdefault(fleet_gpu.node, []).append(fleet_gpu)
        yield from ((obstacle, tuple(of_node)) for of_node in by_node.values())


def _fleet_without(feasibility: Feasibility, gpus: Sequence[FleetGpu], obstacle: Obstacle) -> Fleet:
    """The GPUs of the node of ``gpus``, as if ``obstacle`` were removed from ``gpus``."""
    of_node = feasibility.fleet.nodes[gpus[0].node]
    return Fleet.of(without(entry, obstacle) if entry in gpus else entry for entry in of_node)


def _of_gpus(
    feasibility: Feasibility, requirements: ClaimRequirements, nodes: Nodes, available: Sequence[Availability]
) -> Iterator[HelpfulChange]:
    """The removal of an obstacle from a single GPU, or from a whole node for ``NODE_WIDE_OBSTACLES``."""
    units = [
        (obstacle, gpus if obstacle in NODE_WIDE_OBSTACLES else (entry,))
        for obstacle, gpus in _limited_by_node(available)
        for entry in (gpus[:1] if obstacle in NODE_WIDE_OBSTACLES else gpus)
    ]
    helping: dict[Obstacle, list[FleetGpu]] = {}
    for obstacle, gpus in units[:MAX_UNITS]:
        changed = _fleet_without(feasibility, gpus, obstacle)
        if gpus[0].node in nodes and feasibility.fits_on(list(changed), requirements):
            helping.setdefault(obstacle, []).append(gpus[0])
    paused = [gpu for gpu in helping.get(Obstacle.CLOSED, ()) if PAUSED in gpu.why_no_offers]
    if paused:
        helping[Obstacle.CLOSED] = [gpu for gpu in helping[Obstacle.CLOSED] if gpu not in paused]
        yield HelpfulChange("plan-paused", _text(Obstacle.CLOSED, paused))
    for obstacle, helpful in helping.items():
        if helpful:
            yield HelpfulChange(obstacle.name.lower(), _text(obstacle, helpful))


TEXTS = {
    Obstacle.CLOSED: "node {} accepted pods again",
    Obstacle.FAULT: "the fault of {} were repaired ({} clears a fault that has gone)",
    Obstacle.CORDONED: "{} were uncordoned ({})",
    Obstacle.RESERVED: "{} were left to Tessera by the other driver of the node (docs/soundness.md)",
    Obstacle.ADOPTED: "the claims that NVIDIA's DRA driver prepared on {} ended",
    Obstacle.TAINTED: "{} were deleted, or the request tolerated {}",
    Obstacle.RESET: "{} had the other MIG mode, which takes a reset",
    Obstacle.DEDICATED: "{} were not kept for other uses (labels of the node, settings of its node plugin)",
    Obstacle.FOREIGN: "the partitions that others made on {} ended",
}


def _of_several(
    feasibility: Feasibility,
    claims: Holders,
    requirements: ClaimRequirements,
    available: Sequence[Availability],
) -> HelpfulChange | None:
    """The removal of one obstacle from several GPUs of a node, and the claims that must end there, too.

    GPUs that are not needed are left out one by one; the change with the fewest GPUs and claims is returned.
    """
    best: tuple[int, Obstacle, tuple[FleetGpu, ...], tuple[str, ...]] | None = None
    for obstacle, limited in islice(_limited_by_node(available), MAX_NODES):
        cleared, fleet, ended = limited, _fleet_without(feasibility, limited, obstacle), tuple[str, ...]()
        if not feasibility.fits_on(list(fleet.unheld), requirements):
            continue
        for entry in sorted(limited, key=_effort, reverse=True) if obstacle not in NODE_WIDE_OBSTACLES else ():
            others = tuple(gpu for gpu in cleared if gpu is not entry)
            changed = _fleet_without(feasibility, others, obstacle) if others else fleet
            if others and feasibility.fits_on(list(changed.unheld), requirements):
                cleared, fleet = others, changed
        if not feasibility.fits_on(list(fleet), requirements):
            imagined = Feasibility(fleet, feasibility.matching, is_hypothetical=True)
            release = smallest_release(imagined, requirements, frozenset({limited[0].node}), claims)
            if release is None:
                continue
            ended = release.claims
        if best is None or len(cleared) + len(ended) < best[0]:
            best = len(cleared) + len(ended), obstacle, cleared, ended
    if best is None:
        return None
    _, obstacle, cleared, ended = best
    text = _text(obstacle, cleared, "and")
    also = f", and {_ended(ended)}" if ended else ""
    return HelpfulChange(obstacle.name.lower(), text + also, ended)


def _effort(entry: FleetGpu) -> tuple[bool, bool]:
    """Sort key: GPUs that hold nothing first; of equals those whose new MIG mode is set and only awaits a reset."""
    return bool(entry.held), entry.gpu.mig_mode not in {MigMode.RESET_TO_ENABLE, MigMode.RESET_TO_DISABLE}


def _text(obstacle: Obstacle, gpus: Sequence[FleetGpu], between: str = "or") -> str:
    """``obstacle`` removed from one of ``gpus``, or from all of them."""
    names, first = _names(obstacle, gpus, between), gpus[0]
    if PAUSED in first.why_no_offers:
        return f"the plan of node {names} were not paused (kubectl annotate gpunodeplan {first.node} {PAUSED}-)"
    if obstacle is Obstacle.TAINTED:
        return TEXTS[obstacle].format(names, "their taints" if len(first.tainted) > 1 else "its taint")
    return TEXTS[obstacle].format(names, f"tessera uncordon {first.node}/gpu-{first.number}")


def _names(obstacle: Obstacle, gpus: Sequence[FleetGpu], between: str = "or") -> str:
    if obstacle is Obstacle.CLOSED:
        names = [entry.node for entry in gpus]
    elif obstacle is Obstacle.TAINTED:
        names = [tainting_rules(entry) for entry in gpus]
    else:
        names = [f"gpu-{entry.number} of {entry.node}" for entry in gpus]
    return listed(list(dict.fromkeys(names)), MAX_CHANGES).replace(", ", f" {between} ")


def _of_nodes(reasoning: Reasoning, pending: PendingClaim, requirements: ClaimRequirements) -> Iterator[HelpfulChange]:
    """Nodes on which its pod can't run, and that would have room."""
    excluded, feasibility = reasoning.excluded(pending), reasoning.queue.feasibility
    by_exclusion: dict[Excluded, list[str]] = {}
    open_fleet = Fleet.of(without(entry, Obstacle.CLOSED) for entry in feasibility.gpus_on(frozenset(excluded)))
    opened = Feasibility(open_fleet, feasibility.matching, is_hypothetical=True)
    moved = _with_allocated(reasoning.queue, pending, requirements)
    for node, outcome in opened.outcomes(requirements, frozenset(excluded)):
        if outcome is SearchOutcome.FITS and (
            Exclusion.OTHER_CLAIM not in excluded[node].kinds or (moved and _fits_on(opened, moved, node))
        ):
            by_exclusion.setdefault(excluded[node], []).append(node)
    yield from changes_that_admit(by_exclusion)


def _fits_on(feasibility: Feasibility, requirements: ClaimRequirements, node: str) -> bool:
    return feasibility.find_node(requirements, frozenset({node})).outcome is SearchOutcome.FITS


def _with_allocated(queue: Queue, pending: PendingClaim, requirements: ClaimRequirements) -> ClaimRequirements | None:
    """``requirements`` and those of the pod's allocated claims together, as if these were allocated anew.

    None if one of them has devices of other drivers: whether they have more on another node is not known.
    """
    claims = [requirements]
    for claim in filter(None, map(queue.cluster.claims.find, pending.pods[0].claims)):
        if claim.status.allocation is not None:
            alternatives = queue.reader.read(claim).requirements
            if isinstance(alternatives, RefusedRequest) or not alternatives:
                return None
            claims.append(alternatives[0])
    return joined(claims)


def changes_that_admit(by_exclusion: Mapping[Excluded, Sequence[str]]) -> Iterator[HelpfulChange]:
    """The changes after which nodes would no longer exclude a pod, by what excludes it now."""
    for exclusion, nodes in sorted(by_exclusion.items(), key=lambda item: item[0].text):
        names = listed(sorted(nodes), MAX_CHANGES).replace(", ", " or ")
        if exclusion.kinds == {Exclusion.NOT_READY}:
            yield HelpfulChange("node-ready", f"node {names} were ready")
        elif exclusion.kinds == {Exclusion.CORDONED}:
            yield HelpfulChange("node-uncordoned", f"node {names} were uncordoned (kubectl uncordon {min(nodes)})")
        elif exclusion.kinds == {Exclusion.OTHER_CLAIM}:
            claims = " and ".join(exclusion.claims)
            anew = "a claim is allocated anew once no pod uses it"
            yield HelpfulChange("claim-moved", f"{claims}, were allocated on node {names} ({anew})")
        else:
            yield HelpfulChange("node-admitted", f"its pod could run on node {names}, which {exclusion.text}")


def _of_count(feasibility: Feasibility, requirements: ClaimRequirements, nodes: Nodes) -> Iterator[HelpfulChange]:
    """The same claim for fewer devices."""
    [first, *others] = requirements.requests
    if others or first.count is None:
        return
    for count in range(first.count - 1, 0, -1):
        fewer = requirements._replace(requests=(DeviceRequest(first.name, first.selector, count),))
        if feasibility.find_node(fewer, nodes).outcome is SearchOutcome.FITS:
            yield HelpfulChange("count", f"request {first.name} asked for {count} instead of {first.written_count}")
            return


def _of_constraints(feasibility: Feasibility, requirements: ClaimRequirements, nodes: Nodes) -> Iterator[HelpfulChange]:
    """The same requests without the constraints on one attribute."""
    constraints = requirements.constraints
    for attribute, distinct in dict.fromkeys((constraint.attribute, constraint.distinct) for constraint in constraints):
        others = tuple(
            constraint
            for constraint in constraints
            if (constraint.attribute, constraint.distinct) != (attribute, distinct)
        )
        if feasibility.find_node(requirements._replace(constraints=others), nodes).outcome is SearchOutcome.FITS:
            values = "different values" if distinct else "the same value"
            field = "distinctAttribute" if distinct else "matchAttribute"
            yield HelpfulChange("constraint", f"its devices did not need {values} of {attribute} ({field})")


def _of_memory(queue: Queue, pending: PendingClaim) -> Iterator[HelpfulChange]:
    """The same claim for less memory of a shared GPU, if it has one request."""
    [request, *others] = pending.claim.spec.devices.requests
    exact, nodes = request.exactly, queue.nodes(pending)
    gib = max((gpu.state.left for gpu in queue.feasibility.gpus_on(nodes)), default=0)
    if others or exact is None or exact.takes_all or exact.admin_access or not gib:
        return
    amounts = {} if exact.capacity is None else exact.capacity.requests
    less = replace(exact, capacity=CapacityRequirements({**amounts, MEMORY_CAPACITY: f"{gib}Gi"}))
    selector = queue.reader.selector_of(less, pending.claim.metadata.namespace)
    if selector is None:
        return
    requirements = ClaimRequirements((DeviceRequest(request.name, selector, exact.count),))
    if queue.feasibility.find_node(requirements, nodes).outcome is SearchOutcome.FITS:
        instead = amounts.get(MEMORY_CAPACITY, "all")
        yield HelpfulChange("memory", f"request {request.name} asked for memory {gib}Gi instead of {instead}")


def _of_class(queue: Queue, pending: PendingClaim) -> Iterator[HelpfulChange]:
    """The same claim for another DeviceClass, if it has one request without selectors."""
    [request, *others] = pending.claim.spec.devices.requests
    exact = request.exactly
    if others or exact is None or exact.selectors or exact.count > 1 or exact.takes_all or exact.admin_access:
        return
    nodes, names = queue.nodes(pending), []
    for device_class in queue.cluster.classes:
        name = device_class.metadata.name
        if name != exact.device_class_name:
            of_class = replace(exact, device_class_name=name)
            selector = queue.reader.selector_of(of_class, pending.claim.metadata.namespace)
            if selector is None:
                continue
            requirements = ClaimRequirements((DeviceRequest(request.name, selector, 1),))
            if queue.feasibility.find_node(requirements, nodes).outcome is SearchOutcome.FITS:
                names.append(name)
    if names:
        yield HelpfulChange("class", f"its class were {' or '.join(sorted(names)[:MAX_CHANGES])}")
