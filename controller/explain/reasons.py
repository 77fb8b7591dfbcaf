"""The reason why no free device satisfies a pending claim (pure).

Permanent reasons hold whatever devices other claims release. They come before temporary ones: users are not asked to
wait in vain, and the reason stays the same while other claims come and go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from controller.cluster.fleet import FleetGpu
from controller.cluster.node_views import ALL_REPORTED, UnreportedNodes
from controller.demand.device_search import Outcome
from controller.demand.feasibility import Feasibility, Nodes
from controller.demand.gangs import Gang
from controller.demand.pending_claims import PendingClaim, Queue
from controller.demand.requirements import MAX_DEVICES, ClaimRequirements, DeviceRequest, Refusal
from controller.demand.selected_devices import Selector
from controller.explain.gangs import reason_of_gang
from controller.explain.gpu_obstacles import Obstacle, Shortage, holders, joined, listed, named, reset_steps, shortage
from driver.config.suggestions import meant
from driver.kube.types import Metadata
from driver.model.device import DeviceKind


class ReasonCode(StrEnum):
    """Reasons. Of several alternatives of a claim, the one with the last code in this list is reported."""

    NO_SUCH_CLASS = "NoSuchClass"
    SELECTOR_REFUSED = "SelectorRefused"
    NO_GPUS = "NoGpusKnown"
    NOTHING_MATCHES = "NothingMatches"
    SELECTOR_FAILS = "SelectorFails"
    TOO_MANY = "TooMany"
    NO_NODE = "NoNode"
    OTHER_NODES = "OnOtherNodesOnly"
    CONSTRAINT = "ConstraintNotMet"
    NOT_TOGETHER = "NotOnOneNode"
    DEDICATED = "NotOfferedThere"
    FAULT = "GpuFault"
    FOREIGN = "ForeignPartitions"
    RESET = "GpuNeedsReset"
    FRAGMENTED = "Fragmented"
    HELD = "AllHeld"
    UNUSED = "OfferStandsUnused"
    """Of a claim that can be satisfied (``controller.explain.pending_despite_offers``)."""

    RESHAPING = "Reshaping"
    """Of a claim for which offers of a GPU are being replaced (``controller.explain.disjoint_offers``)."""

    BEHIND = "BehindOthers"
    """Of a claim for which other claims leave no room (ibid.)."""

    GANG = "PodGroupNeedsMore"
    """Of a claim whose PodGroup can not be placed as a whole (``controller.explain.gangs``)."""


OF_OBSTACLE = {
    Obstacle.FAULT: (ReasonCode.FAULT, "a fault or an operator keeps {} from use"),
    Obstacle.RESET: (ReasonCode.RESET, "a reset must first give {} another MIG mode"),
    Obstacle.DEDICATED: (ReasonCode.DEDICATED, "labels, settings or a pause of the node's plan keep {} for other uses"),
    Obstacle.FOREIGN: (ReasonCode.FOREIGN, "partitions that Tessera did not make take the place on {}"),
}

LITERAL = re.compile(r"\.(\w+)\s*==\s*\"([^\"]*)\"")
"""A comparison of an attribute with a string."""

SHOWN_PRODUCTS = 5
"""Products that a message names."""

NOT_DIVIDED = "no GPU is divided into shares (node plugin: --shares, e.g. nodePlugin.extraArgs={--shares=all=10})"


class ClaimReason(NamedTuple):
    """The reason of one pending claim."""

    pending: PendingClaim
    code: ReasonCode
    sentence: str
    group: Metadata | None = None
    """The PodGroup that the reason is about."""


@dataclass(frozen=True)
class Reason:
    """``permanent``: it holds whatever other claims release, until the claim or the fleet changes."""

    code: ReasonCode
    sentence: str
    permanent: bool = False

    @property
    def nearness(self) -> tuple[bool, int]:
        """Sort key: the alternative with the greatest is nearest to being satisfied."""
        return (not self.permanent, list(ReasonCode).index(self.code))


def reasons_of(queue: Queue, unreported: UnreportedNodes = ALL_REPORTED) -> list[ClaimReason]:
    """One reason for each pending claim that no free device can satisfy, or whose gang lacks devices.

    Claims are left out if the bounded search is undecided, if they request only devices of other drivers, and, with
    permanent reasons, while nodes may still report GPUs.
    """
    reasoning = Reasoning(queue)
    found = (reason_of(each, reasoning, queue, unreported) for each in queue.pending)
    return [reason for reason in found if reason is not None]


def reason_of(
    pending: PendingClaim, reasoning: Reasoning, queue: Queue, unreported: UnreportedNodes
) -> ClaimReason | None:
    """The reason of one claim, as for ``reasons_of``."""
    reason = _qualified(reasoning.of_claim_or_gang(pending), queue, unreported)
    if reason is None:
        return None
    group = queue.held_back[pending.key].group.metadata if reason.code is ReasonCode.GANG else None
    return ClaimReason(pending, reason.code, reason.sentence, group)


def _qualified(reason: Reason | None, queue: Queue, unreported: UnreportedNodes) -> Reason | None:
    """``reason``, as far as it holds although GPUs of some nodes are unknown."""
    if reason is None or not reason.permanent:
        return reason
    if unreported.may_report:
        return None
    if queue.feasibility.fleet.gpus:
        unknown = f" (nothing is known yet of the GPUs of {listed(unreported.nodes)})" if unreported.nodes else ""
        return replace(reason, sentence=reason.sentence + unknown)
    if unreported.nodes:
        nodes = listed(unreported.nodes)
        sentence = f"no node has reported its GPUs yet: see the log of the node plugin on {nodes}"
    else:
        sentence = "no node has reported a GPU: does the node plugin run there? (kubectl get gpunodeplans)"
    return Reason(ReasonCode.NO_GPUS, sentence, permanent=True)


class Reasoning:
    """Finds reasons; equal requirements of several claims are examined once."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._feasibility = queue.feasibility
        self._shortages: dict[tuple[Selector, Nodes], Shortage] = {}
        self._known: dict[tuple[ClaimRequirements, Nodes], Reason | None] = {}
        self._of_gang: dict[Gang, Reason | None] = {}

    def of_claim_or_gang(self, pending: PendingClaim) -> Reason | None:
        """The permanent reason of ``pending``, that of its gang, or its temporary one."""
        reason, gang = self.of(pending), self._queue.held_back.get(pending.key)
        if gang is None or (reason is not None and reason.permanent):
            return reason
        if gang not in self._of_gang:
            found = reason_of_gang(self._queue, gang)
            self._of_gang[gang] = None if found is None else Reason(ReasonCode.GANG, *found)
        return self._of_gang[gang] or reason

    def of(self, pending: PendingClaim) -> Reason | None:
        """Why no free device satisfies ``pending``; None if one does, or if the search is undecided."""
        queue = self._queue
        alternatives = queue.requirements(pending)
        if isinstance(alternatives, Refusal):
            return Reason(ReasonCode(alternatives.code), alternatives.sentence)
        if not alternatives or queue.found(pending).outcome is not Outcome.NONE:
            return None
        nodes = queue.nodes(pending)
        reasons = [reason for each in alternatives if (reason := self._of_requirements(each, nodes)) is not None]
        if len(reasons) < len(alternatives):
            return self._of_pod(pending)
        best = max(reasons, key=lambda reason: reason.nearness)
        if not best.permanent and len(queue.companions(pending)) > 1 and self._pod_is_impossible(pending):
            return self._of_pod(pending)
        if len(alternatives) == 1:
            return best
        return replace(best, sentence=f"{best.sentence} (none of its {len(alternatives)} alternatives is nearer)")

    def _of_requirements(self, requirements: ClaimRequirements, nodes: Nodes) -> Reason | None:
        """Why a claim cannot be satisfied even alone; None if it can."""
        key = (requirements, nodes)
        if key not in self._known:
            self._known[key] = self._permanent(requirements, nodes) or self._at_present(requirements, nodes)
        return self._known[key]

    def _of_pod(self, pending: PendingClaim) -> Reason:
        """The reason of a claim that can be satisfied alone, but not together with the other claims of its pod."""
        claims = {each for pod in pending.pods for each in self._queue.of_pod(pod)} - {pending}
        others = ", ".join(sorted(str(each.claim.metadata.key) for each in claims))
        impossible = self._pod_is_impossible(pending)
        when = "even if nothing were held" if impossible else "at present"
        sentence = f"it could be met, but {when} not on one node with the other claims of its pod: {others}"
        return Reason(ReasonCode.NOT_TOGETHER, sentence, impossible)

    def _pod_is_impossible(self, pending: PendingClaim) -> bool:
        return self._queue.found(pending, self._feasibility.unheld).outcome is Outcome.NONE

    def _at_present(self, requirements: ClaimRequirements, nodes: Nodes) -> Reason | None:
        could = self._feasibility.could
        for request in requirements.requests:
            if not could(ClaimRequirements((request,)), nodes):
                return lacking(request, self._shortage(request, nodes), self._queue.holders)
        if could(requirements, nodes):
            return None
        if requirements.constraints and could(ClaimRequirements(requirements.requests), nodes):
            return constraint(requirements, "the requests could be met, but at present")
        return together(requirements, "no node has all of them free at once")

    def _permanent(self, requirements: ClaimRequirements, nodes: Nodes) -> Reason | None:
        """Why a claim cannot be satisfied by itself even if nothing is held; None if it could or that is unknown."""
        for request in requirements.requests:
            if not self._feasibility.kinds(request.selector, nodes):
                return _nothing_selected(self._feasibility, request, nodes)
        if (count := max(requirements.counts)) > MAX_DEVICES:
            sentence = f"it asks for {count} devices, more than the {MAX_DEVICES} that one claim can have"
            return Reason(ReasonCode.TOO_MANY, sentence, permanent=True)
        for request in requirements.requests:
            if not self._feasibility.emptied.could(ClaimRequirements((request,)), nodes):
                return Reason(ReasonCode.TOO_MANY, _too_many(self._feasibility, request, nodes), permanent=True)
        if not self._feasibility.emptied.could(requirements, nodes):
            return _not_together(self._feasibility, requirements, nodes)
        hindered = any(self._shortage(request, nodes).hindered for request in requirements.requests)
        if not hindered or self._feasibility.unheld.could(requirements, nodes):
            return None
        return self._hindered(requirements, nodes)

    def _hindered(self, requirements: ClaimRequirements, nodes: Nodes) -> Reason | None:
        """The reason where faults, settings, labels, MIG modes or foreign partitions are in the way."""
        requests = requirements.requests
        alone = (each for each in requests if not self._feasibility.unheld.could(ClaimRequirements((each,)), nodes))
        first = next(alone, None)
        chosen = requests if first is None else (first,)
        found = [self._shortage(each, nodes) for each in chosen]
        obstacles = joined([each.obstacles for each in found]) or joined([each.hindered for each in found])
        if not obstacles:
            return None
        main = max(obstacles, key=lambda each: len(obstacles[each]))
        gpus = {entry.gpu.uuid for each in found for entry in each.gpus}
        request = f"request {chosen[0].name}: " if len(chosen) == 1 else ""
        code, text = OF_OBSTACLE[main]
        if not any(each.usable for each in found):
            sentence = f"{request}{len(gpus)} GPUs have it, but {text.format('them')}"
        else:
            which = f"{len(obstacles[main])} of the {len(gpus)} GPUs that have it"
            sentence = f"{request}even if nothing were held no node could give all of it: {text.format(which)}"
        steps = reset_steps(obstacles[main]) if main is Obstacle.RESET else named(obstacles[main])
        others = {each: gpus for each, gpus in obstacles.items() if each is not main}
        return Reason(code, f"{sentence}: {steps}{_unusable(others)}", permanent=True)

    def _shortage(self, request: DeviceRequest, nodes: Nodes) -> Shortage:
        key = (request.selector, nodes)
        if key not in self._shortages:
            self._shortages[key] = shortage(self._feasibility, request, nodes)
        return self._shortages[key]


