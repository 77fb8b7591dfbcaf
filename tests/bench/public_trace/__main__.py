"""``make bench-trace``: the public trace in the fast simulation and on the real scheduler."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click

from tests.bench.public_trace import plot, report
from tests.bench.public_trace.real import MODES, filled
from tests.bench.public_trace.replays import BOUND, REPLAYS, Churning, Decided, churning, filling, replay
from tests.bench.public_trace.tasks import GivenArrivals, Rule, churn, inflation
from tests.harness.progress import Part, Progress

LOADS = (1.0, 1.2)
Steps = dict[str, list[list[Decided]]]
"""What became of the tasks, by who decides, a list for each seed."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--nodes", type=click.IntRange(min=1), default=32, show_default=True, help="Nodes of 8 H100.")
@click.option("--seeds", type=click.IntRange(min=1), default=5, show_default=True, help="Orders of the tasks.")
@click.option("--rule", type=click.Choice([rule.value for rule in Rule]), default=Rule.COMPUTE.value, show_default=True)
@click.option("--real/--no-real", default=True, show_default=True, help="Also fill a fleet on the real scheduler.")
@click.option("--processes", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write the results there as JSON, too.")
@click.option("--plot", "pictures", type=click.Path(path_type=Path), help="Draw PATH-inflation and PATH-churn.")
def main(
    *, nodes: int, seeds: int, rule: str, real: bool, processes: int, output: Path | None, pictures: Path | None
) -> None:
    """Replay tasks of a public trace by the product's own rules, beside a bound that no placement can exceed.

    \b
    Inflation: tasks come in a random order until they ask for 130 % of the fleet; none ends.
    Churn: tasks come at random moments and end; they ask for 1.0 or 1.2 times the fleet on average.

    \b
    Examples:
      python -m tests.bench.public_trace --no-real
      python -m tests.bench.public_trace --nodes 128 --seeds 1 --no-real
    """
    progress, chosen, numbers = Progress(), Rule(rule), range(1, seeds + 1)
    fleets = [inflation(chosen, nodes, seed) for seed in numbers]
    where = f"{nodes} nodes, {seeds} seeds, rule {rule}"
    results: dict[str, object] = {}
    with ProcessPoolExecutor(processes) as pool:
        with progress.part("inflation in the simulation", 10.0 * seeds) as part:
            steps = _replays(pool, fleets, part)
        fillings = {name: list(map(filling, by_seed)) for name, by_seed in steps.items()}
        results["inflation"] = fillings
        click.echo(f"Inflation, {where}\n{report.fillings(fillings)}\n")
        if pictures:
            plot.draw_filling(fleets[0], _first(steps), pictures.with_name(f"{pictures.name}-inflation"))
        for load in LOADS:
            churned = [churn(chosen, nodes, seed, load) for seed in numbers]
            with progress.part(f"churn in the simulation, load {load:g}", 150.0 * seeds) as part:
                steps = _replays(pool, churned, part)
            means = {
                name: [churning(tasks, churned[0].warm_up) for tasks in by_seed] for name, by_seed in steps.items()
            }
            results[f"churn {load:g}"] = {name: list(map(_plain, by_seed)) for name, by_seed in means.items()}
            click.echo(f"Churn at load {load:g}, {where}\n{report.churnings(means)}\n")
            if pictures and load == LOADS[0]:
                plot.draw_churn(churned[0], _first(steps), means, pictures.with_name(f"{pictures.name}-churn"))
    if real:
        scheduled = {mode.value: [filled(fleet, mode, progress) for fleet in fleets] for mode in MODES}
        results["inflation on the real scheduler"] = scheduled
        table = report.fillings({**scheduled, BOUND: fillings[BOUND]})
        click.echo(f"Inflation on the real scheduler, {where}\n{table}")
    if output:
        output.write_text(json.dumps(results, indent=1) + "\n")


def _replays(pool: ProcessPoolExecutor, fleets: Sequence[GivenArrivals], part: Part) -> Steps:
    """Every way to decide on every fleet."""
    futures = {name: [pool.submit(replay, name, fleet) for fleet in fleets] for name in REPLAYS}
    steps: Steps = {}
    for name, pending in futures.items():
        steps[name] = [future.result() for future in pending]
        part.tick(name)
    return steps


def _first(steps: Steps) -> dict[str, list[Decided]]:
    """What became of the tasks with the first seed."""
    return {name: by_seed[0] for name, by_seed in steps.items()}


def _plain(means: Churning) -> Mapping[str, object]:
    """For JSON."""
    return {**means._asdict(), "by_request": {str(size): part for size, part in means.by_request.items()}}


if __name__ == "__main__":
    main()
