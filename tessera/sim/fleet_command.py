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

from driver.config.flags import DEFAULT_DRIVER, check_driver_name
from driver.errors import UsageError
from driver.logs import FORMATS, configure_logs
from tessera.cluster_options import client_of, with_kubeconfig

if TYPE_CHECKING:
    from tessera.sim.fleet.fleet import FleetState, SimulatedFleet

MOST_NODES = 10_000
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?")
"""Valid names of a fleet: the prefix of its nodes' names, and the value of a label."""

FOLLOW, STANDALONE = "follow", "alone"

STATE_INTERVAL_SECONDS = 10.0


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
    type=click.Choice([FOLLOW, STANDALONE]),
    default=FOLLOW,
    show_default=True,
    help="follow: offer what the plans list (whatever fits while the heartbeat is missing); alone: whatever fits.",
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

    Creates the Node objects, publishes their GPUs, follows the controller's plans, and simulates the kubelets: pods
    that are scheduled to these nodes get the phase Running, without containers. Every device has the attribute
    simulated. Needs a cluster admin. Use a cluster of its own: other pods may be scheduled to these nodes, too. Ctrl-C
    removes the nodes with their slices and plans; so does the next start with the same --name.

    \b
    Examples:
      tessera sim fleet --nodes 100 --kubeconfig ~/.kube/config
      tessera sim fleet --nodes 1000 --gpus dgx-h100 --name big --no-leases
      tessera sim fleet --nodes 20 --gpus dgx-a100 --mode alone
    """
    from driver.simulator import load_description
    from tessera.sim.fleet.fleet import FleetSettings, running_fleet

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
        with running_fleet(client, settings, ProgressLines().show) as running:
            _print_state(running, stop)
    except KeyboardInterrupt:
        click.echo("all objects of the fleet are removed")


def _print_state(fleet: SimulatedFleet, stop: threading.Event) -> None:
    """Print a line after each change, until the process is interrupted."""
    printed: FleetState | None = None
    while not stop.wait(STATE_INTERVAL_SECONDS if printed else 0.0):
        state = fleet.state
        if state != printed:
            click.echo(
                f"{time.strftime('%H:%M:%S')}  {state.nodes} nodes, {state.planned} follow the controller; "
                f"{state.pods} pods run, {state.claims} claims are prepared"
                + (f", {state.conflicts} were refused: their devices are held" if state.conflicts else "")
            )
            printed = state


class ProgressLines:
    """Progress of each step, updated in one line of a terminal; elsewhere only the end of each step."""

    def __init__(self) -> None:
        self._shown_at = 0.0

    def show(self, step: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total:
            click.echo(f"\r{step}: {done}" if sys.stdout.isatty() else f"{step}: {done}")
        elif sys.stdout.isatty() and now - self._shown_at > 0.1:
            self._shown_at = now
            click.echo(f"\r{step}: {done} of {total}", nl=False)