def lacking(request: DeviceRequest, found: Shortage, claim_of: Mapping[tuple[str, str], str]) -> Reason:
    """The reason where GPUs have the selected devices, but not enough of them are free."""
    also = _unusable(found.obstacles)
    if request.count is not None and found.freest and found.free >= found.needed * request.count:
        return Reason(ReasonCode.FRAGMENTED, _fragmented(request, found) + also)
    claims = len(holders(found.usable, claim_of))
    if request.count is None:
        reason = "it asks for all devices of a node, and on every node that has them some are in use"
    else:
        reason = f"of the {len(found.usable)} GPUs that have it none has enough free"
    by = f"devices there are held by {claims} {'claim' if claims == 1 else 'claims'}"
    return Reason(ReasonCode.HELD, f"request {request.name}: {reason}, {by}{also}")


def _fragmented(request: DeviceRequest, found: Shortage) -> str:
    most, needed = found.freest[0].state.free, f"{found.needed:g} slices"
    wanted = needed if request.count == 1 else f"{request.count} times {needed} on one node"
    return (
        f"request {request.name}: {found.free:g} memory slices are free on {len(found.usable)} GPUs, at most {most:g} "
        f"on one, but no free placement of {wanted}; most is free on {named(found.freest)}"
    )


def _unusable(obstacles: Mapping[Obstacle, Sequence[FleetGpu]]) -> str:
    """The number of further GPUs that can't be used: the end of a message."""
    count = sum(map(len, obstacles.values()))
    return f"; {count} more can't be used ({', '.join(sorted(obstacles))})" if count else ""


