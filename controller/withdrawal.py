"""Which published offers are on their way out of the slices.

An offer that shall stand no longer is first fenced, and withdrawn only when nobody holds it (``controller.fence``);
it stays withdrawn until it has left the node's slices or is wanted again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

from controller.fence import Fence
from controller.fenced import PoolDevice
from controller.steps import Observer, Step
from driver.kube.loop import Loop
from driver.steps import observed, unobserved

log = logging.getLogger(__name__)

COALESCE_S = 1.0
"""Devices are fenced many at a time: it takes five requests, whatever their number."""


class Withdrawals:
    """Thread-safe. ``on_change`` is called when something may be withdrawn; it must return quickly.

    A device that is wanted no longer stays for ``linger_s`` first. Its taint keeps new decisions away from it meanwhile
    and those that were on their way get written, so that the fence hardly ever has to refuse one; and most devices are
    wanted again by then, or go without a fence because something on their GPU is prepared.
    """

    def __init__(
        self,
        fence: Fence,
        on_change: Callable[[], None],
        linger_s: float,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer = unobserved,
    ) -> None:
        self._fence = fence
        self._linger_s = linger_s
        self._on_change = on_change
        self._clock = clock
        self._observer = observer
        self._lock = threading.Lock()
        self._unwanted_since: dict[PoolDevice, float] = {}
        self._batch: set[PoolDevice] = set()
        self._withdrawn: set[PoolDevice] = set()
        self._loop = Loop("taking offers back", self._take_back, COALESCE_S)
        self.run = self._loop.run
        self.notify = self._loop.notify

    def decide(
        self, excess: Collection[PoolDevice], is_published: Callable[[PoolDevice], bool]
    ) -> frozenset[PoolDevice]:
        """Take ``excess`` back; returns what may go now."""
        with self._lock:
            excess, now = set(excess), self._clock()
            self._withdrawn = {device for device in self._withdrawn & excess if is_published(device)}
            # Its fence has run out before the node took it away: once more from the start.
            self._withdrawn = {device for device in self._withdrawn if self._fence.is_fenced(device)}
            wanted = excess - self._withdrawn
            self._unwanted_since = {device: self._unwanted_since.get(device, now) for device in wanted}
            # One that is wanted again has its fence lifted: it is no longer in the batch, whatever comes next.
            self._batch &= excess
            todo, withdrawn = bool(wanted), frozenset(self._withdrawn)
        if todo:
            self._loop.notify()
        return withdrawn

    def _take_back(self) -> float | None:
        """Fence what is ripe; returns in how many seconds the next will be."""
        with self._lock:
            now = self._clock()
            ripe = {device for device, since in self._unwanted_since.items() if now - since >= self._linger_s}
            young = [since for since in self._unwanted_since.values() if now - since < self._linger_s]
            self._batch = set(ripe)
        self._fence.expire()
        if ripe:
            self._withdraw(ripe)
        return min(young) + self._linger_s - now if young else None

    def _withdraw(self, ripe: set[PoolDevice]) -> None:
        result = self._fence.take_back(ripe)
        free = result.devices
        with observed(self._observer, Step.WITHDRAW):
            with self._lock:
                wanted_again = free - self._batch
                self._withdrawn |= free & self._batch
                for device in self._batch - result.undecided:
                    self._unwanted_since.pop(device, None)
            self._fence.lift(wanted_again)
            self._on_change()
