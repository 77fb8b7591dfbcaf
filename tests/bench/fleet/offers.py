"""How soon the offers of each profile are whole again."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable

from driver.kube.client import KubeClient
from driver.kube.types import Claim
from driver.kube.watch_cache import Change, WatchCache
from driver.slices.publisher import SLICES as EVERY_SLICE
from tests.bench.placement.refresh import OFFERS, DeviceId, Published, Slice, allocated, devices
from tests.harness.waiting import wait_for
from tests.support.workloads import CLAIMS

LISTED_S = 120.0


class Refreshing:
    """Times from an allocation, as a watch of claims tells it, to the slice by which two free offers of its profile
    stand (again, or still), as a watch of slices tells it. Of claims in the default namespace."""

    def __init__(self, client: KubeClient, stop: threading.Event) -> None:
        self._lock = threading.Lock()
        self._published: dict[DeviceId, Published] = {}
        self._open: defaultdict[str, set[DeviceId]] = defaultdict(set)
        self._held: dict[DeviceId, object] = {}
        self._taken: defaultdict[str, dict[DeviceId, frozenset[tuple[str, str, str]]]] = defaultdict(dict)
        self._since: defaultdict[str, list[float]] = defaultdict(list)
        self.took: list[tuple[float, str]] = []
        """Seconds, and of which profile."""
        slices = WatchCache(client, EVERY_SLICE, Slice, devices, self._slices_changed)
        claims = WatchCache(client, CLAIMS.replace("/namespaces/default", ""), Claim, allocated, self._claims_changed)
        for cache in (slices, claims):
            threading.Thread(target=cache.run, args=(stop,), daemon=True).start()
        wait_for(lambda: slices.synced and claims.synced, LISTED_S, "claims and slices were listed")
        self.took.clear()

    @property
    def missing(self) -> dict[str, int]:
        """Allocations after which the offers are not whole again, by profile."""
        return {profile: len(since) for profile, since in self._since.items() if since}

    def _slices_changed(self, changes: Iterable[Change[dict[DeviceId, Published]]]) -> None:
        with self._lock:
            for change in changes:
                for device in change.old or ():
                    self._open[self._published.pop(device).profile].discard(device)
                for device, new in (change.new or {}).items():
                    self._published[device] = new
                    self._take(device)
                    if new.open:
                        self._open[new.profile].add(device)
            self._look()

    def _claims_changed(self, changes: Iterable[Change[tuple[DeviceId, ...]]]) -> None:
        with self._lock:
            for change in changes:
                for device in change.old or ():
                    self._held.pop(device, None)
                    self._taken[device[0]].pop(device, None)
                for device in change.new or ():
                    self._held[device] = change.key
                    self._take(device)
                    if change.key.namespace == "default" and change.old is None and device in self._published:
                        self._since[self._published[device].profile].append(time.monotonic())
            self._look()

    def _take(self, device: DeviceId) -> None:
        if device in self._held and device in self._published:
            self._taken[device[0]][device] = self._published[device].memory

    def _look(self) -> None:
        now = time.monotonic()
        for profile, since in self._since.items():
            if since and sum(map(self._is_free, self._open[profile])) >= OFFERS:
                self.took += [(now - each, profile) for each in since]
                since.clear()

    def _is_free(self, device: DeviceId) -> bool:
        memory = self._published[device].memory
        return device not in self._held and all(memory.isdisjoint(taken) for taken in self._taken[device[0]].values())
