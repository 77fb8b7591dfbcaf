"""One pod with one claim, from its creation to its end, and the kubelet's part in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc

from driver.errors import ApiError
from kubelet_plugin.dra.protocol.generated import dra_v1_pb2
from tests.bench.kubelet import Kubelet
from tests.harness.cluster import Cluster
from tests.harness.waiting import DeadlineError, wait_for
from tests.soak.mix import Fate
from tests.support.allocations import Allocations
from tests.support.scheduling import Scheduling, asked

ALLOCATED_S = 60.0
"""Longer than that nobody waits for room."""

ANSWERED_S = 90.0
"""Until a kubelet that asks again and again must have succeeded: a plugin that was killed is back long before."""

RETRY_S = 0.5

REFUSED, MOVED_S = "NVML says UNKNOWN", 5.0
"""What the plugin says while the hardware refuses, and how long that lasts until the pod is moved."""


class RefusedByHardware(Exception):
    """A claim that can't be prepared where it is."""


Count = Literal["asked", "ended", "served", "unserved", "gangs_without_room", "retried", "moved"]


@dataclass
class Tally:
    """How it went, counted by many threads."""

    asked: int = 0
    ended: int = 0
    served: int = 0
    unserved: int = 0
    gangs_without_room: int = 0
    moved: int = 0
    """Claims on a GPU that refuses to be cut, which ended unprepared, as if their pods were evicted."""
    prepare_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Claims that were not prepared or unprepared in the end, and why."""
    retried: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: Count) -> None:
        with self.lock:
            setattr(self, what, getattr(self, what) + 1)


class Lives:
    """Leads many lives at once on one node."""

    def __init__(self, cluster: Cluster, node: str, kubelet: Kubelet, allocations: Allocations) -> None:
        self.tally = Tally()
        self._cluster = cluster
        self._node = node
        self._kubelet = kubelet
        self._allocations = allocations

    def lead(self, name: str, fate: Fate) -> None:
        """From the creation of claim and pod to their deletion. What fails is in the tally."""
        self.tally.add("asked")
        pod = Scheduling(self._cluster, name)
        requests = [asked(cls, name=f"r{i}", count=count) for i, (cls, count) in enumerate(fate.wish.requests)]
        try:
            pod.ask(*requests, node=self._node)
            self._use(pod, fate)
        except (ApiError, DeadlineError) as error:
            self.tally.failures.append(f"{name} ({fate.wish.name}): {error}")
        finally:
            self._delete(pod)
            self.tally.add("ended")

    def _use(self, pod: Scheduling, fate: Fate) -> None:
        if not self._allocated(pod.name):
            self.tally.add("unserved")
            return
        claim = dra_v1_pb2.Claim(namespace="default", name=pod.name, uid=pod.claim()["metadata"]["uid"])
        try:
            for _ in range(fate.prepares):
                seconds = self._insist(lambda: self._kubelet.prepare(claim), f"prepare {claim}")
                self.tally.prepare_ms.append(1000 * seconds)
        except RefusedByHardware:
            self._insist(lambda: self._kubelet.unprepare(claim), f"unprepare {claim}")
            self.tally.add("moved")
            return
        time.sleep(fate.lifetime_s)
        for _ in range(fate.unprepares):
            self._insist(lambda: self._kubelet.unprepare(claim), f"unprepare {claim}")
        self.tally.add("served")

    def _allocated(self, name: str) -> bool:
        try:
            return bool(wait_for(lambda: self._allocations.of(name), ALLOCATED_S, f"devices for {name}"))
        except DeadlineError:
            return False

    def _insist(self, call: Callable[[], float], what: str) -> float:
        """Seconds of the call that succeeded. Raises DeadlineError, RefusedByHardware."""
        began = time.monotonic()
        end = began + ANSWERED_S
        while True:
            try:
                return call()
            except (RuntimeError, grpc.RpcError) as error:
                self.tally.add("retried")
                if REFUSED in str(error) and time.monotonic() > began + MOVED_S:
                    raise RefusedByHardware(what) from error
                if time.monotonic() > end:
                    raise DeadlineError(f"{what}: not within {ANSWERED_S:g} s: {error}") from error
            time.sleep(RETRY_S)

    def _delete(self, pod: Scheduling) -> None:
        options: dict[str, Any] = {"gracePeriodSeconds": 0}
        for path in reversed(pod.paths):
            with suppress(ApiError):
                self._cluster.api.request("DELETE", path, options)
