"""Does what is said of pods that wait despite an offered GPU, sentence after sentence, until they are placed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from copy import copy

import msgspec

from controller.explain.pipeline import OVERDUE_SECONDS, ReasonFinder, reasons_in
from controller.explain.reason import ClaimReason
from controller.explain.situation import Situation as Now
from driver.kube.types import Pod
from tests.conformance.reasons.advice import Fix, counted, fixes
from tests.conformance.reasons.judge import RealScheduler, is_scheduled
from tests.conformance.reasons.pod_situations import CREATED, OFFERED
from tests.conformance.reasons.statements import Question, ended, holders
from tests.support.clock import FakeClock
from tests.support.queues import Situation
from tests.support.reasons import Answers
from tests.support.watched_offers import offers

MAX_STEPS = 8
STARTED = 1000.0
CLOCKS_OFF_BY = (-700.0, 0.0, 700.0)
"""Seconds by which a controller's clock may differ from the API server's, of which no reason may depend."""

CLAIM = "default/claim"
"""The claim for the GPU."""


class Walk:
    """One pod. ``questions`` and ``false`` are filled step by step; ``now`` is the situation after these steps."""

    def __init__(self, there: Situation) -> None:
        self._first = self.now = there
        self._fixes: list[tuple[Fix, str]] = []
        self.reasons: list[ClaimReason] = []
        self.questions: list[Question] = []
        self.false: list[str] = []

    def step(self, pod: Pod) -> bool:
        """Do what is said of ``pod``, which the scheduler has tried in this situation; False: it was the last step."""
        if is_scheduled(pod):
            self.questions += self._needed()
            return False
        self.now = _reported(self.now, pod)
        self._first = self._first if self.reasons else self.now
        reasons = dict(_reasons(self.now))
        reason = reasons["now"]
        if reason is None:
            self.false.append(f"nothing is said although the scheduler reports: {message_of(pod)}")
            return False
        sentence = reason.sentence
        different = {clock: each and _timeless(each) for clock, each in reasons.items()}
        if len(set(different.values())) > 1:
            self.false.append(f"different by clock: {different}")
        self.reasons.append(reason)
        done = {fix.what for fix, _ in self._fixes}
        new = [fix for fix in fixes(self.now, sentence) if fix.what not in done]
        if not new or len(self.reasons) > MAX_STEPS:
            self.false.append(f"doing what is said does not help: {sentence} [{message_of(pod)}]")
            return False
        self.questions += counted(self.now, sentence)
        if reason.permanent and (names := holders(self.now)):
            self.questions.append(Question(ended(self.now, names), False, f"whatever claims end: {sentence}"))
        for fix in new:
            self._fixes.append((fix, sentence))
            self.now = fix.change(self.now)
        return True

    def _needed(self) -> Iterator[Question]:
        """No fix can be left out."""
        for fix, sentence in self._fixes:
            # Without the only one, the scheduler has reported that the pod does not fit.
            for too_little in fix.too_little or ([_unchanged] if len(self._fixes) > 1 else []):
                there = self._first
                for other, _ in self._fixes:
                    there = (too_little if other is fix else other.change)(there)
                yield Question(there, False, f"{fix.what} is needed: {sentence}")


def walk(scheduler: RealScheduler, situations: Sequence[Situation]) -> list[Walk]:
    """The walks of the pods that are not placed at once."""
    walks = walking = [Walk(there) for there in situations]
    while walking:
        pods = list(scheduler.reports([each.now for each in walking]))
        walking = [each for each, pod in zip(walking, pods, strict=True) if each.step(pod)]
    return [each for each in walks if each.reasons or each.false]


def described(there: Situation) -> str:
    """What matters of a situation, as JSON."""
    parts = {
        "pods": [pod.spec for pod in there.pods],
        "nodes": list(there.nodes.values()),
        "slices": [item.spec for item in there.slices],
        "rules": [rule.spec for rule in there.taint_rules],
        "claims": [claim.spec if claim.status.allocation is None else claim.results for claim in there.claims],
    }
    return json.dumps(msgspec.to_builtins(parts))


def _unchanged(there: Situation) -> Situation:
    return there


def _reported(there: Situation, pod: Pod) -> Situation:
    """The situation with what the API server has made of its pod, and what the scheduler has reported."""
    [own], copied = there.pods, msgspec.structs.replace
    names = ("containers", "init_containers", "resources", "overhead")
    spec = copied(own.spec, **{name: getattr(pod.spec, name) for name in names})
    conditions = tuple(copied(condition, last_transition_time=CREATED) for condition in pod.status.conditions)
    found = copy(there)
    found.pods = [copied(own, spec=spec, status=copied(pod.status, conditions=conditions))]
    return found


def message_of(pod: Pod) -> str:
    """What the scheduler reports."""
    return "; ".join(condition.message for condition in pod.status.conditions)


def _reasons(there: Situation) -> Iterator[tuple[str, ClaimReason | None]]:
    """The reason for those who look once, and for controllers whose clocks are wrong; by whose it is."""
    now = Now(there.queue, offered=offers(there, OFFERED), lookups=Answers(slices=there.slices))
    yield "now", reasons_in(now, FakeClock(STARTED)).get(CLAIM)
    for seconds in CLOCKS_OFF_BY:
        clock = FakeClock(STARTED + seconds)
        finder = ReasonFinder(OVERDUE_SECONDS, clock)
        list(finder.find(now))
        clock.advance(OVERDUE_SECONDS + 1)
        reasons = {reason.pending.key: reason for reason in finder.find(now)}
        yield f"{seconds:+.0f} s", reasons.get(CLAIM)


def _timeless(reason: ClaimReason) -> str:
    return re.sub(r" since \S+Z", "", f"{reason.code}: {reason.sentence}")
