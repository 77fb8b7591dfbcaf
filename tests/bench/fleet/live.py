"""A thousand nodes in one process against the real API server and scheduler, and ``tessera controller``, measured."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from driver.kube.client import KubeClient, load_configuration
from tests.bench.fleet.load import Load
from tests.bench.fleet.occupancy import hold
from tests.bench.fleet.offers import Refreshing
from tests.bench.fleet.watching import PERIOD_S, Usage, Writes
from tests.bench.placement.measures import percentile
from tests.bench.placement.replay import claim, pod
from tests.bench.placement.trace import KEPT_PROFILES
from tests.harness.cluster import Cluster
from tests.harness.processes import ProcessTable
from tests.harness.progress import Progress
from tests.harness.waiting import wait_for
from tests.support.controller import ControllerProcess
from tests.support.plugin import TESSERA
from tests.support.workloads import CLAIMS, PODS

RATE = 5.0
"""Claims a second."""

STAY_S = 20.0
WARM_S, MEASURED_S = 15.0, 60.0
PUBLISHED_S, PLANNED_S, ALONE_S, REFRESHED_S = 600.0, 300.0, 240.0, 60.0
SLOWEST = 6
CALM_PER_S, CALM_LOOKS, CALM_S = 2.0, 3, 300.0
AFTER_S = 20.0
"""How long is watched what comes after everything seems done."""

PLANS = "/apis/gpu.tessera.dev/v1alpha1/gpunodeplans"


@dataclass
class Steady:
    """The controller while claims come and go. ``core_share``: of one core. Milliseconds, mebibytes."""

    nodes: int
    held: int
    claims_per_s: float
    core_share: float
    rss_mb: float
    writes_per_s: float
    fleet_core_share: float
    fleet_rss_mb: float


@dataclass
class Refreshed:
    """From an allocation to offers that are whole again, one claim after the other."""

    nodes: int
    calm_after_s: float
    allocations: int
    p50_ms: float
    p99_ms: float
    slowest: list[tuple[int, str, int]]
    """Milliseconds, profile, the how manieth claim it was."""


@dataclass
class Storm:
    """Writes a second of all that Tessera writes, over time, and what was done when."""

    writes: list[tuple[float, float]]
    marks: list[tuple[float, str]]
    most_per_s: dict[str, float] = field(default_factory=dict)


@dataclass
class Live:
    """The parts that run."""

    cluster: Cluster
    client: KubeClient
    nodes: int
    held: int
    fleet: int
    controller: ControllerProcess
    log: Path
    calm_after_s: float = 0.0
    """From the moment all nodes followed until hardly anything was written any more."""

    @property
    def controller_pid(self) -> int:
        record = ProcessTable(self.cluster.directory).get("tessera-controller")
        assert record is not None
        return record.pid

    def following(self) -> int:
        """How many nodes follow their plans, by the last line of the fleet."""
        lines = [line for line in self.log.read_text().splitlines() if "follow the controller" in line]
        return int(lines[-1].split(", ")[1].split()[0]) if lines else 0

    def wait_following(self, count: int, deadline_s: float) -> None:
        wait_for(lambda: self.following() == count, deadline_s, f"{count} nodes follow the controller")


@contextmanager
def running(cluster: Cluster, nodes: int, progress: Progress) -> Iterator[Live]:
    """Three quarters held, published, planned."""
    client = KubeClient(load_configuration(cluster.kubeconfig), "tessera-bench")
    with progress.part("claims that hold three quarters", 30):
        held = hold(client, [f"sim-{number:04}" for number in range(nodes)])
    with started(cluster, nodes, progress, held=held) as live:
        yield live


@contextmanager
def started(
    cluster: Cluster, nodes: int, progress: Progress, name: str = "sim", flags: tuple[str, ...] = (), held: int = 0
) -> Iterator[Live]:
    """The controller, with ``flags``, and the fleet of this name: published, planned."""
    client = KubeClient(load_configuration(cluster.kubeconfig), "tessera-bench")
    controller = ControllerProcess(cluster, flags=("--linger-s", "10", *flags))
    controller.start()
    log = cluster.logs_dir / "fleet.log"
    command = [TESSERA, "sim", "fleet", "--name", name, "--nodes", str(nodes), "--no-leases"]
    with log.open("wb") as output:
        fleet = subprocess.Popen(
            [*command, "--kubeconfig", str(cluster.kubeconfig)], stdout=output, stderr=subprocess.STDOUT
        )
    live = Live(cluster, client, nodes, held, fleet.pid, controller, log)
    try:
        with progress.part(f"{nodes} nodes publish and follow the controller", 60):
            live.wait_following(nodes, PUBLISHED_S)
        with progress.part("what they hold is told", 30):
            live.calm_after_s = wait_calm(client)
        yield live
    finally:
        controller.stop()
        fleet.send_signal(signal.SIGKILL)  # the cluster goes, too: nothing has to be removed from it
        fleet.wait()


def wait_calm(client: KubeClient) -> float:
    """Wait until Tessera writes next to nothing; returns after how many seconds."""
    stop, writes = threading.Event(), Writes(client)
    threading.Thread(target=writes.run, args=(stop,), daemon=True).start()

    def is_calm() -> bool:
        last = [rate for _, rate in writes.per_second(OURS)][-CALM_LOOKS:]
        return len(last) == CALM_LOOKS and max(last) <= CALM_PER_S

    wait_for(is_calm, CALM_S, "hardly anything is written")
    stop.set()
    return writes.counts[-1][0] - CALM_LOOKS * PERIOD_S


def steady(live: Live, measured_s: float = MEASURED_S) -> Steady:
    """Claims come at RATE and go; what the controller needs meanwhile."""
    stop = threading.Event()
    writes = Writes(live.client)
    load = Load(live.client, RATE, STAY_S)
    for target in (load.run, writes.run):
        threading.Thread(target=target, args=(stop,), daemon=True).start()
    time.sleep(STAY_S + WARM_S)
    asked, before = load.asked, len(writes.counts)
    usage, fleet = Usage(live.controller_pid).start(), Usage(live.fleet).start()
    time.sleep(measured_s)
    shares = (usage.core_share, fleet.core_share)
    rate, rss = (load.asked - asked) / measured_s, (usage.rss_mb, fleet.rss_mb)
    of_tessera = [each for _, each in writes.per_second(OURS)[before:]]
    stop.set()
    return Steady(
        live.nodes,
        live.held,
        rate,
        shares[0],
        rss[0],
        sum(of_tessera) / max(1, len(of_tessera)),
        shares[1],
        rss[1],
    )


def refreshed(live: Live, allocations: int = 60) -> Refreshed:
    """One pod after the other, of profiles that are kept on offer, none of which ends."""
    stop, rng = threading.Event(), random.Random(live.nodes)
    refreshing = Refreshing(live.client, stop)
    for number in range(allocations):
        name = f"one-{number}"
        live.client.create(CLAIMS, claim(name, rng.choice(KEPT_PROFILES)))
        live.client.create(PODS, pod(name))
        done = f"claim {number} got a device and its offers are whole again"
        wait_for(lambda count=number + 1: len(refreshing.took) >= count, REFRESHED_S, done)  # type: ignore[misc]
    stop.set()
    took = [seconds * 1000 for seconds, _ in refreshing.took]
    slowest = sorted(((round(ms), refreshing.took[at][1], at) for at, ms in enumerate(took)), reverse=True)[:SLOWEST]
    took.sort()
    p50, p99 = percentile(took, 0.5), percentile(took, 0.99)
    return Refreshed(live.nodes, live.calm_after_s, allocations, p50, p99, slowest)


OURS = frozenset({"gpunodeplans", "resourceslices", "configmaps"})
"""What only Tessera writes here; ``status.devices`` of claims comes with each claim."""


def storm(live: Live, *, lost: bool) -> Storm:
    """Kill the controller and start it again; if ``lost``, stop it until all nodes stand alone, and start it again."""
    stop = threading.Event()
    writes = Writes(live.client)
    threading.Thread(target=writes.run, args=(stop,), daemon=True).start()
    time.sleep(AFTER_S / 2)
    writes.mark("controller killed, started")
    live.controller.kill()
    live.controller.start()
    time.sleep(2 * AFTER_S)
    if lost:
        writes.mark("controller stopped")
        live.controller.stop()
        live.wait_following(0, ALONE_S)
        writes.mark("controller started")
        live.controller.start()
        live.wait_following(live.nodes, PLANNED_S)
        writes.mark("all nodes follow")
        time.sleep(2 * AFTER_S)
    stop.set()
    rates = writes.per_second(OURS)
    ends = [at for at, _ in writes.marks[1:]] + [float("inf")]
    most = {
        what: max((rate for at, rate in rates if begin <= at < end), default=0.0)
        for (begin, what), end in zip(writes.marks, ends, strict=True)
    }
    return Storm(rates, writes.marks, most)
