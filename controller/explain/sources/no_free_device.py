"""The reason why no free device satisfies a pending claim (pure).

Permanent reasons hold whatever devices other claims release. They come before temporary ones: users are not asked to
wait in vain, and the reason stays the same while other claims come and go.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

from controller.cluster.fleet import Fleet
from controller.cluster.node_views import UnreportedNodes
from controller.demand.device_search import SearchOutcome
from controller.demand.feasibility import Feasibility, Nodes
from controller.demand.gangs import Gang
from controller.demand.node_eligibility import Eligibility, Excluded
from controller.demand.pending_claims import PendingClaim, Queue, described, holders_of
from controller.demand.requirements import ClaimRequirements, DeviceRequest, RefusedRequest
from controller.explain.reason import ClaimReason, Reason, ReasonCode
from controller.explain.sources import no_free_device_sentences as sentences
from controller.explain.sources.monitor_devices import MonitorDevices
from controller.explain.sources.moves import KnownMoves, with_moves
from controller.explain.sources.selected_gpus import (
    Availability,
    SelectedGpus,
    by_obstacle,
    failure_of,
    held_by,
    listed,
    matching_gpus,
    selected_gpus,
    untolerated,
    with_taints,
    without,
)
from controller.explain.sources.selector_sentences import selected_nowhere
from controller.explain.sources.waiting_gangs import reason_of_gang
from driver.kube.types import MAX_DEVICES, Key
from driver.model.offer import SHARED

MAX_KNOWN = 1024
"""Reasons of each kind that are remembered from one search to the next."""

MAX_TAINTED = 16
"""Views of the fleet, with the taints of DeviceTaintRules, that are remembered."""

INDEPENDENT_OF_GPUS = {ReasonCode.NO_SUCH_CLASS, ReasonCode.SELECTOR_REFUSED}
"""Permanent reasons that hold whatever GPUs there are."""

NodeCondition = tuple[Nodes, bytes]


def reason_of(pending: PendingClaim, reasoning: Reasoning, unreported: UnreportedNodes) -> ClaimReason | None:
    """The reason of a claim that no free device satisfies, or whose gang lacks devices; None otherwise.

    None, too, if the bounded search is undecided, if the claim is for devices of other drivers only, and, with a
    permanent reason, while nodes may still report GPUs.
    """
    queue = reasoning.queue
    reason = _qualified(reasoning.reason_with_gang(pending), queue, unreported)
    if reason is None:
        return None
    group = queue.gangs_without_room[pending.key].group if reason.code is ReasonCode.GANG else None
    of_pods = () if reason.permanent else _of_single_pods(pending, reasoning, unreported, reason.code)
    of_claim = ClaimReason(pending, reason.code, reason.sentence, reason.permanent, group, tuple(of_pods))
    at = reasoning.for_claim(pending)
    return with_moves(of_claim, at.queue, at.known.moves) if reason.code is ReasonCode.FRAGMENTED else of_claim


def _of_single_pods(
    pending: PendingClaim, reasoning: Reasoning, unreported: UnreportedNodes, others: ReasonCode
) -> Iterator[tuple[Key, Reason]]:
    """The permanent reasons of pods that can not run where other pods of the claim can."""
    queue = reasoning.queue
    nodes = queue.nodes(pending)
    for pod in pending.pods if len(pending.pods) > 1 else ():
        if queue.nodes_for(pod) != nodes:
            of_one_pod = replace(pending, pods=(pod,))
            reason = _qualified(reasoning.for_claim(of_one_pod).reason(of_one_pod), queue, unreported)
            if reason is not None and reason.permanent:
                sentence = f"{reason.sentence}; for other pods of the claim: {others}"
                yield pod.metadata.key, replace(reason, sentence=sentence)


def _qualified(reason: Reason | None, queue: Queue, unreported: UnreportedNodes) -> Reason | None:
    """``reason``, if it holds although GPUs of some nodes are unknown."""
    if reason is None or not reason.permanent or reason.code in INDEPENDENT_OF_GPUS:
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


class KnownReasons:
    """Reasons of requirements, which hold until a GPU, a Node or, unless they are permanent, a holder changes."""

    def __init__(self) -> None:
        self.permanent: dict[tuple[ClaimRequirements, NodeCondition], Reason | None] = {}
        self.temporary: dict[tuple[ClaimRequirements, NodeCondition], Reason | None] = {}
        self.holders: dict[tuple[tuple[DeviceRequest, ...], NodeCondition], tuple[str, ...]] = {}
        """By requests: the claims with devices of the GPUs that could serve them."""
        self.moves: KnownMoves = {}
        self.tainted: dict[Hashable, tuple[Feasibility, KnownReasons]] = {}
        """By DeviceTaintRules and selectors: the GPUs as seen by a claim that does not tolerate the rules."""
        self._fleet: Fleet | None = None
        self._eligibility: Eligibility | None = None

    def begin(self, fleet: Fleet, eligibility: Eligibility) -> None:
        """Forget what does not hold for ``fleet`` with the Nodes of ``eligibility``."""
        before = self._fleet
        same_gpus = before is not None and before.unheld is fleet.unheld and self._eligibility is eligibility
        if not same_gpus or len(self.permanent) >= MAX_KNOWN:
            self.permanent.clear()
        if not same_gpus or before is not fleet or len(self.temporary) >= MAX_KNOWN:
            self.temporary.clear()
            self.holders.clear()
            self.moves.clear()
            self.tainted.clear()
        self._fleet, self._eligibility = fleet, eligibility


class Reasoning:
    """Finds reasons; equal requirements of several claims are examined once."""

    def __init__(self, queue: Queue, known: KnownReasons | None = None, monitors: MonitorDevices | None = None) -> None:
        """``known`` is what earlier ones have found."""
        self.queue = queue
        self.known = known or KnownReasons()
        self.known.begin(queue.feasibility.fleet, queue.eligibility)
        self._feasibility = queue.feasibility
        self._everywhere: Nodes = frozenset(queue.feasibility.fleet.nodes)
        self._selected: dict[Hashable, SelectedGpus] = {}
        self._availabilities: dict[tuple[DeviceRequest, NodeCondition], Availability] = {}
        self._excluded: dict[NodeCondition, Mapping[str, Excluded]] = {}
        self.moves: KnownMoves = {}
        """What moves to other nodes would do."""
        self._of_gang: dict[Gang, Reason | None] = {}
        self._monitors = monitors or (MonitorDevices(queue) if queue.monitoring else None)

    def reason_with_gang(self, pending: PendingClaim) -> Reason | None:
        """The permanent reason of ``pending``, that of its gang, or its temporary one."""
        reason, gang = self.for_claim(pending).reason(pending), self.queue.gangs_without_room.get(pending.key)
        if gang is None or (reason is not None and reason.permanent):
            return reason
        if gang not in self._of_gang:
            of_gang = reason_of_gang(self.queue, gang)
            if of_gang is not None and not of_gang.permanent:
                available = [self.availability(request, pending) for request in self.queue.requests(pending)]
                of_gang = replace(of_gang, sentence=of_gang.sentence + held_by(available, self.queue.holders))
            self._of_gang[gang] = of_gang
        return self._of_gang[gang] or reason

    def for_claim(self, pending: PendingClaim) -> Reasoning:
        """The reasoning about the devices, except those with taints that ``pending`` does not tolerate."""
        queue, tainting = self.queue, self.queue.cluster.taint_rules
        requests = queue.requests(pending) if tainting else []
        rules = untolerated(tainting, requests) if requests else ()
        if not rules:
            return self
        of_devices = any(rule.spec.device_selector and rule.spec.device_selector.device for rule in rules)
        selectors = frozenset(request.selector for request in requests if of_devices)
        key = (tuple((rule.metadata.name, rule.spec) for rule in rules), selectors)
        if key not in self.known.tainted:
            matching = self._feasibility.matching
            fleet = with_taints(self._feasibility.fleet, matching.driver, rules, selectors)
            if len(self.known.tainted) >= MAX_TAINTED:
                self.known.tainted.clear()
            self.known.tainted[key] = Feasibility(fleet, matching, is_hypothetical=True), KnownReasons()
        feasibility, known_reasons = self.known.tainted[key]
        return Reasoning(queue.with_feasibility(feasibility), known_reasons, self._monitors)

    def reason(self, pending: PendingClaim) -> Reason | None:
        """Why no free device satisfies ``pending``; None if one does, or if the search is undecided."""
        queue = self.queue
        alternatives = queue.requirements(pending)
        if isinstance(alternatives, RefusedRequest):
            return self._reason_alone(pending)
        for claim, request in queue.requests_for_all:
            if claim.key == pending.key and (reason := self._no_match_reason(request, pending)) is not None:
                return reason
        if self._monitors and (reason := self._monitors.reason(pending, self.excluded)) is not None:
            return reason
        if not alternatives or queue.find_node(pending).outcome is not SearchOutcome.NO_ROOM:
            no_node_fits = self._monitors and all(self._monitors.has_everything(pod) is False for pod in pending.pods)
            return self._pod_reason(pending) if no_node_fits else None
        alone = self._reason_alone(pending)
        if alone is None or (
            not alone.permanent and len(queue.companions(pending)) > 1 and self._pod_is_impossible(pending)
        ):
            return self._pod_reason(pending)
        return alone

    def _reason_alone(self, pending: PendingClaim) -> Reason | None:
        """Why a claim can not be satisfied, whatever other claims its pods have; None if it could."""
        alternatives = self.queue.requirements(pending)
        if isinstance(alternatives, RefusedRequest):
            return Reason(ReasonCode(alternatives.code), alternatives.sentence, permanent=True)
        reasons = list(
            filter(None, (self._requirements_reason(requirements, pending) for requirements in alternatives))
        )
        if len(reasons) < len(alternatives) or not reasons:
            return None
        best = max(reasons, key=lambda reason: reason.nearness)
        return (
            best
            if len(alternatives) == 1
            else sentences.of_alternatives(best, reasons, pending.claim.spec.devices.requests)
        )

    def availability(self, request: DeviceRequest, pending: PendingClaim) -> Availability:
        key = (request, self.queue.exclusion_key(pending))
        if key not in self._availabilities:
            fleet, excluded = self._feasibility.fleet, self.excluded(pending)
            matching = (matching_gpus(fleet, request.selector), self.queue.exclusion_key(pending))
            if matching not in self._selected:
                self._selected[matching] = selected_gpus(fleet, matching[0], excluded)
            failure = failure_of(fleet, request.selector, excluded)
            self._availabilities[key] = Availability(request, self._selected[matching], failure)
        return self._availabilities[key]

    def holders(self, pending: PendingClaim) -> tuple[str, ...]:
        """The claims with devices of the GPUs that could serve ``pending``, by name."""
        requests, condition = tuple(self.queue.requests(pending)), self.queue.exclusion_key(pending)
        if (requests, condition) not in self.known.holders:
            selected = (self.availability(request, pending).selected for request in requests)
            usable = (gpu.entry for selection in selected for gpu in selection.usable)
            self.known.holders[requests, condition] = tuple(holders_of(usable, self.queue.holders))
        return self.known.holders[requests, condition]

    def excluded(self, pending: PendingClaim) -> Mapping[str, Excluded]:
        """The nodes on which its pods can not run, and why."""
        condition = self.queue.exclusion_key(pending)
        if condition not in self._excluded:
            self._excluded[condition] = self.queue.excluded(pending)
        return self._excluded[condition]

    def _no_match_reason(self, request: DeviceRequest, pending: PendingClaim) -> Reason | None:
        """Why a request that matches held devices, too, has none at all on the nodes of ``pending``."""
        nodes = self.queue.nodes(pending)
        if self._feasibility.kinds(request.selector, nodes):
            return None
        if not self._feasibility.kinds(request.selector, self._everywhere):
            return selected_nowhere(self._feasibility, request)
        there = sorted({gpu.entry.node for gpu in self.availability(request, pending).selected.gpus})
        what = f"request {request.name}: what it selects is only"
        return sentences.only_elsewhere(what, there, self.excluded(pending), nodes)

    def _requirements_reason(self, requirements: ClaimRequirements, pending: PendingClaim) -> Reason | None:
        """Why a claim cannot be satisfied even alone; None if it can."""
        key, remembered = (requirements, self.queue.exclusion_key(pending)), self.known
        if key not in remembered.permanent and key not in remembered.temporary:
            reason = self._permanent_reason(requirements, pending)
            # The sentence about a reset names a GPU on which nothing is held: it is made again when a holder changes.
            outlives_holders = reason is None or reason.code is not ReasonCode.RESET
            (remembered.permanent if outlives_holders else remembered.temporary)[key] = reason
        if (permanent := remembered.permanent.get(key)) is not None:
            return permanent
        if key not in remembered.temporary:
            remembered.temporary[key] = self._temporary_reason(requirements, pending)
        return remembered.temporary[key]

    def _pod_reason(self, pending: PendingClaim) -> Reason:
        """The reason of a claim that can be satisfied alone, but not together with the other claims of its pod."""
        companions = {claim.key: claim for pod in pending.pods for claim in self.queue.of_pod(pod)}
        claims = [claim for key, claim in sorted(companions.items()) if key != pending.key]
        impossible = self._pod_is_impossible(pending)
        for claim in claims:
            alone = (self._monitors and self._monitors.reason(claim, self.excluded)) or self._reason_alone(claim)
            if alone is not None and (alone.permanent or not impossible):
                return replace(alone, sentence=f"its pod also has the {described(claim)}: {alone.sentence}")
        at = self._feasibility.unheld if impossible else self._feasibility
        others = listed([described(claim) + self._where(claim, at) for claim in claims], 8) or "its monitor devices"
        no_node = "even if nothing were held, no single node could" if impossible else "at present no single node can"
        possible = f"it could be met{self._where(pending, at)}"
        sentence = f"{possible}, but {no_node} also provide what else its pod requests: {others}"
        return Reason(ReasonCode.NOT_TOGETHER, sentence, impossible)

    def _where(self, pending: PendingClaim, feasibility: Feasibility) -> str:
        """`` (on a, b)``: the nodes that could satisfy a claim alone; empty if none of its devices are ours."""
        alternatives, nodes = self.queue.alternatives(pending), self.queue.nodes(pending)
        there = {node for alternative in alternatives for node in feasibility.nodes_that_may_fit(alternative, nodes)}
        return f" (on {listed(sorted(there))})" if there else ""

    def _pod_is_impossible(self, pending: PendingClaim) -> bool:
        return self.queue.with_feasibility(self._feasibility.unheld).find_node(pending).outcome is SearchOutcome.NO_ROOM

    def _permanent_reason(self, requirements: ClaimRequirements, pending: PendingClaim) -> Reason | None:
        """Why a claim cannot be satisfied by itself even if nothing is held; None if it could or that is unknown."""
        nodes, everywhere, ideal = self.queue.nodes(pending), self._everywhere, self._feasibility.ideal
        for request in requirements.requests:
            if not self._feasibility.kinds(request.selector, everywhere):
                return selected_nowhere(self._feasibility, request)
        if max(requirements.counts) > MAX_DEVICES:
            written = sum(request.written_count for request in requirements.requests)
            sentence = f"it asks for {written} devices, more than the {MAX_DEVICES} that one claim can have"
            return Reason(ReasonCode.TOO_MANY, sentence, permanent=True)
        for request in requirements.requests:
            if not ideal.may_fit(ClaimRequirements((request,)), everywhere):
                return sentences.too_many(self._feasibility, request, everywhere)
        if not ideal.may_fit(requirements, everywhere):
            return self._not_together_reason(requirements, pending)
        if not ideal.may_fit(requirements, nodes):
            there = sorted(ideal.nodes_that_may_fit(requirements, everywhere - nodes))
            what = self._not_here(requirements, nodes)
            return sentences.only_elsewhere(what, there, self.excluded(pending), nodes)
        if self._feasibility.unheld.may_fit(requirements, nodes):
            return None
        return self._obstacle_reason(requirements, pending)

    def _not_here(self, requirements: ClaimRequirements, nodes: Nodes) -> str:
        """What the nodes where the pod can run lack: the beginning of a sentence."""
        for request in requirements.requests:
            if not self._feasibility.kinds(request.selector, nodes):
                return f"request {request.name}: what it selects is only"
        ideal = self._feasibility.ideal
        for request in requirements.requests:
            if request.count is not None and not ideal.may_fit(ClaimRequirements((request,)), nodes):
                most = ideal.most_on_one_node(request, nodes)
                asks = f"request {request.name} asks for {request.count} devices of one node"
                return f"{asks}; no node where its pod can run has more than {most}; it would fit only"
        return "it would fit only"

    def _not_together_reason(self, requirements: ClaimRequirements, pending: PendingClaim) -> Reason:
        ideal, nodes = self._feasibility.ideal, self._everywhere
        if requirements.constraints and ideal.may_fit(ClaimRequirements(requirements.requests), nodes):
            missing = sentences.without_value(self._feasibility, requirements, nodes)
            largest = self._largest_set(requirements, nodes)
            return sentences.constraint(requirements, "even if nothing were held", largest + missing, permanent=True)
        available = [self.availability(request, pending) for request in requirements.requests]
        return sentences.together(available, "even if nothing were held no node could give all of them", permanent=True)

    def _largest_set(self, requirements: ClaimRequirements, nodes: Nodes) -> str:
        """The most devices of the only request that the only constraint admits."""
        if len(requirements.requests) > 1 or len(requirements.constraints) > 1:
            return ""
        [request], [only] = requirements.requests, requirements.constraints
        for count in range((request.count or 1) - 1, 0, -1):
            fewer = ClaimRequirements((replace(request, count=count),), requirements.constraints)
            if self._feasibility.ideal.may_fit(fewer, nodes):
                have = "have different values" if only.distinct else "share a value"
                return f"; it asks for {request.count}, and at most {count} {have} of {only.attribute}"
        return ""

    def _obstacle_reason(self, requirements: ClaimRequirements, pending: PendingClaim) -> Reason | None:
        """The reason where faults, settings, labels, MIG modes or foreign partitions are in the way."""
        requests, nodes = requirements.requests, self.queue.nodes(pending)
        alone = (
            request
            for request in requests
            if not self._feasibility.unheld.may_fit(ClaimRequirements((request,)), nodes)
        )
        first = next(alone, None)
        chosen = requests if first is None else (first,)
        selected = [self.availability(request, pending).selected for request in chosen]
        obstacles = by_obstacle(selected).keys()
        if not obstacles:
            return None
        sufficient = set()
        for obstacle in obstacles:  # if nothing were held and it were removed everywhere
            fleet = Fleet.of(without(entry.unheld, obstacle) for entry in self._feasibility.gpus_on(nodes))
            freed = Feasibility(fleet, self._feasibility.matching, is_hypothetical=True)
            if freed.may_fit(ClaimRequirements(chosen) if first else requirements, nodes):
                sufficient.add(obstacle)
        return sentences.obstructed(chosen, selected, sufficient or obstacles)

    def _temporary_reason(self, requirements: ClaimRequirements, pending: PendingClaim) -> Reason | None:
        may_fit, nodes = self._feasibility.may_fit, self.queue.nodes(pending)
        for request in requirements.requests:
            if not may_fit(ClaimRequirements((request,)), nodes):
                return self._held_or_fragmented_reason(request, pending)
        if may_fit(requirements, nodes):
            return None
        available = [self.availability(request, pending) for request in requirements.requests]
        if requirements.constraints and may_fit(ClaimRequirements(requirements.requests), nodes):
            reason = sentences.constraint(requirements, "the requests could be met, but at present")
        else:
            reason = sentences.together(available, "no node has all of them free at once")
        return replace(reason, sentence=reason.sentence + held_by(available, self.queue.holders))

    def _held_or_fragmented_reason(self, request: DeviceRequest, pending: PendingClaim) -> Reason:
        """The reason where GPUs have the selected devices, but not enough of them are free."""
        available = self.availability(request, pending)
        nodes = available.nodes_with_room() if available.selected.keys != {SHARED} else []
        if not nodes:
            at_limit = [gpu for gpu in available.selected.usable if gpu.is_at_its_limit]
            return (
                sentences.profile_limit(available, at_limit)
                if at_limit
                else sentences.held(available, self.queue.holders)
            )
        return sentences.fragmented(available, nodes[0])
