"""Single changes after which a pending claim would fit at once, each found by trying it (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import NamedTuple

from msgspec.structs import replace

from controller.cluster.fleet import Fleet, FleetGpu
from controller.demand.device_search import Budget, Outcome, fits
from controller.demand.eligibility import Excluded, Exclusion
from controller.demand.feasibility import Feasibility, Nodes
from controller.demand.pending_claims import PendingClaim, Queue
from controller.demand.requirements import ClaimRequirements, DeviceRequest, Refusal, RequirementsReader
from controller.explain.availability import Availability, Obstacle, listed, without
from controller.explain.reasons import Reasoning
from driver.kube.types import PAUSED

MAX_TRIED = 20_000
"""Sets of claims that are tried on one node in the search for the smallest."""

MAX_NODES = 64
"""Nodes on which releases and changes of single GPUs are tried."""

MAX_CHANGES = 5
"""Changes of one kind that are listed."""


class Change(NamedTuple):
    """``text`` completes "it would fit if"; ``claims``: those that would have to end."""

    kind: str
    text: str
    claims: tuple[str, ...] = ()


class Release(NamedTuple):
    """Claims on ``node`` after whose end it would fit. ``smallest``: no smaller set on any node is enough."""

    node: str
    claims: tuple[str, ...]
    smallest: bool


def changes_that_help(reasoning: Reasoning, pending: PendingClaim) -> list[Change]:
    """What would make room at once for ``pending`` and the other claims of its pod.

    Empty if there is room, or if no single change is enough.
    """
    queue = reasoning.queue
    required = queue.requirements(pending)
    if isinstance(required, Refusal) or not required or pending.key in queue.held_back or queue.satisfiable(pending):
        return []
    alternatives = list(queue.combinations(pending.pods[0]))
    feasibility, nodes = queue.feasibility, queue.nodes(pending)
    found: list[Change] = []
    release = min(
        filter(None, (smallest_release(feasibility, each, nodes, queue.holders) for each in alternatives)),
        key=lambda each: len(each.claims),
        default=None,
    )
    if release is not None:
        found.append(_of_release(release))
    for requirements in alternatives:
        available = [reasoning.availability(request, pending) for request in requirements.requests]
        found += _of_gpus(feasibility, requirements, nodes, available)
        found += _of_nodes(reasoning, pending, requirements)
        found += _of_count(feasibility, requirements, nodes)
    if len(queue.of_pod(pending.pods[0])) == 1 and not pending.not_created:
        found += _of_class(queue, pending)
    return list({each.text: each for each in found}.values())


def _of_release(release: Release) -> Change:
    ended = "claim" if len(release.claims) == 1 else "claims"
    fewest = ", the fewest possible" if release.smallest else ""
    text = f"{ended} {', '.join(release.claims)} ended ({len(release.claims)} on node {release.node}{fewest})"
    return Change("release", text, release.claims)


def smallest_release(
    feasibility: Feasibility,
    requirements: ClaimRequirements,
    nodes: Nodes,
    claim_of: Mapping[tuple[str, str], str],
) -> Release | None:
    """The fewest claims of one node after whose end it satisfies ``requirements``; None if even all are not enough."""
    best: Release | None = None
    smallest = True
    candidates = [node for node, _ in feasibility.unheld.outcomes(requirements, nodes)]
    for node in candidates[:MAX_NODES]:
        gpus = feasibility.fleet.nodes[node]
        if not _fits(feasibility, [entry.unheld for entry in gpus], requirements):
            continue
        holders = sorted(
            {claim_of[node, each.name] for entry in gpus for each in entry.held if (node, each.name) in claim_of}
        )
        limit = len(best.claims) - 1 if best is not None else len(holders)
        found, exact = _fewest(feasibility, gpus, requirements, holders, claim_of, limit)
        smallest &= exact
        if found is not None:
            best = Release(node, found, smallest=True)
    if best is None:
        return None
    return best._replace(smallest=smallest and len(candidates) <= MAX_NODES)


def _fewest(
    feasibility: Feasibility,
    gpus: Sequence[FleetGpu],
    requirements: ClaimRequirements,
    holders: Sequence[str],
    claim_of: Mapping[tuple[str, str], str],
    limit: int,
) -> tuple[tuple[str, ...] | None, bool]:
    """At most ``limit`` of ``holders`` to end; and whether there are certainly no fewer.

    Sets are tried by size. If there are too many, claims are kept one by one as long as it fits without the others.
    """

    def enough(ended: Iterable[str]) -> bool:
        gone = set(ended)
        left = [
            entry.holding(each for each in entry.held if claim_of.get((entry.node, each.name)) not in gone)
            for entry in gpus
        ]
        return _fits(feasibility, left, requirements)

    tried = 0
    for size in range(1, limit + 1):
        tried += comb(len(holders), size)
        if tried > MAX_TRIED:
            break
        found = next((chosen for chosen in combinations(holders, size) if enough(chosen)), None)
        if found is not None:
            return found, True
    else:
        return None, True
    ended = list(holders)
    for each in holders:
        others = [claim for claim in ended if claim != each]
        if enough(others):
            ended = others
    return (tuple(ended) if len(ended) <= limit else None), False


def _fits(feasibility: Feasibility, gpus: Sequence[FleetGpu], requirements: ClaimRequirements) -> bool:
    states = tuple(entry.state for entry in gpus)
    return fits(gpus, states, requirements, feasibility.matching.value, Budget()) is Outcome.FITS


def _of_gpus(
    feasibility: Feasibility, requirements: ClaimRequirements, nodes: Nodes, available: Sequence[Availability]
) -> Iterator[Change]:
    """Single GPUs, or nodes, without what keeps them from use."""
    hindered = {
        entry.gpu.uuid: (obstacle, entry)
        for each in available
        for obstacle, gpus in each.hindered.items()
        for entry in gpus
        if obstacle is not Obstacle.EXCLUDED
    }
    closed = {entry.node for obstacle, entry in hindered.values() if obstacle is Obstacle.CLOSED}
    units = [(Obstacle.CLOSED, feasibility.fleet.nodes[node]) for node in sorted(closed)]
    units += [(obstacle, (entry,)) for obstacle, entry in hindered.values() if obstacle is not Obstacle.CLOSED]
    helping: dict[Obstacle, list[FleetGpu]] = {}
    for obstacle, gpus in units[: MAX_NODES * 8]:
        node = gpus[0].node
        changed = Fleet.of(
            without(entry, obstacle) if entry in gpus else entry for entry in feasibility.fleet.nodes[node]
        )
        if node in nodes and _fits(feasibility, list(changed), requirements):
            helping.setdefault(obstacle, []).append(gpus[0])
    paused = [each for each in helping.get(Obstacle.CLOSED, ()) if PAUSED in each.closed]
    if paused:
        helping[Obstacle.CLOSED] = [each for each in helping[Obstacle.CLOSED] if each not in paused]
        command = f"kubectl annotate gpunodeplan {paused[0].node} {PAUSED}-"
        yield Change("plan-paused", f"the plan of node {_names(Obstacle.CLOSED, paused)} were not paused ({command})")
    for obstacle, found in helping.items():
        if not found:
            continue
        command = f"tessera uncordon {found[0].node}/gpu-{found[0].number}"
        yield Change(obstacle.name.lower(), TEXTS[obstacle].format(_names(obstacle, found), command))


TEXTS = {
    Obstacle.CLOSED: "node {} accepted pods again",
    Obstacle.FAULT: "the fault of {} were repaired ({} clears a fault that has gone)",
    Obstacle.CORDONED: "{} were uncordoned ({})",
    Obstacle.TAINTED: "the request tolerated the taint of {}, or its DeviceTaintRule were deleted",
    Obstacle.RESET: "{} had the other MIG mode, which takes a reset",
    Obstacle.DEDICATED: "{} were not kept for other uses (labels of the node, settings of its node plugin)",
    Obstacle.FOREIGN: "the partitions that others made on {} ended",
}


def _names(obstacle: Obstacle, gpus: Sequence[FleetGpu]) -> str:
    names = [entry.node if obstacle is Obstacle.CLOSED else f"gpu-{entry.number} of {entry.node}" for entry in gpus]
    return listed(names, MAX_CHANGES).replace(", ", " or ")


def _of_nodes(reasoning: Reasoning, pending: PendingClaim, requirements: ClaimRequirements) -> Iterator[Change]:
    """Nodes on which its pod can't run, and that would have room."""
    excluded, feasibility = reasoning.excluded(pending), reasoning.queue.feasibility
    by_exclusion: dict[Excluded, list[str]] = {}
    open_fleet = Fleet.of(without(entry, Obstacle.CLOSED) for entry in feasibility.on(frozenset(excluded)))
    opened = Feasibility(open_fleet, feasibility.matching, imagined=True)
    for node, outcome in opened.outcomes(requirements, frozenset(excluded)):
        if outcome is Outcome.FITS:
            by_exclusion.setdefault(excluded[node], []).append(node)
    yield from admitting(by_exclusion)


