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

from controller.settings import ControllerSettings, controller_settings
from controller.step_names import Observer, Step
from driver.config.log_options import with_logs
from driver.http import Check, health_pages, serve
from driver.kube.client import ApiReach
from driver.watchdog import Watchdog

if TYPE_CHECKING:
    from controller.controller import Controller
    from controller.metrics import ControllerMetrics
    from driver.config.flag_values import ListenAddress
    from driver.http import Page
    from driver.kube.client import RequestObserver
    from driver.kube.lease import Timing

log = logging.getLogger(__name__)

USER_AGENT = "tessera-controller"
LEASE = "tessera-controller"

ELECTION_TIMEOUT_SECONDS = 60.0
"""Longest time without a request: candidates and leaders request the Lease every few seconds."""

GC_THRESHOLD = 50_000
"""New objects until a garbage collection: the lists of a big cluster make millions, none of them garbage."""


@click.command()
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="Default: the pod's own ServiceAccount.")
@click.option("--driver-name", help="DRA driver name of the node plugins.  [default: gpu.tessera.dev]")
@click.option("--namespace", help="Namespace of the Leases, the fence and the canary claim.  [default: tessera]")
@click.option("--identity", help="Name of this candidate in the Lease.  [default: HOST_PID]")
@click.option("--offers", type=int, help="Number of offers of each profile while no claim is pending.  [default: 2]")
@click.option(
    "--min-published",
    help="Devices of each kind and product that are published, offered or not, for tools that count them: auto, none, "
    "or full=8,1g.10gb=2.  [default: auto: of full GPUs as many as the largest node has, of other kinds --offers]",
)
@click.option("--linger-s", type=float, help="Seconds that an unwanted offer stays published, tainted.  [default: 10]")
@click.option("--settle-s", type=float, help="Seconds until a fence has reached all API servers.  [default: 1]")
@click.option("--fence-minutes", type=float, help="Longest delay of a decision of the scheduler.  [default: 15]")
@click.option("--weights", help="PROFILE=WEIGHT,... of requests; also full, share, shared, clique.  [default: equal]")
@click.option("--unused-s", type=float, help="Seconds that a claim may pend beside a matching offer.  [default: 60]")
@click.option("--publish-held", help="always, or auto: unless the cluster has too many GPUs.  [default: auto]")
@click.option("--publish-held-gpus", type=int, help="Limit of auto.  [default: 500; before Kubernetes 1.37: 80]")
@click.option(
    "--offer-mode", help="auto, counters, or disjoint: no two offers overlap (docs/versions.md).  [default: auto]"
)
@click.option(
    "--evict-conflicting/--no-evict-conflicting",
    default=None,
    help="Evict pods whose claim was allocated what another claim holds.  [default: evict]",
)
@click.option(
    "--evict-failed-starts-s",
    type=float,
    help="Seconds until pods are evicted whose node can't prepare their claim; 0: never.  [default: 120]",
)
@click.option(
    "--kueue/--no-kueue",
    default=None,
    help="Publish what Kueue counts before it admits the Workloads in its queue.  [default: no]",
)
@click.option("--node-labels", help="Labels of Nodes: none, tessera, or all (also NVIDIA's).  [default: tessera]")
@click.option("--metrics-address", help="HOST:PORT to serve /metrics at; :9400 means every address.  [default: none]")
@click.option("--health-address", help="HOST:PORT to serve /livez and /readyz at.  [default: none]")
@click.option(
    "--web-address",
    help="HOST:PORT to serve the web page at (docs/web.md). 127.0.0.1:PORT needs no token; any other address needs "
    "one, which is sent in the clear unless --web-tls-cert is given or TLS ends in front.  [default: none]",
)
@click.option("--web-tls-cert", type=click.Path(path_type=Path), help="PEM certificates of the web page.")
@click.option("--web-tls-key", type=click.Path(path_type=Path), help="PEM key of the certificate.")
@with_logs()
def controller(**flags: Any) -> None:
    """Run the controller: decide which devices each node offers.

    Runs until SIGTERM or Ctrl-C. Several may run; one of them leads. Without any, each node offers whatever fits.

    \b
    Examples:
      tessera controller
      tessera controller --kubeconfig ~/.kube/config --settle-s 0 --offers 4
    """
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
    """Run as a candidate, and lead when elected, until ``stop`` is set. Raises FatalError.

    ``observer`` observes the leader's steps; ``timing`` replaces the default timing of the election.
    """
    from controller.controller import Controller
    from driver.kube.client import KubeClient, load_configuration
    from driver.kube.controller_heartbeat import EVICT_AFTER, Heartbeat
    from driver.kube.lease import LeaderElector
    from driver.step_observer import unobserved

    gc.set_threshold(GC_THRESHOLD, 20, 100)
    health = ControllerHealth(settings, stop)
    pages, observe, metrics = _measured(settings.metrics_address, health.unreadable)
    access = load_configuration(settings.kubeconfig, in_own_process=True)
    client = KubeClient(access, USER_AGENT, health.reach.observer(observe))
    published = {EVICT_AFTER: str(settings.evict_failed_starts_s)}
    heartbeat = Heartbeat(client, settings.namespace, settings.identity, published)
    steps = health.observer(observer or unobserved)

    def lead(lost: threading.Event) -> None:
        # New for each term: another leader may have changed anything in between.
        work = Controller(client, settings, steps, metrics)
        threading.Thread(target=heartbeat.run, args=(lost, work.failure), daemon=True, name="heartbeat").start()
        health.leads(work)
        try:
            work.run(lost)
        finally:
            health.leads(None)
            if metrics is not None:
                metrics.leadership_lost()

    with ExitStack() as stack:
        health.serve(stack, pages)
        if settings.web_address is not None:
            from controller.web.server import serve_page  # 3 MiB of libraries

            # Requests for viewers must not count as signs of life of the election: they are not observed by ``health``.
            viewing = KubeClient(access, USER_AGENT, observe)
            serve_page(stack, settings.web_address, settings, viewing, health.leader)
        log.info("candidate for leadership", extra={"identity": settings.identity, "driver": settings.driver_name})
        LeaderElector(client, settings.namespace, LEASE, settings.identity, timing).run(stop, lead)


