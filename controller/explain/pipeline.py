"""The one way from a situation to the reason of each pending claim.

Events, ``tessera why``, ``tessera status``, the web page and ``tessera simulate`` show what this finds. The first of
these sources that knows a reason has the last word:

1. ``unplaced_pods``: no scheduler tries the pod, or a claim of it is missing. Whatever is free does not help it.
2. ``lacking_devices``: no free device satisfies the claim, or its gang lacks devices. No offer helps either.
3. ``waiting_gangs``: enough is free, but the scheduler tries no pod of the gang before the missing ones exist.
4. ``pending_despite_offers``: devices that would do are offered, or should be, and the scheduler does not take them.
5. ``waiting_claims``: enough is free, but not offered for this claim yet; or nothing is known to be in the way.

Permanent reasons come from 1 and 2, so a claim keeps its reason while others come and go; each later source presumes
that the ones before had nothing to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from controller.demand.pending_claims import PendingClaim
from controller.explain.lacking_devices import Reasoning, reason_of
from controller.explain.pending_despite_offers import ClaimsDespiteOffers, Sightings
from controller.explain.reason import OF_THE_POD, ClaimReason, KnownReasons
from controller.explain.scheduler_reports import SchedulerActivity, with_scheduler
from controller.explain.situation import Situation
from controller.explain.unplaced_pods import UnplacedPods
from controller.explain.waiting_claims import reason_of_disjoint, waits
from controller.explain.waiting_gangs import reasons_of_incomplete
from driver.clock import Clock

SHOWN_AGE = timedelta(seconds=5)
"""Age of a kept reason from which on people are told when it was found."""

OVERDUE_SECONDS = 60.0
"""Time that a claim may be pending although a matching device is offered, unless a flag says otherwise."""


def reasons_in(situation: Situation, clock: Clock | None = None) -> dict[str, ClaimReason]:
    """The reason of each pending claim, by its key, for those who look once."""
    finder = ReasonFinder(OVERDUE_SECONDS, clock, watching=False)
    return {reason.pending.key: reason for reason in finder.find(situation)}


class ReasonFinder:
    """Finds the reasons in one situation after the other; remembers since when things are so, and what it has found."""

    def __init__(
        self,
        overdue_seconds: float,
        clock: Clock | None = None,
        limit_seconds: float = math.inf,
        *,
        watching: bool = True,
    ) -> None:
        """``limit_seconds``: about how long ``find`` may take; a claim that is not reached keeps its last reason.

        ``watching``: False if there is one situation only, in which everything has been so for a while.
        """
        self._clock = clock or Clock()
        self._overdue_seconds, self._limit_seconds = overdue_seconds, limit_seconds
        self._known = KnownReasons()
        self._unplaced = UnplacedPods(self._clock, watching=watching)
        self._sightings = Sightings(self._clock, watching=watching)
        self._last: dict[tuple[str, str], ClaimReason] = {}
        """The reasons of the last situation, by key and UID of the claim."""
        self.postponed = ""
        """The key of the first claim that keeps its last reason because the time is over; empty if there is none."""

    @property
    def next_s(self) -> float | None:
        """Seconds until a reason may change by time alone; None if none does."""
        if self.postponed:
            return 0.0
        times = (self._unplaced.next_s, self._sightings.next_s)
        return min((seconds for seconds in times if seconds is not None), default=None)

    def find(self, situation: Situation) -> Iterator[ClaimReason]:
        """The reason of each pending claim, and of each pod that lacks a claim, as it is found.

        Claims for devices of other drivers only have none. A reason that was kept for a while says since when.
        """
        queue = situation.queue
        activity = SchedulerActivity(queue)
        unplaced = self._unplaced.reasons(situation)
        self._sightings.update(situation)
        sources = _Sources(
            situation,
            Reasoning(queue, self._known),
            {reason.pending.key: reason for reason in reasons_of_incomplete(queue, self._clock)},
            ClaimsDespiteOffers(situation, self._sightings, self._overdue_seconds, activity, self._clock),
        )
        queued = {pending.key for pending in queue.pending}
        yield from (reason for key, reason in unplaced.items() if key not in queued)
        last, self._last = self._last, {}
        until, now = self._clock.monotonic() + self._limit_seconds, self._clock.now()
        for pending in self._in_turn(queue.pending):
            key = (pending.key, pending.claim.metadata.uid)
            reason = unplaced.get(pending.key)
            if reason is None and key in last and self._clock.monotonic() > until:
                reason = last[key]._replace(pending=pending)
                self.postponed = self.postponed or pending.key
            elif reason is None:
                reason = sources.reason(pending, now)
            if reason is None:
                continue
            if reason.code not in OF_THE_POD:
                self._last[key] = reason
            is_old = reason.found_at is not None and now - reason.found_at > SHOWN_AGE
            shown = reason if is_old else reason._replace(found_at=None)
            yield with_scheduler(shown, activity, self._clock)

    def _in_turn(self, pending: Sequence[PendingClaim]) -> Iterator[PendingClaim]:
        """All claims, first those that the last search had no time for."""
        first = next((place for place, claim in enumerate(pending) if claim.key == self.postponed), 0)
        self.postponed = ""
        yield from (*pending[first:], *pending[:first])


@dataclass(frozen=True)
class _Sources:
    """Where the reasons of claims come from in one situation."""

    situation: Situation
    lacking: Reasoning
    incomplete: dict[str, ClaimReason]
    despite_offers: ClaimsDespiteOffers

    def reason(self, pending: PendingClaim, now: datetime) -> ClaimReason | None:
        """The reason of one claim, as of ``now``; None if it is for devices of other drivers only."""
        situation, plan = self.situation, self.situation.plan
        reason = (
            reason_of(pending, self.lacking, situation.unreported)
            or self.incomplete.get(pending.key)
            or self.despite_offers.reason(pending)
            or (None if plan is None else reason_of_disjoint(pending, situation.queue, plan))
            or (waits(pending, situation) if situation.queue.requirements(pending) != () else None)
        )
        return None if reason is None else reason._replace(found_at=now)
