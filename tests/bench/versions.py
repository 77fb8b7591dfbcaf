"""``python -m tests.bench.versions``, or ``make bench-versions``: how soon pods are bound, version by version.

Node objects of 8 simulated H100 in one process, the real API server and scheduler of each version, and ``tessera
controller``, which chooses the offer mode. Three situations: a pod for which a fitting offer stands; a burst of pods of
mixed profiles on an idle cluster; and a pod on a cluster with one free GPU, which is offered whole until it comes: with
disjoint offers that offer is withdrawn first.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from driver.kube.client import KubeClient, load_configuration
from driver.kube.watch_cache import Change, WatchCache
from driver.model.plan import PATH
from tests.bench.placement.fleet import Mode, RunningFleet, running_fleet
from tests.bench.placement.measures import percentile
from tests.bench.placement.replay import Pod, claim, pod
from tests.bench.placement.trace import FULL_GPU, NODE_GPUS, PROFILES, Request
from tests.bench.results import machine
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.versions import RELEASES, release
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess
from tests.support.workloads import CLAIMS, PODS

SETTLED_S, BOUND_S = 300.0, 60.0

SMALL = next(request for request in PROFILES if str(request) == "1g.10gb")
FITTING = (SMALL, next(request for request in PROFILES if str(request) == "2g.20gb"))


@dataclass(frozen=True)
class Found:
    """``fitting`` and ``free_gpu``: milliseconds until a pod is bound, p50 and p99.

    ``burst_s``: seconds until the last of ``burst`` pods is bound.
    """

    version: str
    settle_s: float
    mode: str
    fitting: tuple[float, float]
    free_gpu: tuple[float, float]
    burst: int
    burst_s: float
    overlaps: int


HEADINGS = ("version", "settle s", "offers", "fitting p50 / p99 ms", "one free GPU p50 / p99 ms", "burst", "overlaps")


class Bound:
    """When pods were bound, as a watch reports it."""

    def __init__(self, client: KubeClient, stop: threading.Event) -> None:
        self._changed = threading.Condition()
        self._at: dict[str, float] = {}
        pods = WatchCache(client, PODS, Pod, lambda found: found, self._seen)
        threading.Thread(target=pods.run, args=(stop,), daemon=True).start()
        wait_for(lambda: pods.synced, BOUND_S, "pods were listed")

    def at(self, names: Sequence[str]) -> float:
        """When the last of these was bound, by the monotonic clock."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._at.keys() >= set(names), BOUND_S), "not all pods were bound"
            return max(self._at[name] for name in names)

    def _seen(self, changes: Iterable[Change[Pod]]) -> None:
        with self._changed:
            for change in changes:
                if change.new is not None and change.new.spec.node_name:
                    self._at.setdefault(change.key.name, time.monotonic())
            self._changed.notify_all()


@dataclass
class Measurement:
    """Measures on one cluster."""

    client: KubeClient
    fleet: RunningFleet
    bound: Bound
    tries: int

    def run(self, pods: int) -> tuple[list[float], list[float], float]:
        """Times in milliseconds with a fitting offer and with one free GPU, and the seconds of a burst."""
        fitting = [self._one(f"fitting-{number}", FITTING[number % 2]) for number in range(self.tries)]
        chosen = random.Random(pods).choices(PROFILES, k=pods)
        burst = [f"burst-{number}" for number in range(pods)]
        began = time.monotonic()
        for name, request in zip(burst, chosen, strict=True):
            self._create(name, request)
        burst_s = self.bound.at(burst) - began
        self._delete([*burst, *(f"fitting-{number}" for number in range(self.tries))])
        full = [f"full-{number}" for number in range(len(self.fleet.nodes) * NODE_GPUS - 1)]
        for name in full:
            self._create(name, FULL_GPU)
        self.bound.at(full)
        return fitting, [self._on_free_gpu(f"free-{number}") for number in range(self.tries)], burst_s

    def _on_free_gpu(self, name: str) -> float:
        wait_for(self._offers_full_gpu, SETTLED_S, "the free GPU is offered whole")
        took = self._one(name, SMALL)
        self._delete([name])
        return took

    def _one(self, name: str, request: Request) -> float:
        self.fleet.wait_settled(SETTLED_S)
        began = time.monotonic()
        self._create(name, request)
        return (self.bound.at([name]) - began) * 1000

    def _offers_full_gpu(self) -> bool:
        plans = self.client.get_object(PATH)["items"]
        offers = [offer for plan in plans for offer in plan["spec"].get("offers", ())]
        return any(offer.endswith("/full") for offer in offers) and all(node.settled for node in self.fleet.nodes)

    def _create(self, name: str, request: Request) -> None:
        self.client.create(CLAIMS, claim(name, request))
        self.client.create(PODS, pod(name))

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.client.delete(f"{PODS}/{name}")
            self.client.delete(f"{CLAIMS}/{name}")


