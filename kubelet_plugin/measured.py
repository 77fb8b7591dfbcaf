"""Parts of the node plugin, each wrapped so that it tells how long its work took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from driver.kube.events import Type
from driver.kube.objects import Reference
from driver.steps import Moment
from kubelet_plugin.claims import ClaimReference
from kubelet_plugin.locks import KeyedLocks
from kubelet_plugin.preparation import PreparedDevice
from kubelet_plugin.service import ClaimWork
from kubelet_plugin.steps import Observer, Step
from kubelet_plugin.telling import Record

Measure = Callable[[str, float], None]
"""(result, seconds)"""

RESULTS = SUCCESS, ERROR = "success", "error"


class MeasuredWork:
    """Claim work that tells how long each call took, and what made it fail."""

    def __init__(
        self, work: ClaimWork, prepared: Measure, unprepared: Measure, failed: Callable[[Exception], None]
    ) -> None:
        self._work = work
        self._prepared = prepared
        self._unprepared = unprepared
        self._failed = failed

    def prepare(self, reference: ClaimReference) -> Sequence[PreparedDevice]:
        with self._measured(self._prepared):
            return self._work.prepare(reference)

    def unprepare(self, reference: ClaimReference) -> None:
        with self._measured(self._unprepared):
            self._work.unprepare(reference)

    @contextmanager
    def _measured(self, measure: Measure) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            measure(ERROR, time.perf_counter() - started)
            self._failed(error)
            raise
        measure(SUCCESS, time.perf_counter() - started)


class MeasuredLocks(KeyedLocks):
    """Locks that tell how many seconds it took until they were held."""

    def __init__(self, waited: Callable[[float], None]) -> None:
        super().__init__()
        self._waited = waited

    @contextmanager
    def hold(self, keys: Iterable[str], owner: str) -> Iterator[None]:
        started = time.perf_counter()
        with super().hold(keys, owner):
            self._waited(time.perf_counter() - started)
            yield


class StepClock:
    """A step's observer that also tells how many seconds the step took, without those of the other observer."""

    def __init__(self, observer: Observer, took: Callable[[Step, float], None]) -> None:
        self._observer = observer
        self._took = took
        self._own = threading.local()  # a step begins and ends in one thread

    def __call__(self, step: Step, moment: Moment) -> None:
        started = vars(self._own)
        if moment == "after":
            self._took(step, time.perf_counter() - started.pop(step))
        self._observer(step, moment)
        if moment == "before":
            started[step] = time.perf_counter()


class CountedEvents:
    """Events that are also counted, by reason; what is told of a claim is told of its pods, too, and counts once."""

    def __init__(self, record: Record, count: Callable[[str], None]) -> None:
        self._record = record
        self._count = count

    def __call__(self, about: Reference, reason: str, message: str, kind: Type) -> None:
        if about.kind != "Pod":
            self._count(reason)
        self._record(about, reason, message, kind)