def _nothing_selected(feasibility: Feasibility, request: DeviceRequest, nodes: Nodes) -> Reason:
    """Why ``request`` selects nothing on ``nodes``."""
    elsewhere = feasibility.kinds(request.selector, frozenset(feasibility.fleet.nodes))
    if not elsewhere:
        return _selected_nowhere(feasibility, request)
    if not nodes:
        sentence = "no node is open to its pod: node selector, affinity or taints rule out all"
        return Reason(ReasonCode.NO_NODE, sentence, permanent=True)
    found = sorted({feasibility.fleet.gpus[uuid].node for gpus in elsewhere.values() for uuid in gpus})
    sentence = f"request {request.name}: what it selects is only on nodes where its pod may not run: {listed(found)}"
    return Reason(ReasonCode.OTHER_NODES, sentence, permanent=True)


def _selected_nowhere(feasibility: Feasibility, request: DeviceRequest) -> Reason:
    name, selector = request.name, request.selector
    first = next((failure for entry in feasibility.fleet for failure in selector.on(entry).failures), None)
    if first is None:
        sentence = f"request {name}: {_no_match(feasibility, selector)}"
        return Reason(ReasonCode.NOTHING_MATCHES, sentence, permanent=True)
    sentence = f"request {name}: the selector {first.expression!r} fails on {first.device}: {first.message}"
    return Reason(ReasonCode.SELECTOR_FAILS, sentence, permanent=True)


