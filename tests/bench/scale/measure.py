"""One fleet on one cluster: each layout in turn, the same bursts of pods."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

from driver.kube.client import KubeClient, load_configuration
from driver.model.offer import SHARE, SHARED
from driver.model.plan import PATH as PLANS
from driver.model.plan import PublishHeld
from driver.slices.publisher import SLICES
from tests.bench.fleet.live import started, wait_calm
from tests.bench.fleet.watching import writes_so_far
from tests.bench.placement.trace import FULL_NODE, SKEW_SMALL, Request
from tests.bench.scale import scheduler
from tests.bench.scale.bulk import Etcd
from tests.bench.scale.fleet import ServedFleet
from tests.bench.scale.keeper import Keeper
from tests.bench.scale.layouts import PUBLISHING, Layout, devices_published
from tests.bench.scale.nodes import Division, held, loaded_fleet, parts
from tests.bench.scale.pods import Burst, Pods
from tests.bench.usage import cpu_s
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.waiting import wait_for

SMALL = next(request for request in SKEW_SMALL.weights if str(request) == "1g.10gb")
MIX = {request: weight for request, weight in SKEW_SMALL.weights.items() if str(request) not in {"7g.80gb", "4g.40gb"}}

SIZES_GIB = (1, 2, 3, 6, 10, 20)

CONTROLLER_FLAGS = ("--publish-held-gpus", "0", "--log-level", "info")
"""Held devices are left out in small fleets, too."""

WARM_UP = 3
WARM_UP_S, PARKED_S, HELD_LEFT_OUT_S = 120.0, 100.0, 180.0


@dataclass(frozen=True)
class Plan:
    """What is measured: bursts of ``pods`` for ``burst_s`` seconds at most, ``parked`` pods that nothing can serve.

    ``division``: what the pods ask for, and what claims hold before.
    """

    nodes: int
    pods: int
    burst_s: float
    parked: int
    division: Division = Division.PARTITIONS


@dataclass(frozen=True)
class Found:
    """One layout on one fleet.

    ``devices`` are published in the whole fleet before the first pod, ``parking_s`` is how long the scheduler took to
    give ``parked`` pods up once, ``slice_updates`` were written during the bursts.
    """

    layout: str
    nodes: int
    devices: int
    small: Burst
    mix: Burst
    small_beside_parked: Burst
    parked: int
    parking_s: float
    slice_updates: int
    cost: scheduler.Cost

    @property
    def bursts(self) -> tuple[Burst, ...]:
        return self.small, self.mix, self.small_beside_parked


@dataclass(frozen=True)
class Used:
    """Totals since the start: CPU of the scheduler, CPU of controller and fleet, and writes by resource."""

    scheduler_cpu_s: float
    tessera_cpu_s: float
    writes: Mapping[str, float]

    def since(self, before: Used, burst: Burst) -> Burst:
        """``burst``, which began when ``before`` was used, with what it cost."""
        counts = {resource: round(count - before.writes.get(resource, 0)) for resource, count in self.writes.items()}
        return replace(
            burst,
            scheduler_cpu_s=self.scheduler_cpu_s - before.scheduler_cpu_s,
            tessera_cpu_s=self.tessera_cpu_s - before.tessera_cpu_s,
            writes={resource: count for resource, count in counts.items() if count},
        )


@dataclass
class Measurement:
    """Measures one layout after the other on one cluster, whose scheduler is started anew for each."""

    cluster: Cluster
    plan: Plan
    progress: Progress
    _stop: threading.Event = field(default_factory=threading.Event)
    _processes: Sequence[int] = ()
    """Controller and fleet, where they are the product's own."""

    def run(self, layouts: Sequence[Layout], found: Callable[[Found], None]) -> None:
        """Calls ``found`` after each layout. ``PRODUCT`` must be the only one: it makes the Node objects itself."""
        self.client = KubeClient(load_configuration(self.cluster.kubeconfig), "tessera-bench")
        etcd = Etcd(self.cluster.etcd)
        self.fleet, self.served = loaded_fleet(self.plan.nodes, self.plan.division), ServedFleet(self.client, etcd)
        self.pods = Pods(self.client, etcd)
        self.cluster.control_plane.stop_scheduler()
        if Layout.PRODUCT not in layouts:
            with self.progress.part(f"{self.plan.nodes} Node objects") as part:
                self.served.create_nodes(part, self.fleet.nodes)
        with self.progress.part(f"{sum(len(entry.held) for entry in self.fleet)} allocated claims") as part:
            self.served.hold(part, held(self.fleet))
        self.pods.start(self._stop)
        for layout in layouts:
            found(self._measure_product() if layout is Layout.PRODUCT else self._measure(layout))
        self._stop.set()
        etcd.close()

    def _measure(self, layout: Layout) -> Found:
        publishing = PUBLISHING[layout](self.fleet)
        devices = sum(devices_published(publishing, self.fleet.nodes))
        with self.progress.part(f"{layout}: {devices} devices in the slices") as part:
            self.served.publish(part, self.fleet.nodes, publishing)
        keeper = Keeper(self.client, self.served, publishing, self.fleet, self.pods)
        with keeper.running():
            found = self._bursts(layout, devices, lambda: self.served.slice_updates)
        with self.progress.part("pods go"):
            self.cluster.control_plane.stop_scheduler()
            self.pods.remove()
        return found

    def _measure_product(self) -> Found:
        """The slices are those of ``tessera sim fleet``, whose nodes follow ``tessera controller``."""
        with started(self.cluster, self.plan.nodes, self.progress, "node", CONTROLLER_FLAGS) as live:
            self._processes = (live.controller_pid, live.fleet)
            with self.progress.part("nodes without offers leave out what is held", 60):
                self.served.wait_untainted()
                wait_for(self._held_left_out, HELD_LEFT_OUT_S, "all plans leave out held devices", 1.0)
                wait_calm(self.client)
            slices = self.client.get_object(SLICES)["items"]
            devices = sum(len(item["spec"].get("devices") or ()) for item in slices)
            return self._bursts(Layout.PRODUCT, devices, lambda: round(writes_so_far(self.client)["resourceslices"]))

    def _held_left_out(self) -> bool:
        plans = self.client.get_object(PLANS)["items"]
        return all(plan["spec"].get("publishHeld") == PublishHeld.BESIDE_OFFERS for plan in plans)

    def _bursts(self, layout: Layout, devices: int, slice_updates: Callable[[], int]) -> Found:
        plan, before = self.plan, slice_updates()
        with self.progress.part(f"{layout}: the scheduler starts and warms up"):
            self._scheduler = process = self.cluster.control_plane.restart_scheduler()
            self.pods.burst("warm", self._alike(WARM_UP), WARM_UP_S)
        small = self._burst(layout, "small", self._alike(plan.pods))
        mix = self._burst(layout, "mix", self._mixed(plan.pods))
        with self.progress.part(f"{layout}: {plan.parked} pods are parked"):
            parked, parking_s = self.pods.park("parked", plan.parked, FULL_NODE, PARKED_S)
        beside = self._burst(layout, "beside", self._alike(plan.pods))
        updates = slice_updates() - before
        cost = scheduler.cost(process)
        return Found(layout.value, plan.nodes, devices, small, mix, beside, parked, parking_s, updates, cost)

    def _burst(self, layout: Layout, name: str, requests: Sequence[Request]) -> Burst:
        with self.progress.part(f"{layout}: {len(requests)} pods ({name})"):
            before = self._used()
            burst = self.pods.burst(name, requests, self.plan.burst_s)
            burst = self._used().since(before, burst)
            self.pods.give_up(name)
        bound = f"{burst.bound} of {burst.made} in {burst.seconds:.1f} s"
        self.progress.say(f"    {bound}: {burst.pods_a_second:.1f} pods/s")
        return burst

    def _alike(self, count: int) -> list[Request]:
        """Ten of shared GPUs need all of one."""
        if self.plan.division is not Division.SHARED:
            return [Request(SHARE) if self.plan.division is Division.SHARES else SMALL] * count
        whole = min(gpu.shared.gib for gpu in self.fleet if gpu.shared is not None)
        return list(islice(cycle(Request(SHARED, gib=gib) for gib in parts(whole)), count))

    def _mixed(self, count: int) -> list[Request]:
        chosen = random.Random(count)
        if self.plan.division is Division.SHARED:
            return [Request(SHARED, gib=gib) for gib in chosen.choices(SIZES_GIB, k=count)]
        return (
            self._alike(count)
            if self.plan.division is Division.SHARES
            else chosen.choices(list(MIX), list(MIX.values()), k=count)
        )

    def _used(self) -> Used:
        tessera = sum(map(cpu_s, self._processes))
        return Used(scheduler.cost(self._scheduler).cpu_s, tessera, writes_so_far(self.client))
