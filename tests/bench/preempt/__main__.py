"""``python -m tests.bench.preempt``, or ``make bench-preempt``: how devices are taken back."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from tests.bench.preempt import binding, decision, mix, optimum
from tests.bench.preempt.report import Results
from tests.harness.progress import Progress

PARTS = ("optimum", "binding", "mix", "decision")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only this one; may be repeated.")
@click.option("--cases", type=click.IntRange(min=1), default=150, show_default=True, help="Of the part binding.")
@click.option("--crowded", type=click.IntRange(min=0), default=16, show_default=True, help="Cases with 200 rivals.")
@click.option("--fleets", type=click.IntRange(min=1), default=1000, show_default=True, help="Of the part optimum.")
@click.option("--arrivals", type=click.IntRange(min=40), default=800, show_default=True, help="Of the part mix.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Of the part mix.")
@click.option("--nodes", type=click.IntRange(min=20), default=1000, show_default=True, help="Of the part decision.")
@click.option("--pairs", type=click.IntRange(min=2), default=40, show_default=True, help="Of its blocks of decisions.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--logs", type=click.Path(path_type=Path), help="Keep the logs of the part binding there.")
@click.option("--output", type=click.Path(path_type=Path), default="preempt-results.json", show_default=True)
def main(
    *,
    parts: Sequence[str],
    cases: int,
    crowded: int,
    fleets: int,
    arrivals: int,
    seeds: int,
    nodes: int,
    pairs: int,
    seed: int,
    logs: Path | None,
    output: Path,
) -> None:
    """Measure preemption; print a table and write it as JSON. Exit code 1 if a target is missed."""
    logging.basicConfig(level=logging.ERROR)  # the end of a cluster cuts watches off
    results = Results(output, seed)
    for part in parts or PARTS:
        if part == "optimum":
            with Progress().part(f"{fleets} random fleets", 60):
                optimum.measure(fleets, seed, results)
        elif part == "binding":
            binding.measure(cases, crowded, seed, results, logs)
        elif part == "mix":
            with Progress().part(f"{seeds} times {arrivals} pods of three priorities", 90):
                mix.measure(arrivals, seeds, results)
        else:
            decision.measure(nodes, pairs, results)
    sys.exit(0 if results.show() else 1)


if __name__ == "__main__":
    main()
