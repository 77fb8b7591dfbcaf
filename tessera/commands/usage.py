"""``tessera usage``: what claims have allocated and what they use of it, with its cost, and ``tessera advise``."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import click
import msgspec

from driver.errors import FatalError, UsageError
from driver.kube.get_and_list import read_all
from driver.kube.types import Metadata
from tessera.cluster_options import client_of, with_driver_name, with_kubeconfig
from tessera.gpu_sources import plans_and_gpus
from tessera.status.snapshot import NAMESPACE
from tessera.tables_and_drawings import columns, counted, printable, show, with_output
from tessera.usage.advice import WHOLE, Advice
from tessera.usage.advice import advise as advice_of
from tessera.usage.output import NOTHING_KNOWN, Style, as_csv, as_json, as_table, number
from tessera.usage.pages import read_cluster, read_urls
from tessera.usage.peak_usage import geometries_of, parts_of, read_history
from tessera.usage.prices import read_prices
from tessera.usage.prometheus import Prometheus, check_labels, read_gpus, read_period
from tessera.usage.report import KeyOf, summarize

AGENT = "tessera-usage"
LABEL_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
KEYS: Mapping[str, tuple[tuple[str, ...], KeyOf]] = {
    "namespace": (("namespace",), lambda device: (device.namespace,)),
    "class": (("class",), lambda device: (device.device_class,)),
    "claim": (("namespace", "claim"), lambda device: (device.namespace, device.claim)),
}
"""Labels of the metrics that make up a key, and the key of a device."""

LABEL_PREFIX = "label="
USAGE_FORMATS = {"table": as_table, "json": as_json, "csv": as_csv}

DURATION = re.compile(r"([1-9][0-9]{0,6})([smhdw])")
DAY = 86400
SECONDS_OF_UNIT = {"s": 1, "m": 60, "h": 3600, "d": DAY, "w": 7 * DAY}
UNIT_NAMES = {"s": "s", "m": "min", "h": "h", "d": "days", "w": "weeks"}
SHORTEST, LONGEST = 60, 5 * 366 * DAY

with_token_file = click.option(
    "--prometheus-token-file", type=click.Path(path_type=Path), help="Bearer token for --prometheus."
)


class Namespace(msgspec.Struct, frozen=True):
    """The fields of a Namespace that are read."""

    metadata: Metadata


class Duration(NamedTuple):
    """Seconds, and how people read them: ``24 h``."""

    seconds: int
    text: str


def duration(_: click.Context, option: click.Parameter, value: str | None) -> Duration | None:
    """Parse the value of an option. Raises UsageError."""
    if value is None:
        return None
    parts = DURATION.fullmatch(value)
    if parts is None or not SHORTEST <= int(parts[1]) * SECONDS_OF_UNIT[parts[2]] <= LONGEST:
        accepted = "a duration from 1m to 5 years, such as 90m, 24h, 30d or 4w"
        raise UsageError(f"--{option.name} {value}: must be {accepted}")
    return Duration(int(parts[1]) * SECONDS_OF_UNIT[parts[2]], f"{parts[1]} {UNIT_NAMES[parts[2]]}")


@click.command()
@click.option(
    "--by",
    default="namespace",
    show_default=True,
    metavar="KEY",
    help="namespace, class, claim, or label=KEY: the value of a label of the claims' namespaces.",
)
@click.option("--prometheus", metavar="URL", help="Read a period from this Prometheus; may have USER:PASSWORD@.")
@with_token_file
@click.option(
    "--since", callback=duration, metavar="DURATION", help="With --prometheus: length of the period.  [default: 24h]"
)
@click.option("--prices", type=click.Path(path_type=Path), help="YAML with a price for each product: adds the cost.")
@click.option(
    "--idle",
    callback=duration,
    default="24h",
    show_default=True,
    metavar="DURATION",
    help="Claims idle so long are counted.",
)
@click.option(
    "--node-metrics",
    metavar="URL",
    multiple=True,
    help="Read this page of a node plugin directly, such as http://10.0.0.7:9400/metrics; repeatable.",
)
@click.option("--namespace", default=NAMESPACE, show_default=True, help="Namespace of the release.")
@with_kubeconfig
@with_driver_name
@with_output(*USAGE_FORMATS)
def usage(
    *,
    by: str,
    prometheus: str | None,
    prometheus_token_file: Path | None,
    since: Duration | None,
    prices: Path | None,
    idle: Duration,
    node_metrics: tuple[str, ...],
    namespace: str,
    kubeconfig: Path | None,
    driver_name: str,
    output: str,
) -> None:
    """Show what claims have allocated of the GPUs, and what they use of it.

    Reads the metrics of all node plugins (`tessera node --usage-interval`) through the API server, or with --prometheus
    the sums of a period. A slice is one of the memory slices of a GPU; used is the larger of SM and memory bandwidth
    activity. What is not known is not counted as 0 (docs/usage.md).

    Exit code 0: complete; 1: a node could not be read, or a warning says what is missing.

    \b
    Examples:
      tessera usage
      tessera usage --by label=team --prices deploy/examples/usage/prices.yaml
      tessera usage --prometheus http://127.0.0.1:9090 --since 30d --by namespace -o csv > usage.csv
    """
    key, label = _key(by)
    if prometheus is None and (since or prometheus_token_file):
        raise UsageError("--since and --prometheus-token-file need --prometheus, such as http://127.0.0.1:9090")
    if prometheus is not None and node_metrics:
        raise UsageError("--prometheus and --node-metrics are two sources: give one of them")
    price_list, period = None if prices is None else read_prices(prices), since or Duration(DAY, "24 h")
    if prometheus is not None:
        reading = read_period(Prometheus(prometheus, prometheus_token_file), period.seconds, key)
    elif node_metrics:
        reading = read_urls(node_metrics)
    else:
        reading = read_cluster(client_of(kubeconfig, AGENT), driver_name, namespace)
    key_of = KEYS[by][1] if label is None else _by_namespace_label(label, kubeconfig)
    report = summarize(reading, key_of, price_list, idle.seconds)
    style = Style(
        key=key if label is None else (label,),
        currency=None if price_list is None else price_list.currency,
        idle_after=idle.text,
        period=None if prometheus is None else period.text,
    )
    click.echo(USAGE_FORMATS[output](report, style), nl=output != "csv")
    _exit_with(reading.warnings)


def _exit_with(warnings: Collection[str]) -> NoReturn:
    """Print the warnings; exit with 1 if there are any."""
    for warning in warnings:
        click.secho(f"warning: {warning}", fg="yellow", err=True)
    sys.exit(1 if warnings else 0)


def _key(by: str) -> tuple[tuple[str, ...], str | None]:
    """The labels of the metrics to sum by, and the label of namespaces that the key is. Raises UsageError."""
    label = by.removeprefix(LABEL_PREFIX)
    if by in KEYS:
        return KEYS[by][0], None
    if label == by or not LABEL_KEY.fullmatch(label):
        accepted = f"{', '.join(KEYS)} or label=KEY with the key of a label, such as label=team"
        raise UsageError(f"--by {by}: must be {accepted}")
    return KEYS["namespace"][0], label


def _by_namespace_label(label: str, kubeconfig: Path | None) -> KeyOf:
    """The label of the Namespace, which tenants usually can't change; None without it, or if the Namespace is gone."""
    client = client_of(kubeconfig, AGENT)
    try:
        namespaces = read_all(client, "/api/v1/namespaces", Namespace)
        values = {item.metadata.name: item.metadata.labels.get(label) for item in namespaces}
    except msgspec.MsgspecError as error:
        raise FatalError(f"the API server's list of namespaces can't be read: {error}") from error
    return lambda device: (values.get(device.namespace),)


