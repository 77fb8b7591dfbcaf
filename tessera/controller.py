"""``tessera controller``: a candidate for leading the cluster, and its leader's work."""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from driver.config.controller_settings import ControllerSettings, controller_settings
from tessera.logs import FORMATS, configure_logs

if TYPE_CHECKING:
    from controller.steps import Observer
    from driver.config.listen import ListenAddress
    from driver.kube.lease import Timing
    from driver.kube.transport import RequestObserver
    from driver.web import Page

log = logging.getLogger(__name__)

USER_AGENT = "tessera-controller"
LEASE = "tessera-controller"

YOUNG = 50_000
"""New objects until the collector looks at them: lists of a big cluster make millions, none of them garbage."""


@click.command()
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="Default: the pod's own ServiceAccount.")
@click.option("--driver-name", help="DRA driver name of the node plugins.  [default: gpu.tessera.dev]")
@click.option("--namespace", help="Where its Leases, the fence and the canary claim are.  [default: tessera]")
@click.option("--identity", help="Its name among the candidates.  [default: HOST_PID]")
@click.option("--offers", type=int, help="How many of each profile are offered while nobody waits.  [default: 2]")
@click.option("--linger-s", type=float, help="How long an offer no longer wanted stays, closed.  [default: 10]")
@click.option("--settle-s", type=float, help="Seconds until a fence has reached all API servers.  [default: 1]")
@click.option("--fence-minutes", type=float, help="How late a decision of the scheduler may come.  [default: 15]")
@click.option("--weights", help="PROFILE=WEIGHT,...: what claims ask for; also full, share, clique.  [default: equal]")
@click.option("--learn-hours", type=float, help="Learn them: after so long a claim counts half.  [default: 0, equal]")
@click.option("--unused-s", type=float, help="Seconds beside a fitting offer until a claim is reported.  [default: 60]")
@click.option("--metrics-address", help="HOST:PORT to serve /metrics at; :9400 is every address.  [default: none]")
@click.option("--health-address", help="HOST:PORT to serve /livez and /readyz at.  [default: none]")
@click.option("--log-format", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning"]), default="info", show_default=True)
def controller(log_format: str, log_level: str, **flags: Any) -> None:
    """Run the controller: decide what every node offers.

    Runs until SIGTERM or Ctrl-C. Several may run; one of them leads. Without any, each node offers whatever fits.

    \b
    Examples:
      tessera controller
      tessera controller --kubeconfig ~/.kube/config --settle-s 0 --offers 4
    """
    configure_logs(log_format, log_level)
    settings = controller_settings(**flags)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    run(settings, stop)
    if not stop.is_set():
        sys.exit(1)


def run(
    settings: ControllerSettings, stop: threading.Event, observer: Observer | None = None, timing: Timing | None = None
) -> None:
    """Be a candidate, and lead when elected, until ``stop`` is set. Raises FatalError.

    ``observer`` is told of the leader's steps; ``timing`` is another than the usual one of the election.
    """
    from controller.controller import Controller
    from driver.kube.heartbeat import Heartbeat
    from driver.kube.lease import LeaderElector
    from driver.kube.transport import KubeClient, load_configuration
    from driver.steps import unobserved
    from tessera.controller_health import ControllerHealth

    gc.set_threshold(YOUNG, 20, 100)
    pages, observe = _measured(settings.metrics_address)
    health = ControllerHealth(settings, stop)
    client = KubeClient(load_configuration(settings.kubeconfig), USER_AGENT, health.reach.observer(observe))
    heartbeat = Heartbeat(client, settings.namespace, settings.identity)
    steps = health.observer(observer or unobserved)

    def lead(lost: threading.Event) -> None:
        # Made anew for each term: what was known in the last one may have been changed by another leader.
        work = Controller(client, settings, steps)
        threading.Thread(target=heartbeat.run, args=(lost, work.decides), daemon=True, name="heartbeat").start()
        health.leads(work.decides)
        try:
            work.run(lost)
        finally:
            health.leads(None)

    with ExitStack() as stack:
        health.serve(stack, pages)
        log.info("candidate for leadership", extra={"identity": settings.identity, "driver": settings.driver_name})
        LeaderElector(client, settings.namespace, LEASE, settings.identity, timing).run(stop, lead)


def _measured(address: ListenAddress | None) -> tuple[Callable[[], Mapping[str, Page]], RequestObserver | None]:
    """The pages to serve at ``address``, and what counts a client's requests; without one nothing is measured."""
    if address is None:
        return dict, None
    from driver.metrics.api import ApiMetrics
    from driver.metrics.endpoint import PATH, metrics_page
    from driver.metrics.process import process_registry

    registry = process_registry()
    return lambda: {PATH: metrics_page(registry)}, ApiMetrics(registry).observe
