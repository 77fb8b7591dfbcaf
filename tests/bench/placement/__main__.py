"""``python -m tests.bench.placement --simulate``, or ``--speed``."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import click

from tests.bench.placement import report
from tests.bench.placement.experiment import Result, run
from tests.bench.placement.speed import measure
from tests.bench.placement.trace import MIXES, WITH_TRAINING


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--simulate", is_flag=True, help="The fast simulation, without a cluster.")
@click.option("--speed", is_flag=True, help="How long choosing takes on 100 and on 1,000 nodes.")
@click.option("--arrivals", type=click.IntRange(min=100), default=12_000, show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--processes", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write the results there as JSON, too.")
def main(*, simulate: bool, speed: bool, arrivals: int, seeds: int, processes: int, output: Path | None) -> None:
    """Compare what the cluster admits by what it is offered.

    12 nodes x 8 GPUs of the H100's geometry, load 1.0 of memory slices, Poisson arrivals, exponential durations; a
    claim that finds nothing is turned away. "exchanged" counts offers taken back though possible, "updates" changes
    of one node's offers, both per admission.
    """
    if not (simulate or speed):
        raise click.UsageError("say --simulate, --speed or both")
    if speed:
        for nodes in (100, 1_000):
            click.echo(measure(nodes))
    if simulate:
        _simulate(arrivals, seeds, processes, output)


def _simulate(arrivals: int, seeds: int, processes: int, output: Path | None) -> None:
    started, results = time.monotonic(), list[Result]()
    for result in run(arrivals, seeds, processes):
        results.append(result)
        click.echo(f"{time.monotonic() - started:5.0f} s  {result.mix}, {result.policy}", err=True)
    click.echo(report.overall([result for result in results if result.mix != WITH_TRAINING.name]))
    for mix in (*MIXES, WITH_TRAINING):
        click.echo(f"\n{report.by_request(results, mix.name)}")
    click.echo(f"\n{arrivals} arrivals, the first {arrivals // 4} uncounted, {seeds} seeds")
    if output is not None:
        output.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
