"""``python -P FILE FOLDER``: the real controller, told by files in FOLDER to be slow, to stop or to die at a step.

``settings.json``  the flags of ``tessera controller``; next to them ``lease_s``, ``clock_off_s``, ``hasty``,
                   ``interval_s`` and ``reservation_s``
``seen``           gets a line "TIME STEP MOMENT" for every moment of every step; TIME is monotonic
``delay``          the most seconds by which each moment is delayed: short ones often, long ones seldom
``order``          "SIGNAL STEP MOMENT [STEP MOMENT ...]": the process gets the signal when it has come to these
                   moments, one after the other; the file goes just before
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from controller.app import run
from controller.eviction import preemptions
from controller.eviction.evictor import Evictor
from controller.eviction.recent_evictions import RecentEvictions
from controller.fence import withdrawals
from controller.settings import controller_settings
from driver.clock import Clock
from driver.kube.lease import Timing
from driver.logs import configure_logs
from driver.step_observer import Moment, observed

log = logging.getLogger(__name__)


class EvictionStep(StrEnum):
    """Steps that only tests name: a pod is evicted, and before that it is recorded as evicted."""

    EVICT = "evict"
    RECORD = "record"


class Orders:
    """The observer. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._never = threading.Event()
        self._seen = os.open(folder / "seen", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._order = ""
        self._reached = 0

    def __call__(self, step: StrEnum, moment: Moment) -> None:
        os.write(self._seen, f"{time.monotonic():.6f} {step.value} {moment}\n".encode())
        if most_s := self._read("delay"):
            self._never.wait(float(most_s) * random.random() ** 40)
        with self._lock:
            self._obey(step, moment)

    def _obey(self, step: StrEnum, moment: Moment) -> None:
        order = self._read("order")
        if order != self._order:
            self._order, self._reached = order, 0
        number, *words = order.split() or ["0"]
        points = list(zip(words[::2], words[1::2], strict=True))
        if self._reached >= len(points) or points[self._reached] != (step.value, moment):
            return
        self._reached += 1
        if self._reached == len(points):
            log.warning("obeying", extra={"order": order})
            (self._folder / "order").unlink()
            os.kill(os.getpid(), signal.Signals(int(number)))

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text()
        except FileNotFoundError:
            return ""


def observe_evictions(orders: Orders) -> None:
    evict, add = Evictor.evict, RecentEvictions.add

    def observed_evict(self: Evictor, *arguments: Any, **options: Any) -> bool:
        if options.get("is_rehearsal"):
            return evict(self, *arguments, **options)
        with observed(orders, EvictionStep.EVICT):
            return evict(self, *arguments, **options)

    def observed_add(self: RecentEvictions, *arguments: Any, **options: Any) -> None:
        with observed(orders, EvictionStep.RECORD):
            add(self, *arguments, **options)

    Evictor.evict, RecentEvictions.add = observed_evict, observed_add  # type: ignore[method-assign]


def main(folder: Path) -> None:
    configure_logs("text", "debug")
    values = json.loads((folder / "settings.json").read_text())
    lease_s, clock_off = values.pop("lease_s"), timedelta(seconds=values.pop("clock_off_s"))
    if values.pop("hasty"):
        withdrawals.COALESCE_SECONDS = 0.05
    preemptions.INTERVAL_SECONDS = values.pop("interval_s")
    preemptions.RESERVATION_SECONDS = values.pop("reservation_s")
    # A machine whose clock is wrong, in everything this process does.
    Clock.now = lambda self: datetime.now(UTC) + clock_off  # type: ignore[method-assign]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    timing = Timing(lease_s, lease_s * 2 / 3, lease_s * 2 / 15)
    orders = Orders(folder)
    observe_evictions(orders)
    # Tests count offers: nothing else is published but what is held.
    run(controller_settings(**{"min_published": "none", **values}), stop, orders, timing)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
