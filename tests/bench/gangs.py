"""``python -m tests.bench.gangs``: how soon the next gang is bound when another one ends.

Node objects of 8 simulated H100 in one process, the real API server and scheduler with the gate GenericWorkload, and
``tessera controller``. Two gangs (PodGroups) need more GPUs together than there are: one is bound, one is pending. The
bound one is deleted, and so on. Measured is the time from when its last claim is gone until the last pod of the pending
gang is bound.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import click

from driver.kube.client import KubeClient, load_configuration
from driver.kube.types import Claim, Pod
from driver.kube.watch_cache import Change, WatchCache
from tests.bench.placement.fleet import Mode, running_fleet
from tests.bench.placement.measures import percentile
from tests.bench.placement.trace import NODE_GPUS
from tests.bench.results import machine
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess
from tests.support.gangs import GANGS, POD_GROUPS, gang_of, members
from tests.support.workloads import CLAIMS, PODS

SETTLED_S, BOUND_S = 300.0, 120.0
CLIENTS = 8


@dataclass(frozen=True)
class Found:
    """Seconds of each run, and the runs in which not all pods of one gang were bound together."""

    controller: bool
    pods: int
    gpus_per_pod: int
    nodes: int
    seconds: tuple[float, ...]

    @property
    def quantiles(self) -> tuple[float, float, float]:
        ordered = sorted(self.seconds)
        return percentile(ordered, 0.5), percentile(ordered, 0.99), ordered[-1]


class Timeline:
    """When pods were bound and claims were gone, as watches report it."""

    def __init__(self, client: KubeClient, stop: threading.Event) -> None:
        self._changed = threading.Condition()
        self._bound: dict[str, float] = {}
        self._gone: dict[str, float] = {}
        pods = WatchCache(client, PODS, Pod, lambda found: found, self._pods)
        claims = WatchCache(client, CLAIMS, Claim, lambda found: found, self._claims)
        for cache in (pods, claims):
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
    pods: int
    gpus_per_pod: int

    def run(self, runs: int) -> tuple[float, ...]:
        """Seconds from free devices to the next gang bound."""
        seconds = []
        names = [f"gang-{number}" for number in range(runs + 1)]
        self._create(names[0])
        self.timeline.bound_at(members(names[0], self.pods))
        for ends, comes in pairwise(names):
            self._create(comes)
            time.sleep(WAITING_S)  # the gang waits as it would in a queue: the scheduler tries, and backs off
            assert not self.timeline.bound(members(comes, self.pods)), f"{comes} is bound beside {ends}"
            self._delete(ends)
            free = self.timeline.gone_at(members(ends, self.pods))
            seconds.append(self.timeline.bound_at(members(comes, self.pods)) - free)
            click.echo(f"{comes}: {seconds[-1]:.2f} s", err=True)
        return tuple(seconds)

    def _create(self, gang: str) -> None:
        group, claims, pods = gang_of(gang, self.pods, self.gpus_per_pod)
        self.client.create(POD_GROUPS, group)
        self._all(lambda body: self.client.create(CLAIMS, body), claims)
        self._all(lambda body: self.client.create(PODS, body), pods)

    def _delete(self, gang: str) -> None:
        names = members(gang, self.pods)
        self._all(lambda name: self.client.delete(f"{PODS}/{name}"), names)
        self._all(lambda name: self.client.delete(f"{CLAIMS}/{name}"), names)
        self.client.delete(f"{POD_GROUPS}/{gang}")

    def _all(self, call, each) -> None:  # type: ignore[no-untyped-def]
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(call, each))


WAITING_S = 3.0
"""Time for which a gang is pending before the other one ends."""


def measure(cluster: Cluster, pods: int, gpus_per_pod: int, nodes: int, runs: int, *, controlled: bool) -> Found:
    stop = threading.Event()
    client = KubeClient(load_configuration(cluster.kubeconfig), "tessera-bench")
    controller = ControllerProcess(cluster, flags=("--linger-s", "10", "--min-published", "auto"))
    mode = Mode.CURATED if controlled else Mode.BEST_FIRST
    with running_fleet(cluster, nodes, mode) as fleet:
        if controlled:
            controller.start()
            fleet.wait_settled(SETTLED_S)
        seconds = Measurement(client, Timeline(client, stop), pods, gpus_per_pod).run(runs)
        if controlled:
            controller.stop()
        assert not fleet.kubelets.overlaps, fleet.kubelets.overlaps
    stop.set()
    return Found(controlled, pods, gpus_per_pod, nodes, seconds)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--runs", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--pods", type=click.IntRange(min=1), default=16, show_default=True, help="In a gang.")
@click.option("--gpus-per-pod", type=click.IntRange(1, NODE_GPUS), default=1, show_default=True)
@click.option("--nodes", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--controller/--no-controller", "controlled", default=True, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default="gangs-results.json", show_default=True)
@click.option("--name", default="bench-gangs", show_default=True, help="Of the cluster that is made for it.")
def main(*, runs: int, pods: int, gpus_per_pod: int, nodes: int, controlled: bool, output: Path, name: str) -> None:
    """Measure how soon a pending gang is bound after another one has ended; print a line and write it as JSON.

    \b
    Examples:
      python -m tests.bench.gangs
      python -m tests.bench.gangs --pods 2 --gpus-per-pod 8 --runs 20 --no-controller
    """
    logging.basicConfig(level=logging.ERROR)  # the end of a cluster cuts watches off
    with control_plane(name, GANGS) as cluster:
        install(cluster)
        found = measure(cluster, pods, gpus_per_pod, nodes, runs, controlled=controlled)
    p50, p99, most = found.quantiles
    click.echo(f"next gang bound after p50 {p50:.2f} s, p99 {p99:.2f} s, at most {most:.2f} s over {runs} runs")
    output.write_text(json.dumps({"machine": machine(), "result": asdict(found)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
