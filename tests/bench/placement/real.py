"""``python -m tests.bench.placement.real``, or ``make bench-placement``: the trace on the real kube-scheduler.

12 Node objects of 8 simulated GPUs, whose slices come from the node plugin's own parts; a fresh control plane for
each mode, the same arrivals.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import click

from driver.kube.client import KubeClient, load_configuration
from driver.kube.watch_cache import WatchCache
from driver.model.plan import PATH
from tests.bench.placement import experiment, plot, report
from tests.bench.placement.fleet import Mode, RunningFleet, running_fleet
from tests.bench.placement.measures import Writes, Written, count_refusals, mean, percentile, thinned
from tests.bench.placement.replay import PATIENCE_S, Fate, Replay
from tests.bench.placement.trace import MIXES, NODE_GPUS, WITH_TRAINING, Arrival, Scenario
from tests.bench.results import machine
from tests.bench.usage import cpu_s
from tests.harness.cluster import Cluster
from tests.harness.processes import ProcessTable
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess
from tests.support.plugin import SLICES

SETTLED_S = 180.0
FENCE_MINUTES, LINGER_S = "1", "10"
"""Time runs faster here: claims stay for about a minute and not for hours."""


@dataclass(frozen=True)
class RealResult:
    """One mode. Times in ms, CPU in s; ``held`` is the mean part of the memory slices that were allocated.

    ``simulated`` is the acceptance of the same trace in the fast simulation, if that knows the mode. ``fitted`` are
    the counted rejections for which there was room somewhere, offered or not, when the pod gave up.
    """

    mode: str
    mix: str
    arrivals: int
    counted: int
    acceptance: float
    by_request: Mapping[str, float]
    held: float
    p50_ms: float
    p99_ms: float
    cpu_s: Mapping[str, float]
    allocations: int
    slice_updates: float
    plan_writes: float
    plan_statuses: float
    fence_refusals: int
    overlaps: Sequence[str]
    fitted: int
    simulated: float | None
    reasons: Mapping[str, int]
    slices_over_time: Sequence[tuple[float, float]]


@dataclass
class Before:
    """The counters when the replay began."""

    writes: Mapping[str, tuple[int, int]]
    cpu_s: Mapping[str, float]


@dataclass
class Bench:
    """One mode on one cluster. ``fates`` are known after the run."""

    cluster: Cluster
    mode: Mode
    scenario: Scenario
    rate: float
    patience_s: float
    slices: Writes = field(default_factory=Writes)
    plans: Writes = field(default_factory=Writes)
    fates: Sequence[Fate] = ()

    def run(self) -> RealResult:
        with running_fleet(self.cluster, self.scenario.nodes, self.mode) as fleet, self._controller(fleet):
            client = KubeClient(load_configuration(self.cluster.kubeconfig), "tessera-bench")
            with self._counting(client):
                before = Before(self._writes(), self._cpu())
                replay = Replay(
                    client, self.trace, self.unit_s, fleet.admits, fleet.kubelets.wait_released, self.patience_s
                )
                replay.run()
                self.fates = replay.fates
                return self._result(replay, fleet, before)

    @cached_property
    def trace(self) -> list[Arrival]:
        return self.scenario.trace()

    @property
    def unit_s(self) -> float:
        """Seconds of the trace's unit of time, so that ``rate`` claims arrive in a second."""
        return len(self.trace) / self.rate / self.trace[-1].at

    @contextmanager
    def _controller(self, fleet: RunningFleet) -> Iterator[None]:
        if self.mode is not Mode.CURATED:
            yield
            return
        controller = ControllerProcess(self.cluster, flags=("--fence-minutes", FENCE_MINUTES, "--linger-s", LINGER_S))
        controller.start()
        try:
            fleet.wait_settled(SETTLED_S)
            yield
        finally:
            controller.stop()

    @contextmanager
    def _counting(self, client: KubeClient) -> Iterator[None]:
        stop = threading.Event()
        watched = [(SLICES, self.slices)] + ([(PATH, self.plans)] if self.mode is Mode.CURATED else [])
        for path, writes in watched:
            cache = WatchCache(client, path, Written, lambda found: found.metadata, writes.count)
            threading.Thread(target=cache.run, args=(stop,), daemon=True).start()
            while not cache.synced:
                time.sleep(0.01)
        yield
        stop.set()

    def _writes(self) -> dict[str, tuple[int, int]]:
        return {name: (found.all, found.specs) for name, found in (("slices", self.slices), ("plans", self.plans))}

    def _cpu(self) -> dict[str, float]:
        records = ProcessTable(self.cluster.directory).all()
        return {record.name: cpu_s(record.pid) for record in records if record.alive}

    def _result(self, replay: Replay, fleet: RunningFleet, before: Before) -> RealResult:
        scenario, kubelets = self.scenario, fleet.kubelets
        counted = replay.fates[scenario.warm_up :]
        turned_away = [fate for fate in counted if not fate.admitted]
        after, cpu = self._writes(), self._cpu()
        arrived = Counter(fate.arrival.request for fate in counted)
        admitted = Counter(fate.arrival.request for fate in counted if fate.admitted)
        allocations = max(kubelets.allocations, 1)
        waits = sorted(_waited_ms(fate) for fate in counted if fate.admitted)
        over_time = [(at - replay.began, used / scenario.slices) for at, used in kubelets.slices_over_time]
        specs = after["plans"][1] - before.writes["plans"][1]
        return RealResult(
            mode=self.mode.value,
            mix=scenario.mix.name,
            arrivals=scenario.arrivals,
            counted=len(counted),
            acceptance=admitted.total() / max(arrived.total(), 1),
            by_request={str(each): admitted[each] / max(arrived[each], 1) for each in scenario.mix.weights},
            held=mean(over_time, counted[0].arrival.at * self.unit_s, counted[-1].arrival.at * self.unit_s),
            p50_ms=percentile(waits, 0.50),
            p99_ms=percentile(waits, 0.99),
            cpu_s={name: round(cpu[name] - before.cpu_s.get(name, 0.0), 1) for name in cpu},
            allocations=kubelets.allocations,
            slice_updates=(after["slices"][0] - before.writes["slices"][0]) / allocations,
            plan_writes=specs / allocations,
            plan_statuses=(after["plans"][0] - before.writes["plans"][0] - specs) / allocations,
            fence_refusals=count_refusals(self.cluster.logs_dir / "kube-scheduler.log"),
            overlaps=tuple(kubelets.overlaps),
            fitted=sum(fate.fitted for fate in turned_away),
            simulated=experiment.simulated_acceptance(self.mode.value, scenario),
            reasons=dict(Counter(fate.reason for fate in turned_away)),
            slices_over_time=thinned(over_time),
        )


