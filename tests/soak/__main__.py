"""``python -m tests.soak``, or ``make soak``."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from statistics import median, quantiles

import click

from tessera.tables_and_drawings import columns
from tests.bench.results import machine
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress, duration
from tests.harness.settings import Settings
from tests.soak.census import Census
from tests.soak.run import Plan, Report, soak
from tests.support.chart import install

HEAD = ["TIME", "CLAIMS", "PARTITIONS", "SPECS", "RECORDS", "RSS MiB", "THREADS", "FDS", "SLICES", "EVENTS", "PID"]
ROWS = 12
"""Of the table over time."""

SERVED = 0.9
"""The part of the rate that must be had, or it was no soak at that rate."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--binaries", type=click.Path(path_type=Path), envvar=["TESSERA_BINARIES", "KUBEBUILDER_ASSETS"])
@click.option("--duration", "seconds", type=float, default=600, show_default=True, help="Seconds of load.")
@click.option("--rate", type=float, default=200, show_default=True, help="Claims a minute.")
@click.option("--kills", type=int, default=4, show_default=True, help="How often the plugin is killed.")
@click.option("--failing", "failing_s", type=float, default=0, help="Seconds for which GPU 0 refuses to be cut.")
@click.option("--seed", type=int, help="Of the claims and kills; another one each time unless given.")
def main(binaries: Path | None, seconds: float, rate: float, kills: int, failing_s: float, seed: int | None) -> None:
    """Random claims come and go; exit code 1 if anything leaks.

    Real: API server, scheduler, controllers, the node plugin process and its sockets. Played: the kubelet, which
    calls Prepare and Unprepare for what the scheduler allocated (two cores don't start 200 containers a minute),
    and the GPUs.
    """
    logging.getLogger().addHandler(logging.NullHandler())  # watches end with their cluster, and say so
    progress = Progress()
    plan = Plan(seconds, rate, kills, int(time.time()) if seed is None else seed, failing_s)
    with Cluster.start(Settings(name="soak", nodes=0, binaries=binaries), progress) as cluster:
        install(cluster)
        report = soak(cluster, plan, progress)
    click.echo(shown(report))
    problems = report.problems
    if report.per_minute < SERVED * rate:
        problems.append(f"{report.per_minute:.0f} claims a minute were served, {rate:g} were to be")
    for problem in problems[:50]:
        click.echo(f"FAILED: {problem}", err=True)
    sys.exit(bool(problems))


def shown(report: Report) -> str:
    """Tables for people: over time, and what was allowed."""
    tally, taken = report.tally, report.taken
    rows = [_row(census) for census in taken[:: -(-len(taken) // ROWS) or 1]]
    over_time = columns(
        ["TIME", "CLAIMS", "PARTITIONS", "SPECS", "RECORDS", "RSS MiB", "THREADS", "FDS", "SLICES", "EVENTS", "PID"],
        rows,
    )
    checks = [[f.name, f"{f.value:g}", f"{f.allowed:g}", "LEAKS" if f.leaks else "ok"] for f in report.findings]
    summary = (
        f"{tally.served} claims served in {duration(report.load_s)} ({report.per_minute:.0f} a minute), "
        f"{tally.unserved} found no room, {tally.gangs_without_room} held back, {report.killed} kills, "
        f"{tally.retried} retries, {tally.moved} moved"
    )
    lines = [over_time, columns(["CHECK", "VALUE", "ALLOWED", ""], checks), summary]
    if len(tally.prepare_ms) > 1:
        p99 = quantiles(tally.prepare_ms, n=100)[-1]
        lines.append(f"prepare, as the kubelet waits: p50 {median(tally.prepare_ms):.1f} ms, p99 {p99:.1f} ms")
    return "\n\n".join([*lines, f"seed {report.plan.seed}; measured on {machine()}"])


def _row(census: Census) -> list[str]:
    things = census.things
    numbers = (census.alive, things.partitions, things.specs, things.records)
    process = (f"{census.rss_mib:.1f}", census.threads, census.fds, census.slices, census.events, census.pid)
    return [duration(census.at_s), *map(str, numbers), *map(str, process)]


if __name__ == "__main__":
    main()
