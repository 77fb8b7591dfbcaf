"""Pods with one claim each: made at once, and seen bound or given up by a watch."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from driver.kube.objects import Key as ObjectKey
from driver.kube.objects import ObjectMeta
from driver.kube.transport import KubeClient
from driver.kube.watch_cache import Change, WatchCache
from driver.placement import Key
from tests.bench.placement.replay import claim, pod
from tests.bench.placement.trace import Request
from tests.bench.scale.writing import WRITERS
from tests.harness.waiting import wait_for
from tests.support.workloads import CLAIMS, PODS

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
    """Pods that were made at once: how many were bound, and within how many seconds from the first one's creation."""

    made: int
    bound: int
    seconds: float

    @property
    def pods_a_second(self) -> float:
        return self.bound / self.seconds if self.bound else 0.0


@dataclass
class Pods:
    """Every pod of the measurement. ``on_change`` when pods came, were bound or went."""

    client: KubeClient
    on_change: Callable[[], None] = lambda: None
    _requests: dict[str, Request] = field(default_factory=dict)
    _bound_at: dict[str, float] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self, stop: threading.Event) -> None:
        """Begin to watch; returns when the picture is complete."""
        self._cache = WatchCache(self.client, PODS, SeenPod, lambda seen: seen, self._seen)
        threading.Thread(target=self._cache.run, args=(stop,), daemon=True).start()
        wait_for(lambda: self._cache.synced, SYNC_S, "the pods were listed")

    def waiting(self) -> Mapping[Key, int]:
        """How many pods wait for a device of each key, those for several devices aside."""
        pods = self._cache.snapshot()
        names = [key.name for key, seen in pods.items() if not seen.spec.node_name]
        requests = [self._requests[name] for name in names if name in self._requests]
        return Counter(request.key for request in requests if request.count == 1)

    def burst(self, name: str, requests: Sequence[Request], limit_s: float) -> Burst:
        """Make a pod for each request, and wait until all are bound or the time is over. Claims come first."""
        names = [f"{name}-{number}" for number in range(len(requests))]
        self._requests |= dict(zip(names, requests, strict=True))
        self._each(lambda each: self.client.create(CLAIMS, claim(each, self._requests[each])), names)
        began = time.monotonic()
        with ThreadPoolExecutor(WRITERS) as writers:
            for each in names:
                writers.submit(self.client.create, PODS, pod(each))
            with self._changed:
                self._changed.wait_for(lambda: self._bound_at.keys() >= set(names), limit_s)
                bound = [self._bound_at[each] for each in names if each in self._bound_at]
        return Burst(len(names), len(bound), max(bound, default=began + limit_s) - began)

    def park(self, name: str, count: int, request: Request, limit_s: float) -> float:
        """Make pods that nothing can serve; says after how many seconds the scheduler had given each of them up."""
        names = {f"{name}-{number}" for number in range(count)}
        self._requests |= dict.fromkeys(names, request)
        self._each(lambda each: self.client.create(CLAIMS, claim(each, request)), names)
        began = time.monotonic()
        self._each(lambda each: self.client.create(PODS, pod(each)), names)
        wait_for(lambda: self._parked(names), limit_s, f"{count} pods are parked")
        return time.monotonic() - began

    def give_up(self, name: str) -> None:
        """Delete the pods of this burst that still wait, so that the next one has the scheduler to itself."""
        late = [each for each in self._requests if each.startswith(f"{name}-") and each not in self._bound_at]
        self._each(lambda each: self.client.delete(f"{PODS}/{each}"), late)

    def remove(self) -> None:
        """Delete every pod and claim that was made here, and wait until they are gone."""
        self.client.delete(PODS)
        self.client.delete(CLAIMS)
        wait_for(self._gone, GONE_S, "pods and claims are gone", 0.5)
        self._requests.clear()
        self._bound_at.clear()

    def _each(self, work: Callable[[str], object], names: Iterable[str]) -> None:
        with ThreadPoolExecutor(WRITERS) as writers:
            for future in [writers.submit(work, name) for name in names]:
                future.result()

    def _parked(self, names: set[str]) -> bool:
        pods = self._cache.snapshot()
        return all((seen := pods.get(ObjectKey("default", name))) and seen.told_unschedulable for name in names)

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