def _waited_ms(fate: Fate) -> float:
    assert fate.asked_at is not None
    assert fate.bound_at is not None
    return (fate.bound_at - fate.asked_at) * 1000


def scenario_of(mix: str, arrivals: int, nodes: int) -> Scenario:
    """The first third fills the cluster and doesn't count; the profiles are the six of the reference."""
    [chosen] = [each for each in (*MIXES, WITH_TRAINING) if each.name == mix]
    warm_up = arrivals // 3
    return Scenario(chosen, experiment.plain_gpu(), nodes, arrivals=arrivals, warm_up=warm_up)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--mix", type=click.Choice([mix.name for mix in (*MIXES, WITH_TRAINING)]), default="uniform")
@click.option("--arrivals", type=click.IntRange(min=30), default=3000, show_default=True)
@click.option("--rate", type=float, default=10.0, show_default=True, help="Arrivals a second.")
@click.option("--patience", type=float, default=PATIENCE_S, show_default=True, help="Seconds until a pod gives up.")
@click.option("--nodes", type=click.IntRange(min=1), default=12, show_default=True)
@click.option("--mode", "modes", multiple=True, type=click.Choice([mode.name.lower() for mode in Mode]))
@click.option("--output", type=click.Path(path_type=Path), default="placement-results.json", show_default=True)
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Draw FILE.png and FILE.svg.")
@click.option("--logs", type=click.Path(path_type=Path), help="Keep the clusters' logs there.")
def main(
    *,
    mix: str,
    arrivals: int,
    rate: float,
    patience: float,
    nodes: int,
    modes: Sequence[str],
    output: Path,
    picture: Path | None,
    logs: Path | None,
) -> None:
    """Compare what the real scheduler admits by what it is offered; print a table and write it as JSON."""
    logging.basicConfig(level=logging.ERROR)  # the end of a cluster cuts watches off
    scenario = scenario_of(mix, arrivals, nodes)
    results = []
    for mode in Mode:
        if modes and mode.name.lower() not in modes:
            continue
        with control_plane(f"bench-{mode.name.lower().replace('_', '-')}"[:20].strip("-")) as cluster:
            install(cluster)
            results.append(Bench(cluster, mode, scenario, rate, patience).run())
            if logs:
                _keep_logs(cluster, logs / mode.name.lower())
        where = f"{machine()}, load {os.getloadavg()[0]:.1f} after {mode.value}"
        click.echo(f"{where}: acceptance {results[-1].acceptance:.3f}", err=True)
    click.echo(report.real(results))
    found = {"machine": machine(), "nodes": nodes, "gpus": nodes * NODE_GPUS, "rate": rate, "patience_s": patience}
    output.write_text(json.dumps({**found, "results": [asdict(result) for result in results]}, indent=1) + "\n")
    if picture:
        plot.draw(results, picture)


def _keep_logs(cluster: Cluster, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for log in cluster.logs_dir.glob("*.log"):
        (folder / log.name).write_bytes(log.read_bytes())


if __name__ == "__main__":
    main()
