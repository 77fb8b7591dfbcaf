"""Offers that are no longer wanted, on their way out of the slices.

``Withdrawals`` fences them (``controller.fence.fence``). Such an offer stays withdrawn until it has left the node's
slices or is wanted again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from controller.cluster.claim_index import PoolDevice
from controller.fence.fence import Fence
from controller.fence.fenced_devices import REREAD_SECONDS
from controller.step_names import Observer, Step
from driver.clock import soonest
from driver.kube.work_loop import Loop
from driver.step_observer import observed, unobserved

COALESCE_SECONDS = 1.0
"""Time in which devices are collected: fencing takes five requests, whatever their number."""

URGENT_COALESCE_SECONDS = 0.02
"""The same for devices for which a pending claim waits."""


class Withdrawals:
    """Thread-safe; ``loop`` fences. ``on_change`` is called when a device may be withdrawn, or when another
    process has fenced one; it must return quickly.

    An unwanted device first stays published for ``linger_s``. Its taint prevents new decisions meanwhile, and earlier
    ones are written, so that the fence hardly ever refuses one; and most devices are wanted again by then, or are
    removed without a fence because a claim on their GPU is prepared.
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
        self._urgent: set[PoolDevice] = set()
        self._batch: set[PoolDevice] = set()
        self._withdrawn: set[PoolDevice] = set()
        self.loop = Loop("withdrawing offers", self._turn, URGENT_COALESCE_SECONDS)

    def decide(
        self,
        excess: Collection[PoolDevice],
        is_published: Callable[[PoolDevice], bool],
        urgent: Collection[PoolDevice] = (),
    ) -> frozenset[PoolDevice]:
        """Begin to withdraw ``excess``. Returns the devices that the nodes may remove now.

        ``urgent`` are those that a pending claim waits for: they do not stay published for ``linger_s``.
        """
        with self._lock:
            excess, now = set(excess), self._clock()
            self._withdrawn = {device for device in self._withdrawn & excess if is_published(device)}
            # A device whose fence expired before the node removed it starts again.
            self._withdrawn = {device for device in self._withdrawn if device in self._fence.fenced.devices}
            unwanted = excess - self._withdrawn
            self._unwanted_since = {device: self._unwanted_since.get(device, now) for device in unwanted}
            # The fence of a device that is wanted again is lifted: it leaves the batch.
            self._batch &= excess
            self._urgent = unwanted & set(urgent)
            todo, withdrawn = bool(unwanted), frozenset(self._withdrawn)
            at_once = not self._urgent <= self._batch
        if todo:
            self.loop.notify_within(0.0 if at_once else COALESCE_SECONDS)
        return withdrawn

    def _turn(self) -> float | None:
        due_s = self._take_back()
        if self._fence.fenced.reread():
            self._on_change()
        return soonest(due_s, REREAD_SECONDS)

    def _take_back(self) -> float | None:
        """Fence the devices that are due. Returns seconds until the next is due."""
        with self._lock:
            now = self._clock()
            lingers = {
                device: since
                for device, since in self._unwanted_since.items()
                if now - since < self._linger_s and device not in self._urgent
            }
            due = self._unwanted_since.keys() - lingers.keys()
            self._batch = set(due)
        self._fence.expire()
        if due:
            self._withdraw(due)
        return min(lingers.values()) + self._linger_s - now if lingers else None

    def _withdraw(self, due: set[PoolDevice]) -> None:
        result = self._fence.take_back(due)
        free = result.devices
        with observed(self._observer, Step.WITHDRAW):
            with self._lock:
                wanted_again = free - self._batch
                self._withdrawn |= free & self._batch
                for device in self._batch - result.undecided:
                    self._unwanted_since.pop(device, None)
            self._fence.lift(wanted_again)
            self._on_change()
