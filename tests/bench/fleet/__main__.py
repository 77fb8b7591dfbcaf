"""``python -m tests.bench.fleet``, or ``make bench-fleet``: the controller at 1,000 and at 5,000 nodes."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tests.bench.fleet import live
from tests.bench.fleet.component import resync
from tests.bench.fleet.plot import draw
from tests.bench.fleet.reasons import explained
from tests.bench.results import machine
from tests.harness.progress import Progress
from tests.support.chart import install
from tests.support.control_plane import control_plane


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--nodes", type=click.IntRange(min=20), default=1000, show_default=True, help="Of the live fleet.")
@click.option("--component", is_flag=True, help="Only the full resync from recorded lists.")
@click.option("--reasons", is_flag=True, help="Only the reasons of 60 pending claims on the live fleet.")
@click.option("--recorded", type=click.IntRange(min=20), default=5000, show_default=True, help="Nodes of the lists.")
@click.option("--storm/--no-storm", default=True, show_default=True, help="A controller that is lost for minutes, too.")
@click.option("--output", type=click.Path(path_type=Path), default="fleet-results.json", show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), help="Writes a second over time, as PNG and SVG.")
def main(
    *, nodes: int, component: bool, reasons: bool, recorded: int, storm: bool, output: Path, plot: Path | None
) -> None:
    """Measure the controller at scale; print figures and write them as JSON."""
    logging.basicConfig(level=logging.ERROR)  # the end of a cluster cuts watches off
    progress = Progress()
    found: dict[str, Any] = {"machine": machine(), "load": os.getloadavg()[0]}
    if not reasons:
        with progress.part(f"full resync of {recorded} recorded nodes", 30):
            found["resync"] = asdict(resync(recorded))
        _show("resync", found["resync"])
    if not component:
        with control_plane("bench-fleet") as cluster:
            install(cluster)
            with live.running(cluster, nodes, progress) as running:
                if not reasons:
                    found["refreshed"] = asdict(live.refreshed(running))
                    _show("refreshed", found["refreshed"])
                    found["steady"] = asdict(live.steady(running))
                    _show("steady", found["steady"])
                    told = live.storm(running, lost=storm)
                    found["storm"] = asdict(told)
                    _show("most writes a second", told.most_per_s)
                    if plot is not None:
                        draw(told, nodes, plot)
                found["reasons"] = asdict(explained(running))
                _show("reasons", found["reasons"])
    output.write_text(json.dumps(found, indent=1) + "\n")


def _show(what: str, figures: dict[str, Any]) -> None:
    told = (f"{name} {each:.3g}" if isinstance(each, float) else f"{name} {each}" for name, each in figures.items())
    click.echo(f"{what}: {', '.join(told)}")


if __name__ == "__main__":
    main()
