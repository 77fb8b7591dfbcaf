"""Pods with a claim that come and go, and kubelets that are played: they have the real plugin prepare the claims."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc

from driver.errors import ApiError
from kubelet_plugin.dra.protocol.generated import dra_v1_pb2
from tests.bench.kubelet import Kubelet
from tests.harness.cluster import Cluster
from tests.support.allocations import Held
from tests.support.plugin import PluginProcess
from tests.support.published import DRIVER
from tests.support.scheduling import Scheduling, asked
from tests.support.workloads import PODS

OVERLAPS = "overlaps"
"""In what the plugin says of a claim whose memory another claim has."""

RETRY_S = 2.0

ABSENT_S, AGAIN_S = 60.0, 0.2
"""A plugin that was killed is started again."""


class Kubelets:
    """Prepare each claim as soon as it is allocated, while ``working`` is set. ``changed`` is for ``Allocations``."""

    def __init__(self, nodes: Iterable[PluginProcess]) -> None:
        self._kubelets = {f"{node.node.name}-{DRIVER}": Kubelet(node.socket) for node in nodes}
        self._lock = threading.Lock()
        self._work = ThreadPoolExecutor(8)
        self._held: dict[str, Held] = {}
        self._never = threading.Event()
        self.working = threading.Event()
        self.working.set()
        self.prepared: dict[str, Held] = {}
        self.refused: dict[str, str] = {}
        """By claim, what the plugin said of those that overlap what another claim has."""

    def changed(self, name: str, held: Held | None) -> None:
        with self._lock:
            before = self._held.pop(name, None)
            if held:
                self._held[name] = held
            lost = before and before != held and self.prepared.get(name) == before
        if before and lost:
            self._work.submit(self._unprepare, name, before)
        if held:
            self._work.submit(self._prepare, name, held)

    def settled(self, name: str) -> bool:
        """Whether the plugin has answered for what the claim has."""
        with self._lock:
            held = self._held.get(name)
            return held is None or self.prepared.get(name) == held or name in self.refused

    def unprepare(self, name: str) -> None:
        """As a kubelet does before the pod is gone."""
        with self._lock:
            held = self._held.pop(name, None)
            prepared = held is not None and self.prepared.get(name) == held
        if held and prepared:
            self._unprepare(name, held)

    def close(self) -> None:
        self.working.set()
        self._work.shutdown()
        for kubelet in self._kubelets.values():
            kubelet.close()

    def _prepare(self, name: str, held: Held) -> None:
        self.working.wait()
        with self._lock:
            if self._held.get(name) != held:
                return
        if not self._prepared_in_time(name, held):
            return
        with self._lock:
            self.prepared[name] = held
            late = self._held.get(name) != held
        if late:
            self._unprepare(name, held)

    def _prepared_in_time(self, name: str, held: Held) -> bool:
        """Try again for a while, as a kubelet does: a claim that was ended may still be prepared."""
        end = time.monotonic() + RETRY_S
        while True:
            try:
                _answered(self._of(held).prepare, _claim(name, held))
            except RuntimeError as error:
                if OVERLAPS in str(error) and time.monotonic() < end:
                    self._never.wait(0.1)
                    continue
                if OVERLAPS in str(error):
                    self.refused[name] = str(error)
                return False
            return True

    def _unprepare(self, name: str, held: Held) -> None:
        _answered(self._of(held).unprepare, _claim(name, held))
        with self._lock:
            if self.prepared.get(name) == held:
                del self.prepared[name]

    def _of(self, held: Held) -> Kubelet:
        return self._kubelets[held.devices[0].pool]


def _answered(call: Callable[[dra_v1_pb2.Claim], float], claim: dra_v1_pb2.Claim) -> None:
    """Call again and again while there is no plugin, as a kubelet does."""
    end = time.monotonic() + ABSENT_S
    while True:
        try:
            call(claim)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                raise
            time.sleep(AGAIN_S)
        else:
            return


def _claim(name: str, held: Held) -> dra_v1_pb2.Claim:
    return dra_v1_pb2.Claim(namespace="default", name=name, uid=held.uid)


class Jobs:
    """Pods of one container and one claim each, by name; ``asked_at`` is monotonic."""

    def __init__(self, cluster: Cluster, kubelets: Kubelets) -> None:
        self._cluster = cluster
        self._kubelets = kubelets
        self._running: dict[str, Scheduling] = {}
        self.asked_at: dict[str, float] = {}

    def ask(self, name: str, device_class: str, node: str | None = None) -> str:
        self._running[name] = Scheduling(self._cluster, name)
        self.asked_at[name] = time.monotonic()
        self._running[name].ask(asked(device_class), node=node)
        return name

    def end(self, *names: str) -> None:
        """Delete their pods and claims, without waiting until they are gone."""
        for name in names:
            self._kubelets.unprepare(name)
            for path in reversed(self._running.pop(name).paths):
                with suppress(ApiError):
                    self._cluster.api.request("DELETE", path, {"gracePeriodSeconds": 0})

    def abandon(self, *names: str) -> None:
        """Delete their pods alone: what was decided for their claims may still be written."""
        for name in names:
            self._cluster.api.request("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})

    def end_all(self) -> None:
        self.end(*self._running)

    @property
    def names(self) -> list[str]:
        return list(self._running)