def _measured(
    address: ListenAddress | None, unreadable: Callable[[], Mapping[str, int]]
) -> tuple[Callable[[], Mapping[str, Page]], RequestObserver | None, ControllerMetrics | None]:
    """The metrics pages, the observer of the client's requests, and the leader's metrics; none without an address."""
    if address is None:
        return dict, None, None
    from controller.metrics import ControllerMetrics
    from driver.common_metrics import METRICS_PATH, ApiMetrics, UnreadableObjects, metrics_page, process_registry

    registry = process_registry()
    registry.register(UnreadableObjects(unreadable))
    pages = {METRICS_PATH: metrics_page(registry)}
    return lambda: pages, ApiMetrics(registry).observe, ControllerMetrics(registry)


class ControllerHealth:
    """The checks of ``/livez`` and ``/readyz``.

    Alive: the election goes on, whether or not the API server answers, and decisions end. Ready: a leader decides from
    current caches; a candidate reaches the API server. ``reach`` observes all requests, ``observer`` the steps.
    """

    def __init__(self, settings: ControllerSettings, stop: threading.Event) -> None:
        self.reach = ApiReach()
        self._settings = settings
        self._watchdog = Watchdog(stop)
        self._deciding = self._watchdog.watch("deciding what to offer")
        self._work: Controller | None = None

    def observer(self, observer: Observer) -> Observer:
        """An observer that calls ``observer`` and watches the decisions."""
        return self._watchdog.steps(observer, Step.DECIDE, self._deciding)

    def leads(self, work: Controller | None) -> None:
        """Set the work of the leader; None: another controller leads."""
        self._work = work

    def leader(self) -> Controller | None:
        """The work of the leader; None: another controller leads."""
        return self._work

    def unreadable(self) -> Mapping[str, int]:
        work = self._work
        return {} if work is None else work.unreadable()

    def serve(self, stack: ExitStack, metrics: Callable[[], Mapping[str, Page]]) -> None:
        """Serve at the configured addresses. Raises EnvironmentFault."""
        live = [Check("election", self._election), Check("loops", self._watchdog.failure)]
        ready = [Check("api", self.reach.failure), Check("decisions", self._decisions)]
        servers = [
            ("--metrics-address", self._settings.metrics_address, metrics),
            ("--health-address", self._settings.health_address, lambda: health_pages(live, ready)),
        ]
        serve(stack, servers)

    def _election(self) -> str | None:
        if self.reach.requested_within(ELECTION_TIMEOUT_SECONDS):
            return None
        return f"no request to the API server for {ELECTION_TIMEOUT_SECONDS:.0f} s: the leader election has stopped"

    def _decisions(self) -> str | None:
        work = self._work
        why = None if work is None else work.failure()
        return why and f"this controller leads, but nodes must not rely on its plans: {why}"
