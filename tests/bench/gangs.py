"""``python -m tests.bench.gangs``: how soon the next gang is bound when another one ends.

Node objects of 8 simulated H100 in one process, the real API server and scheduler with the gate GenericWorkload, and
``tessera controller``. Two gangs (PodGroups) need more GPUs together than there are: one is bound, one is pending. The
bound one is deleted, and so on. Measured are the times from when its last claim is gone until the last pod of the
pending gang is bound, and until enough devices are offered; the rest is the scheduler's: it tries a gang again after 1,
2, 4, ... seconds and not when devices appear (docs/controller.md).
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import click

from driver.kube.client import KubeClient, load_configuration
from driver.kube.slice_types import ResourceSlice
from driver.kube.types import Claim, Pod
from driver.kube.watch_cache import Change, WatchCache
from tests.bench.placement.fleet import Mode, RunningFleet, running_fleet
from tests.bench.placement.measures import percentile
from tests.bench.placement.trace import NODE_GPUS
from tests.bench.results import machine
from tests.harness.cluster import Cluster
from tests.harness.layout import BASE, Layout
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess
from tests.support.gangs import GANGS, POD_GROUPS, gang_of, members
from tests.support.plugin import SLICES
from tests.support.workloads import CLAIMS, PODS

SETTLED_S, BOUND_S = 300.0, 120.0
CLIENTS = 8
FULL_GPU = re.compile(r"gpu-\d+")

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """Seconds of each run from free devices until enough are ``offered``, and until the gang is ``bound``.

    ``fresh``: seconds from the last created pod of a gang until it is bound, where there is room from the beginning.
    """

    controller: bool
    pods: int
    gpus_per_pod: int
    nodes: int
    waiting_s: float
    max_backoff_s: int
    offered: tuple[float, ...]
    bound: tuple[float, ...]
    fresh: tuple[float, ...]


def line(what: str, seconds: Iterable[float]) -> str:
    ordered = sorted(seconds)
    p50, p99 = percentile(ordered, 0.5), percentile(ordered, 0.99)
    return f"{what}: p50 {p50:.2f} s, p99 {p99:.2f} s, at most {ordered[-1]:.2f} s over {len(ordered)}"


class Timeline:
    """When pods were bound and claims were gone, as watches report it."""

    def __init__(self, client: KubeClient, stop: threading.Event) -> None:
        self._changed = threading.Condition()
        self._bound: dict[str, float] = {}
        self._gone: dict[str, float] = {}
        self._offered_on: dict[str, int] = {}
        self._offered: list[tuple[float, int]] = []
        """The number of full GPUs that the slices offer, over time."""
        pods = WatchCache(client, PODS, Pod, lambda found: found, self._pods)
        claims = WatchCache(client, CLAIMS, Claim, lambda found: found, self._claims)
        slices = WatchCache(client, SLICES, ResourceSlice, lambda found: found, self._slices)
        for cache in (pods, claims, slices):
            threading.Thread(target=cache.run, args=(stop,), daemon=True).start()
        wait_for(lambda: pods.synced and claims.synced, BOUND_S, "pods and claims were listed")

    def bound_at(self, names: Sequence[str]) -> float:
        return self._at(self._bound, names, "bound")

    def gone_at(self, names: Sequence[str]) -> float:
        return self._at(self._gone, names, "gone")

    def bound(self, names: Iterable[str]) -> int:
        """The number of these that are bound."""
        with self._changed:
            return sum(1 for name in names if name in self._bound)

    def offered_at(self, gpus: int, since: float) -> float:
        """When so many full GPUs were offered after ``since``; ``since`` if they were already."""
        with self._changed:
            before = [count for at, count in self._offered if at <= since][-1:]
            if before and before[0] >= gpus:
                return since
            return next(at for at, count in self._offered if at > since and count >= gpus)

    def _slices(self, changes: Iterable[Change[ResourceSlice]]) -> None:
        with self._changed:
            for each in changes:
                devices = each.new.spec.devices if each.new is not None else ()
                offered = [device for device in devices if FULL_GPU.fullmatch(device.name) and not device.taints]
                self._offered_on[each.key.name] = len(offered)
            self._offered.append((time.monotonic(), sum(self._offered_on.values())))

    def _at(self, times: dict[str, float], names: Sequence[str], what: str) -> float:
        with self._changed:
            done = self._changed.wait_for(lambda: times.keys() >= set(names), BOUND_S)
            assert done, f"not all are {what}: {sorted(set(names) - times.keys())}"
            return max(times[name] for name in names)

    def _pods(self, changes: Iterable[Change[Pod]]) -> None:
        self._note(self._bound, [each.key.name for each in changes if each.new and each.new.spec.node_name])

    def _claims(self, changes: Iterable[Change[Claim]]) -> None:
        self._note(self._gone, [each.key.name for each in changes if each.new is None])

    def _note(self, times: dict[str, float], names: Iterable[str]) -> None:
        with self._changed:
            for name in names:
                times.setdefault(name, time.monotonic())
            self._changed.notify_all()


@dataclass
class Measurement:
    client: KubeClient
    timeline: Timeline
    fleet: RunningFleet
    pods: int
    gpus_per_pod: int
    settled: bool
    """Whether the nodes follow plans."""

    def run(self, runs: int, waiting_s: float) -> tuple[list[float], list[float], list[float]]:
        """Seconds from free devices until enough are offered and until the next gang is bound; of fresh gangs."""
        offered, bound = [], []
        names = [f"gang-{number}" for number in range(runs + 1)]
        fresh = [self._fresh(f"fresh-{number}") for number in range(runs)]
        self._create(names[0])
        self.timeline.bound_at(members(names[0], self.pods))
        for ends, comes in pairwise(names):
            self._create(comes)
            time.sleep(waiting_s)
            assert not self.timeline.bound(members(comes, self.pods)), f"{comes} is bound beside {ends}"
            self._delete(ends)
            free = self.timeline.gone_at(members(ends, self.pods))
            bound.append(self.timeline.bound_at(members(comes, self.pods)) - free)
            offered.append(self.timeline.offered_at(self.pods * self.gpus_per_pod, free) - free)
            click.echo(f"{comes}: offered after {offered[-1]:.2f} s, bound after {bound[-1]:.2f} s", err=True)
        return offered, bound, fresh

    def _fresh(self, gang: str) -> float:
        if self.settled:
            self.fleet.wait_settled(SETTLED_S)
        self._create(gang)
        created = time.monotonic()
        took = self.timeline.bound_at(members(gang, self.pods)) - created
        self._delete(gang)
        self.timeline.gone_at(members(gang, self.pods))
        click.echo(f"{gang}: bound after {took:.2f} s", err=True)
        return took

    def _create(self, gang: str) -> None:
        group, claims, pods = gang_of(gang, self.pods, self.gpus_per_pod)
        self.client.create(POD_GROUPS, group)
        self._all(lambda body: self.client.create(CLAIMS, body), claims)
        self._all(lambda body: self.client.create(PODS, body), pods)

    def _delete(self, gang: str) -> None:
        names = members(gang, self.pods)
        self._all(lambda name: self.client.delete(f"{PODS}/{name}"), names)
        self._all(self.fleet.kubelets.wait_released, names)
        self._all(lambda name: self.client.delete(f"{CLAIMS}/{name}"), names)
        self.client.delete(f"{POD_GROUPS}/{gang}")

    def _all(self, call: Callable[[T], object], each: Iterable[T]) -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(call, each))


def measure(
    cluster: Cluster,
    pods: int,
    gpus_per_pod: int,
    nodes: int,
    runs: int,
    waiting_s: float,
    max_backoff_s: int,
    *,
    controlled: bool,
) -> Found:
    stop = threading.Event()
    client = KubeClient(load_configuration(cluster.kubeconfig), "tessera-bench")
    controller = ControllerProcess(cluster, flags=("--linger-s", "10", "--publish-held", "always"))
    with running_fleet(cluster, nodes, Mode.CURATED if controlled else Mode.BEST_FIRST) as fleet:
        if controlled:
            controller.start()
            fleet.wait_settled(SETTLED_S)
        work = Measurement(client, Timeline(client, stop), fleet, pods, gpus_per_pod, settled=controlled)
        offered, bound, fresh = work.run(runs, waiting_s)
        if controlled:
            controller.stop()
        assert not fleet.kubelets.overlaps, fleet.kubelets.overlaps
    stop.set()
    return Found(
        controlled, pods, gpus_per_pod, nodes, waiting_s, max_backoff_s, tuple(offered), tuple(bound), tuple(fresh)
    )


def scheduler_flags(name: str, max_backoff_s: int) -> list[str]:
    """Flags for a configuration in which pods are tried again after that time at most."""
    layout = Layout(BASE / name)
    configuration = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(layout.kubeconfig("kube-scheduler"))},
        "leaderElection": {"leaderElect": False},
        "podInitialBackoffSeconds": 1,
        "podMaxBackoffSeconds": max_backoff_s,
    }
    path = Path(tempfile.mkdtemp()) / "scheduler.json"
    path.write_text(json.dumps(configuration))
    return [f"--config={path}"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--runs", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--pods", type=click.IntRange(min=1), default=16, show_default=True, help="In a gang.")
@click.option("--gpus-per-pod", type=click.IntRange(1, NODE_GPUS), default=1, show_default=True)
@click.option("--nodes", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--waiting-s", type=float, default=3.0, show_default=True, help="Before the other gang ends.")
@click.option("--max-backoff-s", type=click.IntRange(min=1), default=10, show_default=True, help="Of the scheduler.")
@click.option("--controller/--no-controller", "controlled", default=True, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default="gangs-results.json", show_default=True)
@click.option("--name", default="bench-gangs", show_default=True, help="Of the cluster that is made for it.")
def main(
    *,
    runs: int,
    pods: int,
    gpus_per_pod: int,
    nodes: int,
    waiting_s: float,
    max_backoff_s: int,
    controlled: bool,
    output: Path,
    name: str,
) -> None:
    """Measure how soon a pending gang is bound after another one has ended; print lines and write JSON.

    \b
    Examples:
      python -m tests.bench.gangs
      python -m tests.bench.gangs --pods 2 --gpus-per-pod 8 --runs 20 --no-controller
      python -m tests.bench.gangs --waiting-s 30 --max-backoff-s 1
    """
    logging.basicConfig(level=logging.ERROR)  # the end of a cluster cuts watches off
    flags = {**GANGS, "kube-scheduler": [*GANGS["kube-scheduler"], *scheduler_flags(name, max_backoff_s)]}
    with control_plane(name, flags) as cluster:
        install(cluster)
        found = measure(cluster, pods, gpus_per_pod, nodes, runs, waiting_s, max_backoff_s, controlled=controlled)
    click.echo(line("fresh gang bound", found.fresh))
    click.echo(line("next gang offered", found.offered))
    click.echo(line("next gang bound", found.bound))
    output.write_text(json.dumps({"machine": machine(), "result": asdict(found)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