def admitting(by_exclusion: Mapping[Excluded, Sequence[str]]) -> Iterator[Change]:
    """For nodes that exclude a pod: that they no longer do."""
    for exclusion, nodes in sorted(by_exclusion.items(), key=lambda each: each[0].text):
        names = listed(sorted(nodes), MAX_CHANGES).replace(", ", " or ")
        if exclusion.kinds == {Exclusion.NOT_READY}:
            yield Change("node-ready", f"node {names} were ready")
        elif exclusion.kinds == {Exclusion.CORDONED}:
            yield Change("node-uncordoned", f"node {names} were uncordoned (kubectl uncordon {min(nodes)})")
        elif exclusion.kinds == {Exclusion.OTHER_CLAIM}:
            claims = exclusion.text.removeprefix("can not have ")
            yield Change("claim-moved", f"{claims}, were allocated on node {names}: it is once no pod uses it")
        else:
            yield Change("node-admitted", f"its pod could run on node {names}, which {exclusion.text}")


def _of_count(feasibility: Feasibility, requirements: ClaimRequirements, nodes: Nodes) -> Iterator[Change]:
    """The same claim for fewer devices."""
    [first, *others] = requirements.requests
    if others or first.count is None:
        return
    for count in range(first.count - 1, 0, -1):
        fewer = requirements._replace(requests=(DeviceRequest(first.name, first.selector, count),))
        if feasibility.find_node(fewer, nodes).outcome is Outcome.FITS:
            yield Change("count", f"request {first.name} asked for {count} instead of {first.count}")
            return


def _of_class(queue: Queue, pending: PendingClaim) -> Iterator[Change]:
    """The same claim for another DeviceClass, if it has one request without selectors."""
    [request, *others] = pending.claim.spec.devices.requests
    wanted = request.exactly
    if others or wanted is None or wanted.selectors or wanted.count > 1 or wanted.takes_all or wanted.admin_access:
        return
    nodes, names = queue.nodes(pending), []
    reader = RequirementsReader(queue.feasibility.matching, queue.cluster.classes, queue.feasibility.fleet)
    for each in queue.cluster.classes:
        name = each.metadata.name
        if name != wanted.device_class_name:
            selector = reader.selector_of(replace(wanted, device_class_name=name), pending.claim.metadata.namespace)
            one = None if selector is None else ClaimRequirements((DeviceRequest(request.name, selector, 1),))
            if one is not None and queue.feasibility.find_node(one, nodes).outcome is Outcome.FITS:
                names.append(name)
    if names:
        yield Change("class", f"its class were {' or '.join(sorted(names)[:MAX_CHANGES])}")