def measure(cluster: Cluster, nodes: int, pods: int, tries: int, settle_s: float) -> Found:
    stop = threading.Event()
    client = KubeClient(load_configuration(cluster.kubeconfig), "tessera-bench")
    # All held devices are published, so that it shows in the slices when a node follows its plan.
    controller = ControllerProcess(cluster, flags=("--settle-s", str(settle_s), "--publish-held", "always"))
    with running_fleet(cluster, nodes, Mode.CURATED) as fleet:
        controller.start()
        fleet.wait_settled(SETTLED_S)
        mode = str(client.get_object(f"{PATH}/{fleet.nodes[0].name}")["spec"]["offerMode"]).lower()
        fitting, free, burst_s = Measurement(client, fleet, Bound(client, stop), tries).run(pods)
        controller.stop()
        overlaps = len(fleet.kubelets.overlaps)
    stop.set()
    return Found(
        cluster.release.kubernetes, settle_s, mode, _quantiles(fitting), _quantiles(free), pods, burst_s, overlaps
    )


def _quantiles(times: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(times)
    return percentile(ordered, 0.5), percentile(ordered, 0.99)


def row(found: Found) -> tuple[str, ...]:
    return (
        found.version,
        f"{found.settle_s:g}",
        found.mode,
        "{:.0f} / {:.0f}".format(*found.fitting),
        "{:.0f} / {:.0f}".format(*found.free_gpu),
        f"{found.burst} in {found.burst_s:.1f} s",
        str(found.overlaps),
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", "versions", multiple=True, default=[each.kubernetes for each in RELEASES], show_default=True)
@click.option("--settle-s", "settles", type=float, multiple=True, default=[0.0, 1.0], show_default=True)
@click.option("--nodes", type=click.IntRange(min=1), default=12, show_default=True)
@click.option("--pods", type=click.IntRange(min=1), default=50, show_default=True, help="In the burst.")
@click.option("--tries", type=click.IntRange(min=1), default=40, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default="versions-results.json", show_default=True)
def main(*, versions: Sequence[str], settles: Sequence[float], nodes: int, pods: int, tries: int, output: Path) -> None:
    """Measure how soon pods are bound on several versions of Kubernetes; print a table and write it as JSON.

    \b
    Examples:
      python -m tests.bench.versions
      python -m tests.bench.versions --version 1.35.4 --version 1.37.1 --settle-s 0
    """
    logging.basicConfig(level=logging.ERROR)  # the end of a cluster cuts watches off
    found: list[Found] = []
    progress = Progress()
    for version in versions:
        for settle_s in settles:
            part = progress.part(f"Kubernetes {version}, settle time {settle_s:g} s", 180)
            with part, control_plane("bench-versions", release=release(version)) as cluster:
                install(cluster)
                found.append(measure(cluster, nodes, pods, tries, settle_s))
    rows = [HEADINGS, *map(row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for each in rows:
        click.echo("  ".join(text.ljust(width) for text, width in zip(each, widths, strict=True)).rstrip())
    click.echo(machine())
    output.write_text(json.dumps({"machine": machine(), "results": [asdict(each) for each in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
