"""Locks by key (a GPU, a claim), with deadlines and a name for whoever holds them.

There is no node-wide lock: claims on different GPUs never wait for each other. Keys are always taken in
sorted order, so two claims that share GPUs can't wait for each other in a circle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from driver.errors import RecoverableError

DEADLINE_S = 15.0
"""Longest wait. A prepare waits twice at most, for its claim and for its GPUs, and both waits together with its
request to the API server end before the kubelet's 45 s: so it hears who was waited for."""


class LockTimeoutError(RecoverableError):
    """A lock was not to be had in time; the message says who holds it."""


@dataclass(slots=True)
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    owner: str = ""
    users: int = 0


class KeyedLocks:
    """One lock a key; a key that nobody uses costs nothing."""

    def __init__(self, deadline_s: float = DEADLINE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._guard = threading.Lock()

    @contextmanager
    def hold(self, keys: Iterable[str], owner: str) -> Iterator[None]:
        """Hold all ``keys`` inside the block. Raises LockTimeoutError at the deadline, holding none."""
        deadline = self._clock() + self._deadline_s
        taken: list[str] = []
        try:
            for key in sorted(set(keys)):
                self._take(key, owner, deadline)
                taken.append(key)
            yield
        finally:
            for key in reversed(taken):
                self._give_back(key)

    def _take(self, key: str, owner: str, deadline: float) -> None:
        with self._guard:
            entry = self._entries.setdefault(key, _Entry())
            entry.users += 1
        if entry.lock.acquire(timeout=max(0.0, deadline - self._clock())):
            entry.owner = owner
            return
        holder = entry.owner
        self._leave(key, entry)
        raise LockTimeoutError(f"{owner} waited {self._deadline_s:.0f} s for {key}, which is in use by {holder}")

    def _give_back(self, key: str) -> None:
        entry = self._entries[key]
        entry.owner = ""
        entry.lock.release()
        self._leave(key, entry)

    def _leave(self, key: str, entry: _Entry) -> None:
        with self._guard:
            entry.users -= 1
            if not entry.users:
                del self._entries[key]
