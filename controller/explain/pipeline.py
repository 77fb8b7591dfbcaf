"""The one way from a situation to the reason of each pending claim.

Events, ``tessera why``, ``tessera status``, the web page and ``tessera simulate`` show the reasons found here. A claim
gets the reason of the first of these sources that has one; ``with_scheduler`` appends what the scheduler reports:

1. ``causes_in_pods_and_claims``: no scheduler tries the pod, a claim of it is missing, refused by a quota or being
   deleted, no class provides its extended resource, or its claims are allocated and it is not placed.
2. ``no_free_device``: no free device satisfies the claim, or its gang lacks devices. No offer helps either.
3. ``waiting_gangs``: the scheduler tries no pod of the gang before the missing ones exist.
4. ``pending_despite_offers``: matching devices are offered, or should be, and the scheduler does not allocate them.
5. ``reason_with_disjoint_offers``, ``_without_obstacle``: the devices are not offered for this claim yet, no obstacle
   is known, or it is unknown whether enough is free.

Each source assumes that those before it have found no reason. Source 2 looks for a permanent reason before a temporary
one: a claim keeps its permanent reason while other claims come and go.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from controller.demand.device_search import SearchOutcome
from controller.demand.pending_claims import PendingClaim, Queue
from controller.explain.reason import OF_THE_POD, ClaimReason, ReasonCode
from controller.explain.situation import DisjointPlan, Situation
from controller.explain.sources.causes_in_pods_and_claims import UnplacedPods
from controller.explain.sources.holder_relations import HoldingPods
from controller.explain.sources.no_free_device import KnownReasons, Reasoning, reason_of
from controller.explain.sources.pending_despite_offers import ClaimsDespiteOffers, Sightings
from controller.explain.sources.scheduler_reports import SchedulerActivity, with_scheduler
from controller.explain.sources.selected_gpus import listed
from controller.explain.sources.waiting_gangs import reasons_of_incomplete_gangs
from driver.clock import Clock, soonest

SHOWN_AGE = timedelta(seconds=5)
"""Age of a kept reason from which on people are told when it was found."""

REST_FACTOR, MAX_REST_SECONDS = 20.0, 2.0
"""After a search of t seconds, known claims keep their reasons and new claims get none for ``REST_FACTOR`` * t seconds,
at most ``MAX_REST_SECONDS``: in a burst of pods, decisions are more urgent than reasons, and most claims need none."""

OVERDUE_SECONDS = 60.0
"""Time that a claim may be pending although a matching device is offered, for ``reasons_in``; the leader has a flag."""

ENOUGH_IS_FREE = "enough is free now; the scheduler has not allocated it yet"

NOT_EXAMINED = "it is new: the controller examines within seconds why it is pending"


def reasons_in(situation: Situation, clock: Clock | None = None) -> dict[str, ClaimReason]:
    """The reason of each pending claim, by its key, for a caller that asks only once."""
    finder = ReasonFinder(OVERDUE_SECONDS, clock, watching=False)
    return {reason.pending.key: reason for reason in finder.find(situation)}


class ReasonFinder:
    """Finds the reasons in one situation after another; remembers them, and when claims and offers were first seen."""

    def __init__(
        self,
        overdue_seconds: float,
        clock: Clock | None = None,
        limit_seconds: float = math.inf,
        *,
        watching: bool = True,
    ) -> None:
        """``limit_seconds``: about how long ``find`` may take; a claim that is not reached keeps its last reason.

        ``watching``: ``find`` is called again and again. Otherwise it is called once: offers count as old, and claims
        as pending since their pods were created.
        """
        self._clock = clock or Clock()
        self._overdue_seconds, self._limit_seconds = overdue_seconds, limit_seconds
        self._known = KnownReasons()
        self._unplaced = UnplacedPods(self._clock, watching=watching)
        self._sightings = Sightings(self._clock, watching=watching)
        self._holding = HoldingPods(self._clock, watching=watching)
        self._last: dict[tuple[str, str], ClaimReason] = {}
        """The last reasons but those ``OF_THE_POD``, by key and UID of the claim."""
        self._rests_until = -math.inf
        """When claims that have a reason are looked at again (monotonic)."""
        self.postponed = ""
        """The key of the first claim that keeps its last reason, for lack of time or in a rest; empty: none does."""

    @property
    def next_s(self) -> float | None:
        """Seconds until a reason may change by time alone; None if none does."""
        if self.postponed:
            return max(0.0, self._rests_until - self._clock.monotonic())
        return soonest(self._unplaced.next_s, self._sightings.next_s)

    def find(self, situation: Situation) -> Iterator[ClaimReason]:
        """The reasons of pods and claims that are not in the queue, then that of each pending claim, as it is found.

        A claim for devices of other drivers only has at most the reason of its gang or of its pod's other claims. A
        reason that was found more than ``SHOWN_AGE`` ago has the time when it was found.
        """
        queue = situation.queue
        activity = SchedulerActivity(queue, self._clock)
        unplaced = self._unplaced.reasons(situation)
        self._sightings.update(situation)
        self._holding.looked_up.begin()
        incomplete = reasons_of_incomplete_gangs(queue, self._clock) if queue.gangs else ()
        despite_offers = ClaimsDespiteOffers(situation, self._sightings, self._overdue_seconds, activity)
        of_gangs = {reason.pending.key: reason for reason in incomplete}
        sources = _Sources(situation, Reasoning(queue, self._known), of_gangs, despite_offers, self._holding)
        queued = {pending.key for pending in queue.pending}
        yield from (reason for key, reason in unplaced.items() if key not in queued)
        last, self._last = self._last, {}
        began, now = self._clock.monotonic(), self._clock.now()
        is_resting = began < self._rests_until
        until = -math.inf if is_resting else began + self._limit_seconds
        first = next((place for place, claim in enumerate(queue.pending) if claim.key == self.postponed), 0)
        self.postponed = ""
        in_turn = (*queue.pending[first:], *queue.pending[:first])
        identified = [(pending, (pending.key, pending.claim.metadata.uid)) for pending in in_turn]
        new = [claim for claim in identified if claim[1] not in last]
        # First those without a reason, then those that the last search had no time for.
        for pending, identity in (*new, *(claim for claim in identified if claim[1] in last)):
            reason = unplaced.get(pending.key)
            if reason is None and self._clock.monotonic() > until:
                self.postponed = self.postponed or pending.key
                if identity not in last:
                    if _requests_devices(pending, queue):
                        yield ClaimReason(pending, ReasonCode.WAITS, NOT_EXAMINED, is_examined=False)
                    continue
                reason = last[identity]._replace(pending=pending)
            elif reason is None:
                reason = sources.reason(pending, now)
            if reason is None:
                continue
            if reason.code not in OF_THE_POD:
                self._last[identity] = reason
            is_old = reason.found_at is not None and now - reason.found_at > SHOWN_AGE
            shown = reason if is_old else reason._replace(found_at=None)
            yield with_scheduler(shown, activity)
        if not is_resting:
            ended = self._clock.monotonic()
            self._rests_until = ended + min(REST_FACTOR * (ended - began), MAX_REST_SECONDS)


@dataclass(frozen=True)
class _Sources:
    """Where the reasons of claims come from in one situation."""

    situation: Situation
    lacking: Reasoning
    incomplete: dict[str, ClaimReason]
    despite_offers: ClaimsDespiteOffers
    holding: HoldingPods

    def reason(self, pending: PendingClaim, now: datetime) -> ClaimReason | None:
        """The reason of one claim, as of ``now``. None means that the claim is for devices of other drivers only."""
        situation, plan = self.situation, self.situation.plan
        lacking = reason_of(pending, self.lacking, situation.unreported)
        if lacking is not None and not lacking.permanent:
            lacking = self.holding.with_relations(lacking, self.lacking, situation)
        reason = (
            lacking
            or self.incomplete.get(pending.key)
            or self.despite_offers.reason(pending)
            or (None if plan is None else reason_with_disjoint_offers(pending, situation.queue, plan))
        )
        if reason is None and _requests_devices(pending, situation.queue):
            reason = ClaimReason(pending, ReasonCode.WAITS, _without_obstacle(pending, situation))
        return None if reason is None else reason._replace(found_at=now)


def _requests_devices(pending: PendingClaim, queue: Queue) -> bool:
    """Whether the claim requests devices of this driver."""
    return queue.requirements(pending) != () or pending.key in queue.monitoring


def reason_with_disjoint_offers(pending: PendingClaim, queue: Queue, plan: DisjointPlan) -> ClaimReason | None:
    """The reason of a claim whose devices are not offered yet, or are planned for other claims."""
    offers = plan.offers.get(pending.key)
    if offers is not None:
        awaited = [offer for offer in offers if offer in plan.obstructed]
        if not awaited:
            return None
        seconds = "" if plan.settle_seconds is None else f": about {plan.settle_seconds + 1:.0f} s"
        gpu, kind = queue.feasibility.fleet.gpus[awaited[0].gpu], awaited[0].spot.kind
        sentence = f"gpu-{gpu.number} of node {gpu.node} is changed to offer {kind}{seconds}"
        return ClaimReason(pending, ReasonCode.RESHAPING, sentence)
    if pending.key in queue.gangs_without_room or not queue.satisfiable(pending):
        return None
    others = f" (planned for {listed(sorted(plan.offers))})" if plan.offers else ""
    sentence = f"free memory may be enough for it, but is planned or reserved for other pods{others}"
    return ClaimReason(pending, ReasonCode.BEHIND, sentence)


def _without_obstacle(pending: PendingClaim, situation: Situation) -> str:
    """The sentence for a claim that no known obstacle keeps pending."""
    queue, silent = situation.queue, situation.controller_silent
    if not queue.alternatives(pending) and pending.key in queue.monitoring:
        return _monitors_without_obstacle(pending, situation)
    outcome = queue.find_node(pending).outcome
    if outcome is SearchOutcome.NO_ROOM:
        return _unknown(situation)
    enough = "enough is free" if outcome is SearchOutcome.FITS else "enough may be free"
    if silent is not None:
        return (
            f"the controller, which decides what is offered, has sent no heartbeat for {silent:.0f} s: nodes decide "
            f"for themselves what they offer 30 to 90 s after the last heartbeat (tessera status); {enough}"
        )
    if outcome is SearchOutcome.UNKNOWN:
        return "enough may be free, which takes too long to find out; the scheduler has not allocated it yet"
    return ENOUGH_IS_FREE


def _monitors_without_obstacle(pending: PendingClaim, situation: Situation) -> str:
    """The same for a claim for monitor devices only."""
    if not situation.queue.nodes_with_monitors(pending):
        return _unknown(situation)
    if (silent := situation.controller_silent) is not None:
        return (
            "the controller, which decides whether monitor devices are published, has sent no heartbeat for "
            f"{silent:.0f} s: nodes publish them 30 to 90 s after the last heartbeat (tessera status)"
        )
    return "the scheduler has not allocated its monitor devices yet"


def _unknown(situation: Situation) -> str:
    """Nothing known serves the claim, but not all GPUs are known."""
    nodes = listed(situation.unreported.nodes)
    unreported = f"no known GPU satisfies it, and the GPUs of {nodes} have not been reported yet"
    return unreported if nodes else "no GPU is known yet"
