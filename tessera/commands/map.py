"""``tessera map``: the GPUs of the cluster, who holds which part of them, and what is free."""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from controller.report.cluster_view import ClusterView, read_cluster, watch_cluster
from controller.report.map_model import cluster_map
from controller.report.map_summary import MapFilter, summarize
from driver.errors import UsageError
from driver.kube.client import KubeClient
from tessera.cluster_options import client_of, with_driver_name, with_kubeconfig
from tessera.map_drawing import draw_map, draw_summary
from tessera.map_svg import map_as_svg
from tessera.tables_and_drawings import with_output

MOST_NODES = 32
"""Nodes of which all GPUs are drawn without a filter."""

HINT = "\n\n--all draws all GPUs; --unhealthy, --free, --node some."


@click.command("map")
@click.option("--node", "nodes", multiple=True, metavar="NAME", help="Only this node; repeatable.")
@click.option("--product", metavar="TEXT", help="Only GPUs with TEXT in their product names, such as H100.")
@click.option("--namespace", help="Only GPUs that claims of this namespace hold.")
@click.option("--class", "device_class", metavar="NAME", help="Only GPUs of which claims of this class hold a part.")
@click.option("--free", is_flag=True, help="Only GPUs with free slices.")
@click.option("--unhealthy", is_flag=True, help="Only GPUs that are cordoned or faulty, or whose node is not ready.")
@click.option("--all", "draw_all", is_flag=True, help=f"Draw all GPUs of more than {MOST_NODES} nodes, too.")
@click.option("--summary", is_flag=True, help="Only the summary by product.")
@click.option("--watch", is_flag=True, help="Draw again after every change, until Ctrl-C.")
@with_kubeconfig
@with_driver_name
@with_output("table", "json", "svg")
def map(  # noqa: A001 - the name of the command
    *,
    draw_all: bool,
    summary: bool,
    watch: bool,
    kubeconfig: Path | None,
    driver_name: str,
    output: str,
    **filters: Any,
) -> None:
    """Show all GPUs with their memory slices: what claims hold, what is offered, free, or stranded.

    Works without a running controller. With more than 32 nodes and no filter it shows only a summary by product;
    a free GPU can be allocated whole, and on a free node all are free. Filters combine (docs/map.md).

    \b
    Examples:
      tessera map
      tessera map --product H100 --free
      tessera map --namespace team-a --watch
      tessera map --unhealthy -o json
      tessera map --all -o svg > map.svg
    """
    if summary and draw_all:
        raise UsageError("--summary and --all exclude each other")
    if output == "svg" and (summary or watch):
        raise UsageError("-o svg draws GPUs, once: not with --summary or --watch")
    chosen = MapFilter(**filters)

    def render(view: ClusterView) -> str:
        width = shutil.get_terminal_size((0, 0)).columns or None  # None: no terminal, and $COLUMNS is not set
        nodes = chosen.apply(cluster_map(view))
        if output == "svg":
            return map_as_svg(nodes)
        if output == "json":
            encoded = msgspec.json.encode(summarize(nodes) if summary else nodes)
            return (encoded if watch else msgspec.json.format(encoded, indent=2)).decode()
        if not summary and (len(nodes) <= MOST_NODES or draw_all or chosen):
            return f"{draw_map(nodes, width)}\n\n{draw_summary(nodes, width)}"
        return draw_summary(nodes, width) + (HINT if len(nodes) > MOST_NODES else "")

    client = client_of(kubeconfig, "tessera-command")
    if watch:
        _watch(render, client, driver_name)
        return
    gc.disable()  # a million objects of a large cluster would be traversed several times
    try:
        click.echo(render(read_cluster(client, driver_name)), nl=output != "svg")
    finally:
        gc.enable()


def _watch(render: Callable[[ClusterView], str], client: KubeClient, driver: str) -> None:
    """Draw the cluster whenever the drawing differs from the last one, until Ctrl-C."""
    logging.getLogger().addHandler(logging.NullHandler())  # what fails for long is reported beside the drawing
    last = None
    try:
        for view in watch_cluster(client, driver):
            text = render(view)
            if (text, view.stale is None) == last:
                continue
            last = (text, view.stale is None)
            click.clear()
            click.echo(text)
            if view.stale is not None:
                click.secho(f"warning: this is the last known state: {view.stale}", fg="yellow", err=True)
    except KeyboardInterrupt:
        return
