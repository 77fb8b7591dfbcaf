"""``tessera sim fleet``: many simulated GPU nodes in one process."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from driver.config.settings import DEFAULT_DRIVER, check_driver_name
from driver.errors import UsageError
from tessera.asking import client_of, with_kubeconfig
from tessera.logs import FORMATS, configure_logs

if TYPE_CHECKING:
    from tessera.fleet.fleet import Fleet, State

MOST_NODES = 10_000
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?")
"""Of a fleet: begins the names of its nodes, and is the value of a label."""

FOLLOW, ALONE = "follow", "alone"

TOLD_S = 10.0
"""Between two lines of state."""


@click.command("fleet")
@click.option("--nodes", type=click.IntRange(1, MOST_NODES), default=100, show_default=True, help="How many.")
@click.option(
    "--gpus", default="dgx-h100", show_default=True, help="NAME (`tessera sim list`) or FILE: each node's GPUs."
)
@click.option("--name", default="sim", show_default=True, help="Nodes are called NAME-0000, NAME-0001, ...")
@with_kubeconfig
@click.option("--driver-name", default=DEFAULT_DRIVER, show_default=True, help="DRA driver name.")
@click.option("--namespace", default="tessera", show_default=True, help="Where the controller's heartbeat is.")
@click.option(
    "--mode",
    type=click.Choice([FOLLOW, ALONE]),
    default=FOLLOW,
    show_default=True,
    help="follow: offer what the controller says (whatever fits when it is silent for long); alone: whatever fits.",
)
@click.option("--leases/--no-leases", default=True, show_default=True, help="Renew the nodes' Leases, as kubelets do.")
@click.option("--log-format", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning"]), default="warning", show_default=True)
def fleet(
    *,
    nodes: int,
    gpus: str,
    name: str,
    kubeconfig: Path | None,
    driver_name: str,
    namespace: str,
    mode: str,
    leases: bool,
    log_format: str,
    log_level: str,
) -> None:
    """Run many simulated GPU nodes in one process.

    Makes the Node objects, publishes their GPUs, does what the controller plans, and plays the kubelets: pods that are
    scheduled to these nodes count as running, without containers. Every device says simulated. Needs a cluster's admin;
    other pods may be scheduled to these nodes, too, so take a cluster that is there for it. Ctrl-C removes the nodes
    with their slices and plans; so does the next start under the same --name.

    \b
    Examples:
      tessera sim fleet --nodes 100 --kubeconfig ~/.kube/config
      tessera sim fleet --nodes 1000 --gpus dgx-h100 --name big --no-leases
      tessera sim fleet --nodes 20 --gpus dgx-a100 --mode alone
    """
    from driver.hardware.simulator import load_description
    from tessera.fleet.fleet import FleetSettings, running_fleet

    configure_logs(log_format, log_level)
    if not NAME.fullmatch(name):
        raise UsageError(f"--name {name}: lower-case letters, digits and inner dashes, at most 50, such as sim")
    try:
        check_driver_name(driver_name)
    except ValueError as error:
        raise UsageError(f"--driver-name {driver_name}: {error}") from error
    settings = FleetSettings(
        name, nodes, load_description(gpus.removeprefix("sim:")), driver_name, namespace, mode == FOLLOW, leases
    )
    client = client_of(kubeconfig, "tessera-fleet")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with running_fleet(client, settings, Steps().show) as running:
            _tell(running, stop)
    except KeyboardInterrupt:
        click.echo("all of it is removed")


def _tell(fleet: Fleet, stop: threading.Event) -> None:
    """A line whenever something has changed, until the process is interrupted."""
    said: State | None = None
    while not stop.wait(TOLD_S if said else 0.0):
        state = fleet.state
        if state != said:
            click.echo(
                f"{time.strftime('%H:%M:%S')}  {state.nodes} nodes, {state.planned} follow the controller; "
                f"{state.pods} pods run, {state.claims} claims are prepared"
                + (f", {state.conflicts} were refused for what another holds" if state.conflicts else "")
            )
            said = state


class Steps:
    """Progress on a terminal, in one line a step; elsewhere only the end of each step."""

    def __init__(self) -> None:
        self._shown_at = 0.0

    def show(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total:
            click.echo(f"\r{what}: {done}" if sys.stdout.isatty() else f"{what}: {done}")
        elif sys.stdout.isatty() and now - self._shown_at > 0.1:
            self._shown_at = now
            click.echo(f"\r{what}: {done} of {total}", nl=False)
