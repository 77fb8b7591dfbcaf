"""Feeds hostile objects to the controller's caches and decides with them again and again, until one fails."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from controller.cluster.cache import ClusterCache
from controller.cluster.fleet import Fleet
from controller.cluster.fleet_builder import FleetBuilder
from controller.cluster.unheld_devices import UnheldDevices
from controller.curation.counters_planner import CountersPlanner
from controller.curation.overdue_claims import OverdueClaims
from controller.demand.demand import demand_of
from controller.demand.feasibility import Matching
from controller.demand.pending_claims import Queue
from controller.explain.pipeline import reasons_in
from controller.explain.situation import Situation
from controller.report.cluster_view import ClusterView
from driver.placement.measure import Measure
from driver.placement.ranking import Ranking
from tests.fuzz.answers import Answers
from tests.fuzz.objects import Hostile
from tests.support.queues import DRIVER, node_of

STALL_SECONDS = 10.0
"""Most processor time that one event or one decision may take, whatever else runs on the machine."""

PAUSE = 5
"""Pause after a decision, in times of what it took."""

OBJECTS_OF_COMMANDS = 100
"""One of so many objects is given to the commands for files, which take longer."""

SHARE = {
    "resourceclaims": 52,
    "resourceclaimtemplates": 5,
    "pods": 24,
    "podgroups": 3,
    "nodes": 3,
    "deviceclasses": 4,
    "resourceslices": 4,
    "gpunodeplans": 4,
    "devicetaintrules": 1,
}
"""Objects of each resource in a hundred."""


class Wire:
    """Stands in for the connection to an API server: empty lists, then one watch of each resource with its objects."""

    def __init__(self, objects: int, seed: int, stop: threading.Event) -> None:
        self.sent: Counter[str] = Counter()
        self.lists: Counter[str] = Counter()
        self.slowest = 0.0
        self._objects, self._seed, self._stop = objects, seed, stop

    @property
    def done(self) -> bool:
        return all(self.sent[resource] >= self.wanted(resource) for resource in SHARE)

    def wanted(self, resource: str) -> int:
        return self._objects * SHARE[resource] // 100

    def get(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        resource = path.rpartition("/")[2]
        self.lists[path] += query is None or query.get("limit") != "1"  # the question whether PodGroups are served
        return b'{"metadata":{"resourceVersion":"%d"}}' % (self.sent[resource] + 1)

    @contextmanager
    def stream(self, path: str, query: Mapping[str, str], read_timeout_s: float) -> Iterator[Iterator[bytes]]:
        yield self._events(path.rpartition("/")[2])

    def _events(self, resource: str) -> Iterator[bytes]:
        hostile = Hostile(self._seed + sum(map(ord, resource)))
        there: set[str] = set()
        while not self._stop.is_set() and self.sent[resource] < self.wanted(resource):
            key, text = hostile.draw(resource, self.sent[resource] + 2)
            kind = "MODIFIED" if key in there else "ADDED"
            if key in there and self.sent[resource] % 7 == 0:
                kind = "DELETED"
                there.discard(key)
            else:
                there.add(key)
            began = time.thread_time()
            yield f'{{"type":"{kind}","object":{text}}}'.encode()
            self.slowest = max(self.slowest, time.thread_time() - began)
            self.sent[resource] += 1
        self._stop.wait()


@dataclass
class Report:
    """What happened; ``failures`` is empty where all is as it should be. ``unreadable``: the most at one time."""

    objects: int = 0
    decisions: int = 0
    answers: int = 0
    unreadable: int = 0
    slowest_event_seconds: float = 0.0
    slowest_decision_seconds: float = 0.0
    slowest_answer_seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


class Tracebacks(logging.Handler):
    """Collects log records that carry an exception or say that something failed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.getMessage().startswith(("watch failed", "defect")):
            self.found.append(f"{record.getMessage()} {getattr(record, 'error', '')} {record.exc_info}")


class Decider:
    """Makes the decision of the controller, but for writing it down, on a small fleet of its own."""

    def __init__(self, cache: ClusterCache) -> None:
        self._cache = cache
        self._fleet = Fleet.of([*node_of("a", gpus=2), *node_of("b", "mig-1g10gb-0", gpus=2, shares=4)])
        self._matching = Matching(DRIVER)
        self._overdue_claims = OverdueClaims()
        self._curator = CountersPlanner(Ranking(Measure()), offers=2)
        self._builder = FleetBuilder()

    def decide(self) -> tuple[ClusterView, ClusterView]:
        """What people see afterwards: of this fleet, and of the GPUs that nodes report."""
        seen = self._cache.snapshot()
        queue = Queue(seen.cluster, self._fleet, self._matching)
        self._curator.curate(self._fleet, demand_of(queue, self._overdue_claims.widened(queue)), (), ())
        reasons = reasons_in(Situation(queue))
        reported = self._builder.build(seen.views, seen.changed)
        return (
            ClusterView(seen, self._fleet, UnheldDevices(), queue, decided=reasons),
            ClusterView(seen, reported, UnheldDevices(), Queue(seen.cluster, reported, self._matching)),
        )


def fuzz(objects: int, seed: int, progress: Callable[[str], None] = lambda _: None) -> Report:
    """Send that many objects; stops at the first failure of a decision."""
    stop, report, tracebacks = threading.Event(), Report(), Tracebacks()
    wire = Wire(objects, seed, stop)
    cache = ClusterCache(wire, DRIVER, lambda: None)  # type: ignore[arg-type]
    decider, answers, hostile = Decider(cache), Answers(), Hostile(seed)
    logging.getLogger().addHandler(tracebacks)
    threads = cache.start(stop)
    told, commands = time.monotonic(), 0
    try:
        while not report.failures:
            done = wire.done
            if cache.synced:
                began = time.thread_time()
                views = decider.decide()
                took = time.thread_time() - began
                report.slowest_decision_seconds = max(report.slowest_decision_seconds, took)
                report.decisions += 1
                for view in views:
                    answers.of_view(view)
                report.unreadable = max(report.unreadable, len(cache.unreadable()))
                stop.wait(PAUSE * took)  # the objects are made and read by threads of this process, too
            for number in range(commands, sum(wire.sent.values()) // OBJECTS_OF_COMMANDS):
                answers.of_commands(hostile, number)
                commands = number + 1
            report.failures += tracebacks.found + answers.failures
            if time.monotonic() - told > 10:
                told = time.monotonic()
                progress(f"{sum(wire.sent.values())} of {objects} objects, {report.decisions} decisions")
            if done:
                break
    except Exception as error:
        logging.getLogger(__name__).exception("a decision failed")
        report.failures.append(f"{type(error).__name__}: {error}")
    finally:
        stop.set()
        logging.getLogger().removeHandler(tracebacks)
        for thread in threads:
            thread.join(STALL_SECONDS)
    report.answers, report.slowest_answer_seconds = answers.count, answers.slowest_seconds
    report.objects, report.slowest_event_seconds = sum(wire.sent.values()), wire.slowest
    report.failures += [f"{path} was listed {count} times" for path, count in wire.lists.items() if count > 1]
    if max(report.slowest_event_seconds, report.slowest_decision_seconds) > STALL_SECONDS:
        report.failures.append(f"a stall of more than {STALL_SECONDS:.0f} s")
    return report
