"""``tessera advise``: the smallest class that each workload would have fitted into, and what that saves."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from driver.errors import EnvironmentFault, FatalError, UsageError
from driver.model.plan import KIND, states_of
from tessera.cluster_options import client_of, find_plans, with_kubeconfig
from tessera.tables_and_drawings import columns, counted, printable, with_output
from tessera.usage.advice import WHOLE, Advice, Geometry
from tessera.usage.advice import advise as advice_of
from tessera.usage.duration import DAY, Duration, duration
from tessera.usage.history import geometries_of, read_history, read_products
from tessera.usage.output import NONE, number
from tessera.usage.prometheus import Prometheus, check_labels


@click.command()
@click.option("--prometheus", metavar="URL", required=True, help="Its metrics are judged; may have USER:PASSWORD@.")
@click.option("--prometheus-token-file", type=click.Path(path_type=Path), help="Bearer token for --prometheus.")
@click.option(
    "--since", callback=duration, default="7d", show_default=True, metavar="DURATION", help="Length of the period."
)
@click.option(
    "--margin",
    type=click.IntRange(0, 400),
    default=20,
    show_default=True,
    help="Room above the most memory used, in %.",
)
@with_kubeconfig
@with_output
def advise(
    *,
    prometheus: str,
    prometheus_token_file: Path | None,
    since: Duration,
    margin: int,
    kubeconfig: Path | None,
    output: str,
) -> None:
    """Name the smallest class that each workload would have fitted into.

    By the most memory, SM activity and memory bandwidth that its pods used in the period. Nothing is said of a workload
    with less than a day of data, or without measurements in more than 10 % of its time (docs/usage.md).

    \b
    Examples:
      tessera advise --prometheus http://127.0.0.1:9090
      tessera advise --prometheus http://127.0.0.1:9090 --since 30d --margin 10 -o json
    """
    if since.seconds < DAY:
        raise UsageError(f"--since {since.text}: must be at least 24h, such as 7d")
    server = Prometheus(prometheus, prometheus_token_file)
    geometries = _geometries(kubeconfig)
    check_labels(server)
    history, products = read_history(server, since.seconds), read_products(server, since.seconds)
    found = advice_of(history, products, geometries, margin / 100)
    click.echo(
        json.dumps([_as_json(each) for each in found], indent=2) if output == "json" else _as_table(found, since)
    )
    for warning in server.warnings:
        click.secho(f"warning: {warning}", fg="yellow", err=True)
    sys.exit(1 if server.warnings else 0)


def _geometries(kubeconfig: Path | None) -> dict[str, Geometry]:
    """The partitions of the cluster's products. Raises EnvironmentFault, FatalError and StateError."""
    try:
        plans = find_plans(client_of(kubeconfig, "tessera-advise"))
    except msgspec.MsgspecError as error:
        raise FatalError(f"a {KIND} can't be read: {error}") from error
    reports = [report for plan in plans or () for report in states_of(plan.status.inventory)]
    if not reports:
        raise EnvironmentFault(
            f"no {KIND} lists a GPU, of which partitions could be advised: is the controller running?"
        )
    return geometries_of(reports)


def _as_table(found: Sequence[Advice], since: Duration) -> str:
    advised = [each for each in found if each.best is not None]
    saved = sum(each.saved for each in advised)
    share = f"{counted(len(advised), 'workload')} of {len(found)} would have fitted into a smaller class"
    lines = [f"last {since.text}: {share}, which saves {number(saved)} slice-hours"]
    header = ["NAMESPACE", "WORKLOAD", "CLASS", "MEMORY", "ACTIVITY", "SMALLEST CLASS", "SAVES"]
    rows = [
        [
            *map(printable, (each.workload.namespace, each.workload.name, _has(each))),
            NONE if each.memory is None else f"{each.memory / 2**30:.1f} GiB",
            NONE if each.activity is None else f"{each.activity * 100:.0f} %",
            printable(each.refusal or "") if each.best is None else each.best.device_class + _note(each),
            NONE if each.best is None else number(each.saved),
        ]
        for each in found
    ]
    return "\n".join([*lines, "", columns(header, rows)]) if rows else lines[0]


def _has(advice: Advice) -> str:
    has = advice.workload
    return has.device_class if has.profile == WHOLE else f"{has.device_class} ({has.profile})"


def _note(advice: Advice) -> str:
    return " (by memory only)" if advice.activity is None else ""


def _as_json(advice: Advice) -> dict[str, object]:
    return {
        "namespace": advice.workload.namespace,
        "workload": advice.workload.name,
        "class": advice.workload.device_class,
        "profile": advice.workload.profile,
        "product": advice.workload.product,
        "highestMemoryBytes": advice.memory,
        "highestActivity": advice.activity,
        "sliceHours": round(advice.slice_hours, 6),
        "smallestClass": None if advice.best is None else advice.best.device_class,
        "savedSliceHours": None if advice.best is None else round(advice.saved, 6),
        "reason": advice.refusal,
    }
