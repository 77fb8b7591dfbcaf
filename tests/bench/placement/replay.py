"""The trace as pods and claims on a real cluster: who is bound in time, and who gives up."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from driver.errors import ApiError
from driver.kube.client import KubeClient
from driver.kube.types import ObjectMeta
from driver.kube.watch_cache import Change, WatchCache
from driver.model.offer import FULL, SHARE, SHARED, OfferKind
from tests.bench.placement.trace import Arrival, Request
from tests.harness.images import BUSYBOX_IMAGE
from tests.support.workloads import CLAIMS, PODS

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
CLIENTS = 8
"""Requests at once; each arrival is two of them, and two at its end."""


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""


class Condition(msgspec.Struct, frozen=True):
    type: str
    status: str
    message: str = ""


class PodStatus(msgspec.Struct, frozen=True):
    conditions: tuple[Condition, ...] = ()


class Pod(msgspec.Struct, frozen=True):
    metadata: ObjectMeta
    spec: PodSpec
    status: PodStatus = PodStatus()


class Agenda:
    """What is to be done when, in order of time. Thread-safe."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()

    def at(self, when: float, work: Callable[[], None]) -> None:
        """Call ``work``, which must return quickly, at ``when`` of the monotonic clock."""
        with self._changed:
            heapq.heappush(self._due, (when, next(self._count), work))
            self._changed.notify()

    def run(self, until: Callable[[], bool]) -> None:
        """Work until ``until`` says that all is done, which is asked after each."""
        while not until():
            self._next()()

    def _next(self) -> Callable[[], None]:
        with self._changed:
            while not self._due or (left := self._due[0][0] - time.monotonic()) > 0:
                self._changed.wait(left if self._due else None)
            return heapq.heappop(self._due)[2]


@dataclass
class Fate:
    """What became of one arrival; times of the monotonic clock, None: not so far."""

    arrival: Arrival
    asked_at: float | None = None
    bound_at: float | None = None
    given_up: bool = False
    fitted: bool = False
    """When it was given up, there was room for it somewhere."""
    reason: str = ""
    """The scheduler's, of one that was given up."""

    @property
    def decided(self) -> bool:
        return self.bound_at is not None or self.given_up

    @property
    def admitted(self) -> bool:
        return self.bound_at is not None and not self.given_up


@dataclass
class Replay:
    """``unit_s`` is the length of the trace's unit of time in seconds; ``fits`` says whether a key fits anywhere.

    ``wait_released`` waits until no node holds the devices of a claim; then it may be deallocated.
    """

    client: KubeClient
    trace: Sequence[Arrival]
    unit_s: float
    fits: Callable[[OfferKind], bool]
    wait_released: Callable[[str], None]
    patience_s: float = PATIENCE_S
    fates: list[Fate] = field(default_factory=list)
    began: float = 0.0

    def run(self) -> None:
        """Returns when the last arrival is bound or has given up; what is bound by then stays."""
        stop = threading.Event()
        self.fates = [Fate(arrival) for arrival in self.trace]
        self._agenda = Agenda()
        self._pods = WatchCache(self.client, PODS, Pod, lambda pod: pod, self._seen)
        threading.Thread(target=self._pods.run, args=(stop,), daemon=True).start()
        with ThreadPoolExecutor(CLIENTS) as self._requests:
            self.began = time.monotonic() + 0.5
            for number, arrival in enumerate(self.trace):
                self._agenda.at(self._time(arrival.at), _later(self._requests, self._ask, number))
            self._agenda.run(lambda: all(fate.decided for fate in reversed(self.fates)))
        stop.set()

    def _time(self, units: float) -> float:
        return self.began + units * self.unit_s

    def _ask(self, number: int) -> None:
        fate = self.fates[number]
        name = f"pod-{number}"
        self.client.create(CLAIMS, claim(name, fate.arrival.request))
        fate.asked_at = time.monotonic()
        self.client.create(PODS, pod(name))
        self._agenda.at(fate.asked_at + self.patience_s, lambda: self._lose_patience(number))

    def _seen(self, changes: Iterable[Change[Pod]]) -> None:
        now = time.monotonic()
        for change in changes:
            if change.new and change.new.spec.node_name:
                self._bound(int(change.key.name.removeprefix("pod-")), now)

    def _bound(self, number: int, now: float) -> None:
        fate = self.fates[number]
        if fate.bound_at is None:
            fate.bound_at = now
            stay = fate.arrival.duration * self.unit_s
            self._agenda.at(now + stay, _later(self._requests, self._delete, number))

    def _lose_patience(self, number: int) -> None:
        fate = self.fates[number]
        if fate.bound_at is not None:
            return
        fate.fitted = self.fits(fate.arrival.request.key) and fate.arrival.request.count == 1
        fate.reason = self._reason(f"pod-{number}")
        fate.given_up = True
        self._requests.submit(_logged(self._delete), number)

    def _reason(self, name: str) -> str:
        found = next((pod for key, pod in self._pods.snapshot().items() if key.name == name), None)
        conditions = found.status.conditions if found else ()
        return next((each.message for each in conditions if each.type == "PodScheduled"), "")

    def _delete(self, number: int) -> None:
        name = f"pod-{number}"
        self._delete_object(f"{PODS}/{name}")
        self.wait_released(name)
        self._delete_object(f"{CLAIMS}/{name}")

    def _delete_object(self, path: str) -> None:
        try:
            self.client.delete(path)
        except ApiError as error:
            if error.status != 404:
                raise


def _later(requests: ThreadPoolExecutor, work: Callable[[int], None], number: int) -> Callable[[], None]:
    def submit() -> None:
        requests.submit(_logged(work), number)

    return submit


def _logged(work: Callable[[int], None]) -> Callable[[int], None]:
    def call(number: int) -> None:
        try:
            work(number)
        except ApiError as error:
            log.error("a request of the replay failed: %s", error)

    return call


CLASSES = {FULL: "gpu-training", SHARE: "gpu-dev", SHARED: "gpu-shared"}
"""Of devices that are no partitions."""


def claim(name: str, request: Request) -> dict[str, Any]:
    """Of the class that a person would name."""
    profile = str(request.key.profile).replace(".", "-")
    device_class = CLASSES.get(request.key, f"gpu-inference-{profile}")
    capacity = {"capacity": {"requests": {"memory": f"{request.gib}Gi"}}} if request.gib else {}
    asked = {"name": "gpu", "exactly": {"deviceClassName": device_class, "count": request.count, **capacity}}
    together = [{"matchAttribute": "gpu.tessera.dev/nvlinkClique"}] if request.count > 1 else []
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [asked], "constraints": together}},
    }


def pod(name: str) -> dict[str, Any]:
    """It asks for CPU: of pods that don't, the scheduler fills one node after the other."""
    resources: Mapping[str, Any] = {"requests": {"cpu": "100m", "memory": "128Mi"}, "claims": [{"name": "gpu"}]}
    spec = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "main", "image": BUSYBOX_IMAGE, "resources": resources}],
        "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
