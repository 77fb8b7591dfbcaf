"""Plays all nodes and their controller while pods are measured: slices follow what claims get."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from controller.cluster.fleet import Fleet
from driver.kube.client import KubeClient
from driver.kube.types import Claim
from driver.kube.watch_cache import Change, WatchCache
from driver.kube.work_loop import Loop
from driver.model.device import Device
from driver.model.offer import SHARED, Spot
from driver.model.shared_memory import gib_of
from driver.slices.publisher import COALESCE_INTERVAL_SECONDS
from tests.bench.scale.fleet import ServedFleet
from tests.bench.scale.layouts import Publishing
from tests.bench.scale.nodes import pool_of
from tests.bench.scale.pods import SYNC_S, Pods
from tests.bench.scale.writing import WRITERS
from tests.harness.waiting import wait_for
from tests.support.workloads import CLAIMS

Allocated = tuple[tuple[str, str, int], ...]
"""Pool and name of each device of a claim, and the GiB that it has of a shared one."""


class Keeper:
    """Tells ``publishing`` what claims get and which pods wait, and writes what it says."""

    def __init__(
        self, client: KubeClient, served: ServedFleet, publishing: Publishing, fleet: Fleet, pods: Pods
    ) -> None:
        self._served = served
        self._publishing = publishing
        self._pods = pods
        self._fleet = fleet
        self._node_of_pool = {pool_of(node).name: node for node in fleet.nodes}
        self._by_name: dict[str, dict[str, Device]] = {}
        self._changed: set[str] = set()
        self._changing = threading.Lock()
        self._claims = WatchCache(client, CLAIMS, Claim, _allocated, self._claims_changed)
        self._loop = Loop("keeping slices", self._keep, COALESCE_INTERVAL_SECONDS)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Slices are kept while the block runs."""
        stop = threading.Event()
        keeping = threading.Thread(target=self._loop.run, args=(stop,), daemon=True)
        with ThreadPoolExecutor(WRITERS) as self._nodes_at_once:
            threading.Thread(target=self._claims.run, args=(stop,), daemon=True).start()
            keeping.start()
            self._pods.on_change = self._loop.notify
            try:
                wait_for(lambda: self._claims.synced, SYNC_S, "the claims were listed")
                yield
            finally:
                stop.set()
                self._loop.notify()
                keeping.join()

    def _claims_changed(self, changes: Sequence[Change[Allocated]]) -> None:
        devices = [device for change in changes for device in self._devices(change.new or change.old or ())]
        with self._changing:
            self._changed |= {device.gpu.uuid for device in devices}
        self._loop.notify()

    def _keep(self) -> float | None:
        with self._changing:
            changed, self._changed = self._changed, set()
        served = {key.name for key in self._claims.snapshot()}
        self._publishing.changed(self._held(changed) if changed else {}, self._pods.waiting(served))
        list(self._nodes_at_once.map(self._update, self._publishing.due()))
        again = self._publishing.due_in_s()
        return None if again == math.inf else again

    def _update(self, node: str) -> None:
        self._served.update(node, self._publishing)

    def _held(self, gpus: set[str]) -> Mapping[str, Sequence[Device]]:
        """All that claims have of each of ``gpus``."""
        held = {uuid: list(self._fleet.gpus[uuid].held) for uuid in gpus}
        for allocated in self._claims.snapshot().values():
            for device in self._devices(allocated):
                if device.gpu.uuid in held:
                    held[device.gpu.uuid].append(device)
        return held

    def _devices(self, allocated: Allocated) -> Iterator[Device]:
        for pool, name, gib in allocated:
            if pool not in self._by_name:
                gpus = self._fleet.nodes[self._node_of_pool[pool]]
                self._by_name[pool] = {device.name: device for entry in gpus for device in entry.devices}
            device = self._by_name[pool][name]
            yield device if device.shared is None else replace(device, spot=Spot(SHARED, gib))


def _allocated(found: Claim) -> Allocated | None:
    allocation = found.status.allocation
    if allocation is None:
        return None
    results = allocation.devices.results
    return tuple((result.pool, result.device, gib_of(result.consumed_capacity, 0) or 0) for result in results)
