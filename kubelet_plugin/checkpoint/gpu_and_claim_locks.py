"""Locks by key (a GPU, a claim) with timeouts; errors and logs name the holder of a lock.

There is no node-wide lock: claims on different GPUs never wait for each other. Keys are always locked in sorted order,
so two claims that share GPUs can't deadlock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from driver.errors import RecoverableError

log = logging.getLogger(__name__)

LOCK_TIMEOUT_SECONDS = 15.0
"""Longest wait. A prepare waits at most twice, for its claim and for its GPUs. Both waits and its request to the API
server end before the kubelet's 45 s, so that the kubelet gets an error that names the holder."""

LONG_WAIT_SECONDS = 2.0
"""A longer wait is logged: creating a partition takes less."""


def claim_key(uid: str) -> str:
    """The key of a claim's lock; the key of a GPU's lock is its UUID."""
    return f"claim {uid}"


class LockTimeoutError(RecoverableError):
    """A lock was not available in time; the message names its holder."""


@dataclass(slots=True)
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    owner: str = ""
    since: float = 0.0
    users: int = 0
    waiting: list[str] = field(default_factory=list)


class KeyedLocks:
    """One lock per key; an unused key needs no memory. ``waited`` receives the seconds until all keys were acquired."""

    def __init__(
        self, timeout_seconds: float = LOCK_TIMEOUT_SECONDS, waited: Callable[[float], None] = lambda _: None
    ) -> None:
        self._timeout_seconds, self._waited = timeout_seconds, waited
        self._entries: dict[str, _Entry] = {}
        self._guard = threading.Lock()

    @contextmanager
    def hold(self, keys: Iterable[str], owner: str) -> Iterator[None]:
        """Hold all ``keys`` inside the block. Raises LockTimeoutError, holding none."""
        started = time.monotonic()
        taken: list[str] = []
        try:
            for key in sorted(set(keys)):
                self._take(key, owner, started + self._timeout_seconds)
                taken.append(key)
            self._waited(time.monotonic() - started)
            yield
        finally:
            for key in reversed(taken):
                entry = self._entries[key]
                entry.owner = ""
                entry.lock.release()
                self._leave(key, entry)

    def waits(self) -> list[str]:
        """Current waits: one sentence each."""
        with self._guard:
            return [
                f"{waiting} waits for {key}, which {self._holder(entry)}"
                for key, entry in sorted(self._entries.items())
                for waiting in entry.waiting
            ]

    def _take(self, key: str, owner: str, deadline: float) -> None:
        with self._guard:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry()
            entry.users += 1
        if not entry.lock.acquire(blocking=False) and not self._wait(key, entry, owner, deadline):
            holder = self._holder(entry)
            self._leave(key, entry)
            raise LockTimeoutError(f"{owner} waited {self._timeout_seconds:.0f} s for {key}, which {holder}")
        entry.owner, entry.since = owner, time.monotonic()

    def _wait(self, key: str, entry: _Entry, owner: str, deadline: float) -> bool:
        """Whether the lock was acquired in time."""
        with self._guard:
            entry.waiting.append(owner)
        try:
            seconds = max(0.0, deadline - time.monotonic())
            if entry.lock.acquire(timeout=min(LONG_WAIT_SECONDS, seconds)):
                return True
            if seconds <= LONG_WAIT_SECONDS:
                return False
            log.warning("waits", extra={"work": owner, "lock": key, "holder": self._holder(entry)})
            return entry.lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
        finally:
            with self._guard:
                entry.waiting.remove(owner)

    def _holder(self, entry: _Entry) -> str:
        return f"is in use by {entry.owner or 'an unknown claim'} since {time.monotonic() - entry.since:.0f} s"

    def _leave(self, key: str, entry: _Entry) -> None:
        with self._guard:
            entry.users -= 1
            if not entry.users:
                del self._entries[key]