@click.command()
@click.option("--prometheus", metavar="URL", required=True, help="Its metrics are judged; may have USER:PASSWORD@.")
@with_token_file
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
@with_output("table", "json")
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
    needs = ", of which partitions could be advised: is the controller running?"
    _, reports = plans_and_gpus(client_of(kubeconfig, AGENT), needs)
    check_labels(server)
    history, gpus = read_history(server, since.seconds), read_gpus(server, since.seconds)
    advices = advice_of(history, gpus, geometries_of(reports), parts_of(reports), margin / 100)
    show(output, [_advice_object(advice) for advice in advices], _advice_table(advices, since))
    _exit_with(server.warnings)


def _advice_table(found: Sequence[Advice], since: Duration) -> str:
    advised = [advice for advice in found if advice.best is not None]
    saved = sum(advice.saved for advice in advised)
    share = f"{counted(len(advised), 'workload')} of {len(found)} would have fitted into a smaller class"
    lines = [f"last {since.text}: {share}, which saves {number(saved)} slice-hours"]
    header = ["NAMESPACE", "WORKLOAD", "CLASS", "MEMORY", "ACTIVITY", "SMALLEST CLASS", "SAVES"]
    rows = []
    for advice in found:
        has, best = advice.workload, advice.best
        class_text = has.device_class if has.profile == WHOLE else f"{has.device_class} ({has.profile})"
        note = " (by memory only)" if advice.activity is None else ""
        cells = [
            NOTHING_KNOWN if advice.memory is None else f"{advice.memory / 2**30:.1f} GiB",
            NOTHING_KNOWN if advice.activity is None else f"{advice.activity * 100:.0f} %",
            printable(advice.refusal or "") if best is None else f"{best.device_class}{note}",
            NOTHING_KNOWN if best is None else number(advice.saved),
        ]
        rows.append([*map(printable, (has.namespace, has.name, class_text)), *cells])
    return "\n".join([*lines, "", columns(header, rows)]) if rows else lines[0]


def _advice_object(advice: Advice) -> dict[str, object]:
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
