"""A few threads for work that may hang: one piece that does must not keep the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

WORKERS = 16
"""Pieces of work at once. Those for one hung GPU wait for its lock in vain, each for as long as the lock's deadline."""


class Crew:
    """For one caller."""

    def __init__(self, name: str, patience_s: float) -> None:
        """``patience_s``: how long ``run`` waits for what it started."""
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix=name)
        self._patience_s = patience_s
        self._running: dict[str, Future[None]] = {}

    def run(self, jobs: Mapping[str, Callable[[], None]]) -> None:
        """Run ``jobs`` by key, but for those that still run from before; raises what is no error of a single job."""
        self._running = {key: future for key, future in self._running.items() if not future.done()}
        started = {key: self._pool.submit(job) for key, job in jobs.items() if key not in self._running}
        self._running |= started
        done, _ = wait(started.values(), self._patience_s)
        for future in done:
            future.result()

    def close(self) -> None:
        """Start nothing any more; what hangs is left behind."""
        self._pool.shutdown(wait=False, cancel_futures=True)