def _no_match(feasibility: Feasibility, selector: Selector) -> str:
    known = {name: sorted(set(values)) for name, values in _known(feasibility).items()}
    for expression in selector.expressions:
        for name, value in LITERAL.findall(expression):
            if name not in known or value in known[name]:
                continue
            if (name, value) == ("type", DeviceKind.SHARE):
                return NOT_DIVIDED
            if (name, value) == ("type", DeviceKind.PARTITION) or not known[name]:
                products = sorted({entry.gpu.product_name for entry in feasibility.fleet})
                return f"no GPU can be cut into MIG partitions; there are {listed(products, SHOWN_PRODUCTS)}"
            return f"{name} {value}: no GPU has it; there are {', '.join(known[name])}{meant(value, known[name])}"
    texts = " and ".join(selector.expressions)
    return f"no device of the cluster's {len(feasibility.fleet.gpus)} GPUs is selected by {texts}"


def _known(feasibility: Feasibility) -> dict[str, Iterable[str]]:
    """The values of frequently selected attributes in the cluster."""
    alike = list({(entry.state.geometry, bool(entry.shares)): entry for entry in feasibility.fleet}.values())
    return {
        "type": [device.kind.value for entry in alike for device in entry.devices],
        "profile": [profile.name for entry in alike for profile in entry.gpu.profiles],
        "productName": [entry.gpu.product_name for entry in feasibility.fleet],
        "architecture": [entry.gpu.architecture for entry in feasibility.fleet],
    }


def _too_many(feasibility: Feasibility, request: DeviceRequest, nodes: Nodes) -> str:
    name = request.name
    if request.count is None:
        return f"request {name} asks for all devices of a node: more than the {MAX_DEVICES} that one claim can have"
    most = feasibility.emptied.most_on_one_node(request, nodes)
    where = "no node" if nodes >= feasibility.fleet.nodes.keys() else "no node where its pod may run"
    return f"request {name} asks for {request.count} devices of one node; {where} has more than {most}"


def _not_together(feasibility: Feasibility, requirements: ClaimRequirements, nodes: Nodes) -> Reason:
    if requirements.constraints and feasibility.emptied.could(ClaimRequirements(requirements.requests), nodes):
        missing = without_value(feasibility, requirements, nodes)
        return constraint(requirements, "even if nothing were held", missing, permanent=True)
    return together(requirements, "even if nothing were held no node could give all of them", permanent=True)


def constraint(requirements: ClaimRequirements, when: str, more: str = "", *, permanent: bool = False) -> Reason:
    """The reason where only the constraints of the claim are in the way."""
    names = ", ".join(sorted({each.attribute for each in requirements.constraints}))
    values = "different values" if all(each.distinct for each in requirements.constraints) else "the same value"
    sentence = f"{when} no node has devices for its requests with {values} of {names}{more}"
    return Reason(ReasonCode.CONSTRAINT, sentence, permanent)


def together(requirements: ClaimRequirements, obstacle: str, *, permanent: bool = False) -> Reason:
    """The reason where each request could be met by itself."""
    names = ", ".join(request.name for request in requirements.requests)
    sentence = f"each of the requests {names} could be met, but {obstacle}"
    return Reason(ReasonCode.NOT_TOGETHER, sentence, permanent)


def without_value(feasibility: Feasibility, requirements: ClaimRequirements, nodes: Nodes) -> str:
    """The constrained attributes that no selected device has: the end of a message."""
    missing = {
        each.attribute
        for each in requirements.constraints
        for request in (requirements.requests[index] for index in each.requests)
        if not any(
            feasibility.sets(request, kind, nodes, (each.attribute,))
            for kind in feasibility.kinds(request.selector, nodes)
        )
    }
    return f": none of these devices has a value of {', '.join(sorted(missing))}" if missing else ""
