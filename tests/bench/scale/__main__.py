"""``python -m tests.bench.scale``, or ``make bench-scale``: what published devices cost the real kube-scheduler.

Node objects of 8 H100, three quarters given out; a burst of pods on the stock scheduler, by who decides what the nodes
publish. A cluster for each number of nodes, and another for the product's own processes; the scheduler is started anew
for each layout.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from tests.bench.results import machine
from tests.bench.scale import plot, report
from tests.bench.scale.layouts import Layout
from tests.bench.scale.measure import Found, Measurement, Plan
from tests.bench.scale.nodes import Division
from tests.bench.scale.scheduler import EXTRA_ARGS
from tests.harness import Progress
from tests.harness.versions import default_release
from tests.support.chart import install
from tests.support.control_plane import control_plane


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--nodes", "fleets", type=click.IntRange(min=1), multiple=True, default=(200, 1000), show_default=True)
@click.option("--layout", "layouts", multiple=True, type=click.Choice([each.name.lower() for each in Layout]))
@click.option(
    "--division",
    type=click.Choice([division.value for division in Division]),
    default=Division.PARTITIONS.value,
    show_default=True,
    help="What claims hold and pods ask for: 1g.10gb, a tenth of a GPU, or a tenth of its memory.",
)
@click.option("--pods", type=click.IntRange(min=1), default=300, show_default=True, help="In one burst.")
@click.option("--burst-s", type=float, default=25.0, show_default=True, help="Seconds that a burst may take.")
@click.option("--parked", type=click.IntRange(min=0), default=200, show_default=True, help="Pods nothing can serve.")
@click.option("--output", type=click.Path(path_type=Path), default="scale-results.json", show_default=True)
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Draw FILE.png and FILE.svg.")
def main(
    *,
    fleets: Sequence[int],
    layouts: Sequence[str],
    division: str,
    pods: int,
    burst_s: float,
    parked: int,
    output: Path,
    picture: Path | None,
) -> None:
    """Compare what layouts cost the scheduler; print a table and write it as JSON."""
    logging.basicConfig(level=logging.ERROR)  # the end of a cluster cuts watches off
    found: list[Found] = []
    of_partitions = () if division == Division.PARTITIONS else (Layout.PEER, Layout.PRODUCT)
    chosen = [each for each in Layout if each not in of_partitions and (not layouts or each.name.lower() in layouts)]
    if not chosen:
        raise click.UsageError("--layout peer and product have --division partitions only: give another layout, too")
    played = [each for each in chosen if each is not Layout.PRODUCT]
    clusters = [each for each in (played, [each for each in chosen if each is Layout.PRODUCT]) if each]
    for nodes in fleets:
        plan = Plan(nodes, pods, burst_s, parked, Division(division))
        for together in clusters:
            with control_plane(f"scale-{nodes}", EXTRA_ARGS) as cluster:
                install(cluster)
                Measurement(cluster, plan, Progress()).run(together, found.append)
    click.echo(report.table(found))
    described = {
        "division": division,
        "machine": machine(),
        "kubernetes": default_release().kubernetes,
        "burstLimitSeconds": burst_s,
    }
    output.write_text(json.dumps({**described, "results": [asdict(each) for each in found]}, indent=1) + "\n")
    if picture:
        plot.draw(found, picture)


if __name__ == "__main__":
    main()
