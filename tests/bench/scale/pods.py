"""Pods with one claim each: made at once, and seen bound or given up by a watch."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from driver.kube.client import KubeClient
from driver.kube.types import ObjectMeta
from driver.kube.watch_cache import Change, WatchCache
from tests.bench.placement.replay import claim, pod
from tests.bench.placement.trace import Request
from tests.bench.scale.bulk import Etcd, Object
from tests.bench.scale.writing import WRITERS
from tests.harness.waiting import DeadlineError, wait_for
from tests.support.workloads import CLAIMS, NAMESPACE, PODS

SYNC_S, GONE_S = 60.0, 300.0


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""


class Condition(msgspec.Struct, frozen=True):
    type: str
    reason: str = ""


class PodStatus(msgspec.Struct, frozen=True):
    conditions: tuple[Condition, ...] = ()


class SeenPod(msgspec.Struct, frozen=True):
    metadata: ObjectMeta
    spec: PodSpec
    status: PodStatus = PodStatus()

    @property
    def told_unschedulable(self) -> bool:
        """Whether the scheduler has tried, and parked it."""
        return any(each.reason == "Unschedulable" for each in self.status.conditions)


@dataclass(frozen=True)
class Burst:
    """Pods that were made at once: how many were bound, and within how many seconds: of the last, or of the limit.

    Meanwhile the scheduler used ``scheduler_cpu_s``, controller and simulated fleet together ``tessera_cpu_s`` (0 where
    the benchmark plays them), and the API server answered ``writes`` of each resource, of anybody.
    """

    made: int
    bound: int
    seconds: float
    scheduler_cpu_s: float = 0.0
    tessera_cpu_s: float = 0.0
    writes: Mapping[str, int] = field(default_factory=dict)

    @property
    def pods_a_second(self) -> float:
        return self.bound / self.seconds if self.bound else 0.0


@dataclass
class Pods:
    """Every pod of the measurement. ``on_change`` when pods came, were bound or went."""

    client: KubeClient
    etcd: Etcd
    on_change: Callable[[], None] = lambda: None
    _requests: dict[str, Request] = field(default_factory=dict)
    _bound_at: dict[str, float] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self, stop: threading.Event) -> None:
        """Begin to watch; returns when the picture is complete."""
        self._cache = WatchCache(self.client, PODS, SeenPod, lambda seen: seen, self._seen)
        threading.Thread(target=self._cache.run, args=(stop,), daemon=True).start()
        wait_for(lambda: self._cache.synced, SYNC_S, "the pods were listed")

    def waiting(self, served: Collection[str]) -> Mapping[Request, int]:
        """How many pods wait with each request, those for several devices aside, and those that are ``served``:
        their claims have got something, though they may not be bound yet."""
        pods = self._cache.snapshot()
        names = [key.name for key, seen in pods.items() if not seen.spec.node_name and key.name not in served]
        requests = [self._requests[name] for name in names if name in self._requests]
        return Counter(request for request in requests if request.count == 1)

    def burst(self, name: str, requests: Sequence[Request], limit_s: float) -> Burst:
        """A pod for each request, all there at the same moment; returns when all are bound or the time is over."""
        names = self._make(name, requests)
        began = time.monotonic()
        self.etcd.put("pods", map(_waiting_pod, names), together=1)
        with self._changed:
            self._changed.wait_for(lambda: self._bound_at.keys() >= set(names), limit_s)
            bound = [self._bound_at[each] for each in names if each in self._bound_at]
        ended = max(bound) if len(bound) == len(names) else time.monotonic()
        return Burst(len(names), len(bound), ended - began)

    def park(self, name: str, count: int, request: Request, limit_s: float) -> tuple[int, float]:
        """Make pods that nothing can serve; says how many the scheduler had given up once after how many seconds.

        Those it has not come to within ``limit_s`` are deleted.
        """
        names = set(self._make(name, [request] * count))
        began = time.monotonic()
        self.etcd.put("pods", map(_waiting_pod, names), together=1)
        with suppress(DeadlineError):
            wait_for(lambda: not self._untried(names), limit_s, f"{count} pods are parked")
        took, late = time.monotonic() - began, self._untried(names)
        self._each(lambda each: self.client.delete(f"{PODS}/{each}"), late)
        return count - len(late), took

    def _make(self, name: str, requests: Sequence[Request]) -> list[str]:
        """The claims; the names are the pods', too."""
        names = [f"{name}-{number}" for number in range(len(requests))]
        self._requests |= dict(zip(names, requests, strict=True))
        for each in names[:1]:
            self.client.create(CLAIMS, claim(each, self._requests[each]))
        claims = (_in_default(claim(each, self._requests[each])) for each in names[1:])
        self.etcd.put("resourceclaims", claims, together=1)
        return names

    def give_up(self, name: str) -> None:
        """Delete the pods of this burst that still wait, so that the next one has the scheduler to itself."""
        late = [each for each in self._requests if each.startswith(f"{name}-") and each not in self._bound_at]
        self._each(lambda each: self.client.delete(f"{PODS}/{each}"), late)

    def remove(self) -> None:
        """Delete every pod and claim that was made here, and wait until they are gone."""
        paths = [f"{path}/{name}" for path in (PODS, CLAIMS) for name in self._requests]
        self._each(partial(self.client.delete, missing_ok=True), paths)
        wait_for(self._gone, GONE_S, "pods and claims are gone", 0.5)
        self._requests.clear()
        self._bound_at.clear()

    def _each(self, work: Callable[[str], object], names: Iterable[str]) -> None:
        with ThreadPoolExecutor(WRITERS) as writers:
            for future in [writers.submit(work, name) for name in names]:
                future.result()

    def _untried(self, names: set[str]) -> set[str]:
        return names - {key.name for key, seen in self._cache.snapshot().items() if seen.told_unschedulable}

    def _gone(self) -> bool:
        return not any(self.client.get_object(path)["items"] for path in (PODS, CLAIMS))

    def _seen(self, changes: Iterable[Change[SeenPod]]) -> None:
        now = time.monotonic()
        with self._changed:
            for change in changes:
                if change.new and change.new.spec.node_name:
                    self._bound_at.setdefault(change.key.name, now)
            self._changed.notify_all()
        self.on_change()


def _waiting_pod(name: str) -> Object:
    return {**_in_default(pod(name)), "status": {"phase": "Pending"}}


def _in_default(item: Object) -> Object:
    return {**item, "metadata": {**item["metadata"], "namespace": NAMESPACE}}
