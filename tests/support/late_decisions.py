"""The real scheduler's decisions made late, while offers are taken back: how many meet the fence, does any overlap?

Late is every step of the controller, what the scheduler writes, and the nodes, which stand still now and then.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from controller.cluster.node_dedication import DEDICATED_TO
from tests.bench.placement.measures import count_refusals
from tests.support.faults import FaultyController, HeldScheduler, Point
from tests.support.field import FULL, LARGE, MIDDLE, SMALL, Field
from tests.support.plugin import PluginProcess
from tests.support.running import in_thread

CLASSES = {SMALL: 10, MIDDLE: 3, LARGE: 1, FULL: 1}
"""How often each is asked for."""

OTHERS = [1, 1, 1, 3]
"""And of what comes when something was taken back."""

BURST = {SMALL: 6, MIDDLE: 4, LARGE: 2, FULL: 1}
"""How many come at once at most."""

IMPATIENT = 0.9
"""Part of a burst that does not wait."""

MOST_JOBS = 12
"""That stay, beside a burst; they take about a third of the memory."""


LONGEST_S = 90.0

FENCED, WITHDRAWN = Point("fence", "before"), Point("withdraw", "after")


@dataclass
class Outcome:
    """``during``: allocations stored while something was being taken back, from the fence to the withdrawal.

    ``late``: devices that were not in the slices when they were given out; one that is just offered again may be.
    """

    seconds: float
    allocations: int
    during: int
    taken_back: int
    refused: int
    late: int
    overlaps: int
    touched: int
    refused_by_node: int
    unpublished: int
    republished: int

    @property
    def tries(self) -> int:
        """Decisions written while something was being taken back, stored or refused."""
        return self.during + self.refused

    @property
    def met_everything(self) -> bool:
        """Whether a decision met a taking back, and a GPU with held devices came back to the slices."""
        return bool(self.tries and self.republished)

    def __str__(self) -> str:
        return (
            f"{self.seconds:.0f} s, {self.taken_back} times taken back, {self.allocations} allocations, "
            f"{self.tries} tries ({self.during} stored meanwhile, {self.refused} refused by the fence): "
            f"{self.late} devices that had left the slices, "
            f"{self.overlaps} overlaps, {self.touched} held devices touched, "
            f"{self.refused_by_node} prepares refused by the node; "
            f"GPUs with held devices were unpublished {self.unpublished} times and came back {self.republished} times"
        )


class LateDecisions:
    """Rounds of jobs; the scheduler is stopped, or its requests held, and every step of taking back is late."""

    def __init__(self, nodes: Field, scheduler: HeldScheduler, controller: FaultyController, seed: int) -> None:
        self._nodes = nodes
        self._scheduler = scheduler
        self._controller = controller
        self._random = random.Random(seed)
        self._never = threading.Event()
        self._refused_before = count_refusals(scheduler.log)
        self._late_before = nodes.allocations.late
        self._allocated_before = len(nodes.allocations.times)
        self._unpublished_before, self._republished_before = (
            nodes.allocations.unpublished,
            nodes.allocations.republished,
        )

    def run(self, seconds: float, most_s: float) -> Outcome:
        """Disturb for so long and until everything was met, for LONGEST_S at most; then let all requests go."""
        self._controller.delay(most_s)
        began = time.monotonic()
        with ExitStack() as late_nodes:
            for number, node in enumerate(self._nodes.nodes):
                stand_still = partial(_stand_still, node, random.Random(number), most_s)
                late_nodes.enter_context(in_thread(stand_still))
            while (lasted := time.monotonic() - began) < max(seconds, LONGEST_S) and (
                lasted < seconds or not self._outcome(lasted).met_everything
            ):
                self._round(most_s)
        self._controller.delay(0)
        return self._outcome(time.monotonic() - began)

    def _round(self, most_s: float) -> None:
        """Decide for many, who lose patience; write the decisions when what they are about is being taken back."""
        jobs = self._nodes.jobs
        with self._late():
            burst = [
                name for kind, most in BURST.items() for name in self._nodes.ask(kind, self._random.randint(0, most))
            ]
            self._pause(self._random.uniform(0.3, 0.7))
            jobs.abandon(*(name for name in burst if self._random.random() < IMPATIENT))
            seen = len(self._controller.seen())
            self._rededicate()
            self._pause(most_s * self._random.random() ** 12)
            if self._random.random() < 0.8:
                self._wait_withdrawn(seen)
            # They are decided by what is offered instead, and written together with those before.
            for other in self._random.choices(list(CLASSES), OTHERS, k=4):
                self._nodes.ask(other)
            self._pause(self._random.uniform(0.2, 0.6))
        self._pause(self._random.uniform(0.2, 1.0))
        jobs.end(*burst)
        settled = [name for name in jobs.names if self._settled(name)]
        jobs.end(*settled[: max(0, len(jobs.names) - MOST_JOBS)])

    def _rededicate(self) -> None:
        """Offers of other kinds stand on one of the nodes from now on; on the other everything does."""
        nodes = list(self._nodes.nodes)
        self._random.shuffle(nodes)
        for node, use in zip(nodes, (self._random.choice(("training", "inference")), None), strict=True):
            labels = {"metadata": {"labels": {DEDICATED_TO: use}}}
            self._nodes.cluster.api.patch(f"/api/v1/nodes/{node.node.name}", labels)

    def _pause(self, seconds: float) -> None:
        self._never.wait(seconds)

    def _wait_withdrawn(self, seen: int) -> None:
        """Until something was taken back of which the fence began since, or it takes long."""
        ends = time.monotonic() + 8
        while time.monotonic() < ends:
            points = [each.point for each in self._controller.seen()[seen:]]
            if FENCED in points and WITHDRAWN in points[points.index(FENCED) :]:
                return
            self._pause(0.05)

    def _settled(self, name: str) -> bool:
        return bool(self._nodes.allocations.of(name)) and self._nodes.kubelets.settled(name)

    @contextmanager
    def _late(self) -> Iterator[None]:
        """The scheduler's requests are held; now and then it is stopped itself, a little later."""
        stops = self._random.random() < 0.2
        if not stops:
            self._scheduler.wire.hold()
        try:
            if stops:
                self._pause(self._random.uniform(0, 0.1))
                self._scheduler.signal(signal.SIGSTOP)
            yield
        finally:
            self._scheduler.signal(signal.SIGCONT)
            self._scheduler.wire.mend()

    def _outcome(self, seconds: float) -> Outcome:
        allocations = self._nodes.allocations
        times = allocations.times[self._allocated_before :]
        spans = self._spans()
        return Outcome(
            seconds=seconds,
            allocations=len(times),
            during=sum(any(begin <= at <= end for begin, end in spans) for at in times),
            taken_back=len(spans),
            refused=count_refusals(self._scheduler.log) - self._refused_before,
            late=allocations.late - self._late_before,
            overlaps=len(allocations.overlaps),
            touched=len(allocations.touched),
            refused_by_node=len(self._nodes.kubelets.refused),
            unpublished=allocations.unpublished - self._unpublished_before,
            republished=allocations.republished - self._republished_before,
        )

    def _spans(self) -> list[tuple[float, float]]:
        """From when devices were to be fenced to when the plans that withdraw them were written."""
        found, began, withdrawn = list[tuple[float, float]](), 0.0, False
        for at, point in self._controller.seen():
            if point == FENCED and not began:
                began, withdrawn = at, False
            elif point == WITHDRAWN:
                withdrawn = True
            elif point == ("decide", "after") and began and withdrawn:
                found.append((began, at))
                began = 0.0
        return found


def _stand_still(node: PluginProcess, chance: random.Random, most_s: float, stop: threading.Event) -> None:
    """Stop the node's plugin wherever it is, most often shortly, and let it go on; again and again."""
    while not stop.wait(chance.uniform(0, 1)):
        os.kill(node.pid, signal.SIGSTOP)
        stop.wait(most_s * chance.random() ** 12)
        os.kill(node.pid, signal.SIGCONT)
