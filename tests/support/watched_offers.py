"""Claims that wait although devices are offered, looked at again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.cluster.claim_index import PoolDevice, gpu_of, reservations_in
from controller.explain.reason import ClaimReason, ReasonCode
from controller.explain.situation import Situation as Now
from controller.explain.sources.pending_despite_offers import ClaimsDespiteOffers, Sightings
from controller.explain.sources.scheduler_reports import SchedulerActivity
from driver.model.offer import Offer
from tests.support.clock import FakeClock
from tests.support.queues import DRIVER, Situation
from tests.support.reasons import Answers

SECOND = 1.0
MINUTE = 60.0
SAYS_NO = "0/1 nodes are available: 1 cannot allocate all claims. still not schedulable"


def refused(message: str) -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]}


def offers(there: Situation, *names: str) -> dict[Offer, PoolDevice]:
    """What stands: ``<node>/<device>``."""
    found = {}
    for entry in there.gpus:
        for device in entry.devices:
            if f"{entry.node}/{device.name}" in names:
                found[device.offer] = PoolDevice(f"{entry.node}-{DRIVER}", device.name)
    assert len(found) == len(names)
    return found


class Watched:
    """A situation and what stands in it, looked at again and again."""

    def __init__(self, there: Situation, *standing: str) -> None:
        self.there = there
        self.clock = FakeClock()
        self.sightings = Sightings(self.clock)
        self.answers = Answers()
        self.standing = standing
        self.silent: Mapping[str, str] = {}
        self.refusing: Mapping[str, str] = {}
        self.unpublished: tuple[str, ...] = ()
        self.fenced: tuple[PoolDevice, ...] = ()
        self.reasons()

    def reasons(self) -> list[ClaimReason]:
        queue, unpublished = self.there.queue, offers(self.there, *self.unpublished)
        situation = Now(
            queue,
            offered=offers(self.there, *self.standing),
            unpublished=unpublished.keys(),
            reserved={gpu_of(entry): uids for entry, uids in reservations_in(self.fenced).items()},
            silent=self.silent,
            refusing=self.refusing,
            lookups=self.answers,
        )
        self.sightings.update(situation)
        source = ClaimsDespiteOffers(situation, self.sightings, MINUTE, SchedulerActivity(queue, self.clock))
        reasons = map(source.reason, queue.pending)
        return [reason for reason in reasons if reason is not None]

    def after(self, seconds: float) -> list[ClaimReason]:
        self.clock.advance(seconds)
        return self.reasons()

    def told(self) -> str:
        """What is said after a minute."""
        [reason] = self.after(MINUTE)
        assert reason.code is ReasonCode.UNUSED
        return reason.sentence
