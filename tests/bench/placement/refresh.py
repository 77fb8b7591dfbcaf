"""``python -m tests.bench.placement.refresh``, or ``make bench-refresh``: how soon an allocated offer is replaced.

Node objects of 8 simulated H100 in one process, the real API server and scheduler, and ``tessera controller``. One pod
at a time takes an offer. Measured is the time from the allocation to the slice by which as many offers of that kind
stand as before, both as a watch tells them.
"""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import msgspec

from driver.kube.client import KubeClient, load_configuration
from driver.kube.types import Claim, Key, ObjectMeta
from driver.kube.watch_cache import Change, WatchCache
from driver.slices.build import CLOSED
from tests.bench.placement.fleet import Mode, running_fleet
from tests.bench.placement.measures import percentile
from tests.bench.placement.replay import claim, pod
from tests.bench.placement.trace import KEPT_PROFILES, NODE_GPUS
from tests.bench.results import machine
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess
from tests.support.plugin import SLICES
from tests.support.workloads import CLAIMS, PODS

OFFERS = 2
"""What the controller offers of each kind while nobody waits."""

SETTLED_S, REFRESHED_S = 900.0, 60.0

DeviceId = tuple[str, str]
"""Pool and name."""


class Text(msgspec.Struct, frozen=True):
    string: str = ""


class Taint(msgspec.Struct, frozen=True):
    key: str


class Consumed(msgspec.Struct, frozen=True, rename="camel"):
    counter_set: str
    counters: dict[str, object]


class Device(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    attributes: dict[str, Text] = {}
    taints: tuple[Taint, ...] = ()
    consumes_counters: tuple[Consumed, ...] = ()


class Pool(msgspec.Struct, frozen=True):
    name: str


class Spec(msgspec.Struct, frozen=True):
    pool: Pool
    devices: tuple[Device, ...] = ()


class Slice(msgspec.Struct, frozen=True):
    metadata: ObjectMeta
    spec: Spec


@dataclass(frozen=True)
class Published:
    """A device in the slices; ``memory`` are the memory slices that it takes, ``open``: new claims may get it."""

    profile: str
    memory: frozenset[tuple[str, str, str]]
    open: bool


@dataclass(frozen=True)
class Refreshes:
    """Times in milliseconds."""

    machine: str
    nodes: int
    allocations: int
    p50_ms: float
    p99_ms: float
    slice_updates: float

    def __str__(self) -> str:
        return (
            f"{self.nodes} nodes x {NODE_GPUS} GPUs, {self.allocations} allocations one by one: offers whole again "
            f"after p50 {self.p50_ms:.0f} ms, p99 {self.p99_ms:.0f} ms; {self.slice_updates:.2f} slice updates each "
            f"({self.machine})"
        )


class Watching:
    """What the slices have and what claims have, as the watches tell it."""

    def __init__(self, client: KubeClient, stop: threading.Event) -> None:
        self._changed = threading.Condition()
        self._published: dict[DeviceId, Published] = {}
        self._held: dict[Key, tuple[DeviceId, ...]] = {}
        self._allocated_at: dict[str, float] = {}
        self.updates = 0
        slices = WatchCache(client, SLICES, Slice, devices, self._slices_changed)
        claims = WatchCache(client, CLAIMS, Claim, allocated, self._claims_changed)
        for cache in (slices, claims):
            threading.Thread(target=cache.run, args=(stop,), daemon=True).start()
        wait_for(lambda: slices.synced and claims.synced, REFRESHED_S, "claims and slices were listed")

    def refreshed_ms(self, name: str, profile: str) -> float:
        """Waits until the claim is allocated and ``profile`` stands offered as often as it should be after that."""
        with self._changed:
            assert self._changed.wait_for(lambda: name in self._allocated_at, REFRESHED_S), f"{name} got nothing"
            assert self._changed.wait_for(lambda: self._free(profile) >= OFFERS, REFRESHED_S), f"{profile} stays short"
            return (time.monotonic() - self._allocated_at[name]) * 1000

    def _free(self, profile: str) -> int:
        held = {device for each in self._held.values() for device in each}
        taken = frozenset().union(*(self._published[device].memory for device in held if device in self._published))
        offers = ((device, each) for device, each in self._published.items() if each.open and each.profile == profile)
        return sum(device not in held and each.memory.isdisjoint(taken) for device, each in offers)

    def _slices_changed(self, changes: Iterable[Change[dict[DeviceId, Published]]]) -> None:
        with self._changed:
            for change in changes:
                self.updates += 1
                for gone in change.old or ():
                    self._published.pop(gone, None)
                self._published |= change.new or {}
            self._changed.notify_all()

    def _claims_changed(self, changes: Iterable[Change[tuple[DeviceId, ...]]]) -> None:
        with self._changed:
            for change in changes:
                self._held.pop(change.key, None)
                if change.new:
                    self._held[change.key] = change.new
                    self._allocated_at.setdefault(change.key.name, time.monotonic())
            self._changed.notify_all()


def devices(found: Slice) -> dict[DeviceId, Published]:
    pool = found.spec.pool.name
    return {
        (pool, device.name): Published(
            device.attributes.get("profile", Text()).string,
            frozenset(
                (pool, consumed.counter_set, counter)
                for consumed in device.consumes_counters
                for counter in consumed.counters
                if counter.startswith("memory-slice-")
            ),
            CLOSED["key"] not in {taint.key for taint in device.taints},
        )
        for device in found.spec.devices
    }


def allocated(found: Claim) -> tuple[DeviceId, ...] | None:
    allocation = found.status.allocation
    return tuple((each.pool, each.device) for each in allocation.devices.results) if allocation else None


def measure(cluster: Cluster, nodes: int, allocations: int) -> Refreshes:
    """One pod after the other, of profiles that are kept on offer, none of which ends."""
    stop, rng, took = threading.Event(), random.Random(nodes), []
    client = KubeClient(load_configuration(cluster.kubeconfig), "tessera-bench")
    controller = ControllerProcess(cluster, flags=("--linger-s", "10"))
    with running_fleet(cluster, nodes, Mode.CURATED) as fleet:
        controller.start()
        fleet.wait_settled(SETTLED_S)
        watching = Watching(client, stop)
        before = watching.updates
        for number in range(allocations):
            request, name = rng.choice(KEPT_PROFILES), f"pod-{number}"
            client.create(CLAIMS, claim(name, request))
            client.create(PODS, pod(name))
            took.append(watching.refreshed_ms(name, str(request.key.profile)))
        updates = watching.updates - before
        controller.stop()
    stop.set()
    took.sort()
    where = f"{machine()}, load {os.getloadavg()[0]:.1f}"
    return Refreshes(where, nodes, allocations, percentile(took, 0.5), percentile(took, 0.99), updates / allocations)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--nodes", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--allocations", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default="refresh-results.json", show_default=True)
def main(*, nodes: int, allocations: int, output: Path) -> None:
    """Measure how soon the offers are whole again after an allocation; print it and write it as JSON."""
    logging.basicConfig(level=logging.ERROR)  # the end of a cluster cuts watches off
    with control_plane("bench-refresh") as cluster:
        install(cluster)
        found = measure(cluster, nodes, allocations)
    click.echo(found)
    output.write_text(json.dumps(asdict(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
