"""Waiting for what the API server tells at once: polling would slow what is measured, and see it late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

from driver.kube.client import KubeClient, load_configuration
from driver.kube.types import Key, KubeObject
from driver.kube.watch_cache import WatchCache
from tests.harness.cluster import Cluster
from tests.harness.waiting import DeadlineError, wait_for

T = TypeVar("T", bound=KubeObject)

SYNC_S = 10.0


class Watched(Generic[T]):
    """The objects of one resource as they are; get one from ``watched``."""

    def __init__(self, client: KubeClient, path: str, kind: type[T], selectors: Mapping[str, str]) -> None:
        self._changed = threading.Condition()
        self.cache: WatchCache[T, T] = WatchCache(client, path, kind, lambda item: item, self._tell, selectors)

    def wait(self, what: str, predicate: Callable[[Mapping[Key, T]], bool], deadline_s: float) -> float:
        """Wait until ``predicate`` holds of the objects; the ``time.perf_counter`` of when it was seen to."""
        with self._changed:
            if self._changed.wait_for(lambda: predicate(self.cache.snapshot()), deadline_s):
                return time.perf_counter()
        raise DeadlineError(f"{what}: not within {deadline_s:g} s")

    def _tell(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()


@contextmanager
def watched(cluster: Cluster, path: str, kind: type[T], **selectors: str) -> Iterator[Watched[T]]:
    """The objects at ``path``, watched by a thread that ends with the process at the latest."""
    found = Watched(KubeClient(load_configuration(cluster.kubeconfig), "tessera-bench"), path, kind, selectors)
    stop = threading.Event()
    threading.Thread(target=found.cache.run, args=(stop,), daemon=True).start()
    try:
        wait_for(lambda: found.cache.synced, SYNC_S, f"list of {path}", interval_s=0.005)
        yield found
    finally:
        stop.set()
