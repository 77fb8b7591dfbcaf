"""What is said of pending claims, source by source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controller.cluster.node_views import ALL_REPORTED, UnreportedNodes
from controller.demand.pending_claims import Queue
from controller.explain.reason import ClaimReason
from controller.explain.situation import Lookups, Situation
from controller.explain.sources.causes_in_pods_and_claims import UnplacedPods
from controller.explain.sources.no_free_device import KnownReasons, Reasoning, reason_of
from driver.kube.slice_types import DetailedSlice
from driver.kube.types import Key, Pod
from tests.support.clock import FakeClock


def reasons_of(
    queue: Queue, unreported: UnreportedNodes = ALL_REPORTED, known: KnownReasons | None = None
) -> list[ClaimReason]:
    """One reason for each pending claim that no free device satisfies, or whose gang lacks devices."""
    reasoning = Reasoning(queue, known)
    reasons = (reason_of(pending, reasoning, unreported) for pending in queue.pending)
    return [reason for reason in reasons if reason is not None]


@dataclass
class Answers(Lookups):
    """Lookups with the same answer for everything; ``asked`` are the templates and claims that were looked up."""

    exists: bool | None = None
    failure: str | None = None
    slices: Sequence[DetailedSlice] | None = None
    pods: Mapping[str, Pod] = field(default_factory=dict)
    asked: list[Key] = field(default_factory=list)

    def template_exists(self, template: Key) -> bool | None:
        self.asked.append(template)
        return self.exists

    def creation_failure(self, pod: Pod) -> str | None:
        return self.failure

    def pods_of(self, claim: Key) -> Sequence[Pod] | None:
        self.asked.append(claim)
        return [self.pods[claim.name]] if claim.name in self.pods else None

    def slices_of(self, driver: str) -> Sequence[DetailedSlice] | None:
        return self.slices


def reasons_of_unplaced(
    queue: Queue, answers: Answers | None = None, unplaced: UnplacedPods | None = None
) -> list[ClaimReason]:
    """The reasons of pods that no free device helps; by default for one look."""
    unplaced = unplaced or UnplacedPods(FakeClock(), watching=False)
    return [*unplaced.reasons(Situation(queue, lookups=answers or Answers())).values()]
