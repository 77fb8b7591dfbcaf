"""The controller's one decision, made anew after every change: what every node shall offer.

Everything it knows comes from the API server, and everything it decides is in the plans: a controller that is killed at
any instruction is replaced by one that reads the same.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
from collections.abc import Collection

from controller.claim_queue import Queue
from controller.curation import Curator
from controller.demand import demand_of
from controller.devices import Devices, Remembered
from controller.eligibility import Eligibility
from controller.fence import Fence, FenceSettings
from controller.hearing import Hearing
from controller.learning import Learner
from controller.matching import Matching
from controller.objects import Node
from controller.offers import CurationSettings
from controller.patience import Patience
from controller.picture import Picture
from controller.plans import Planned, PlanWriter, plan_specs
from controller.reasons import reasons_of
from controller.steps import Observer, Step
from controller.telling import Teller
from controller.unused import Unused
from controller.withdrawal import Withdrawals
from controller.world import Snapshot, World
from driver.config.controller_settings import ControllerSettings
from driver.errors import ApiError
from driver.kube.clock import SystemClock
from driver.kube.events import Recorder
from driver.kube.loop import Loop
from driver.kube.transport import KubeClient
from driver.model.plan import Offer
from driver.placement import Key, Measure, Ranking, Weights
from driver.steps import observed, unobserved

log = logging.getLogger(__name__)

RETRY_S = 2.0
"""After how long to try again what failed and must not keep the rest waiting."""

LOOK_S = 10.0
"""Longest time between two decisions: that they are made is what the sign of life stands for."""

COALESCE_S = 0.02
"""How long to gather changes: claims come in bursts, and what they leave to offer is decided once."""


def soonest(*times: float | None) -> float:
    """In how many seconds to decide again though nothing changed; None is for what is not due at all."""
    return min([LOOK_S, *(seconds for seconds in times if seconds is not None)])


class Controller:
    """One leader's work. ``run`` returns when ``stop`` is set."""

    def __init__(self, client: KubeClient, settings: ControllerSettings, observer: Observer = unobserved) -> None:
        self._loop = Loop("deciding what to offer", self._turn, COALESCE_S)
        self._observer = observer
        self._world = World(client, settings.driver_name, self._loop.notify)
        fence_settings = FenceSettings(
            settings.settle_s, keep_s=settings.fence_minutes * 60, namespace=settings.namespace
        )
        self._fence = Fence(client, self._world, fence_settings, observer=observer)
        self._recorder = Recorder(client, "tessera-controller", settings.identity)
        self._teller = Teller(self._recorder)
        self._matching = Matching(settings.driver_name)
        self._nodes: tuple[Node, ...] = ()
        self._eligibility = Eligibility(())
        self._started = self._settled = False
        self._decided_at = -math.inf
        self._patience = Patience()
        self._hearing = Hearing()
        self._picture = Picture()
        self._standing = Remembered()
        self._planned = Planned()
        self._curator = Curator(Ranking(Measure(Weights(settings.weights))), CurationSettings(offers=settings.offers))
        self._unused = Unused(settings.unused_s, SystemClock())
        self._learner = Learner(settings.learn_hours, SystemClock()) if settings.learns else None
        self._writer = PlanWriter(client, self._world.observe_plan, observer=observer)
        self._withdrawals = Withdrawals(self._fence, self._loop.notify, settings.linger_s, observer=observer)

    def run(self, stop: threading.Event) -> None:
        """Lead until ``stop`` is set."""
        self._world.start(stop)
        for target in (self._withdrawals.run, self._recorder.run, self._wake_at):
            threading.Thread(target=target, args=(stop,), daemon=True, name=target.__qualname__).start()
        self._loop.run(stop)

    def _wake_at(self, stop: threading.Event) -> None:
        stop.wait()
        self._fence.end()
        for wake in (self._loop.notify, self._withdrawals.notify, self._recorder.wake):
            wake()

    def _turn(self) -> float | None:
        with observed(self._observer, Step.DECIDE):
            again = self._decide()
        if not self._settled and self._decided_at > 0:
            # What was listed stays, as a rule: the collector need not go through all of it again and again.
            gc.collect()
            gc.freeze()
            self._settled = True
        return again

    def _decide(self) -> float | None:
        """Read everything, decide, and write the plans that changed; the next time in as many seconds as returned.

        Raises ApiError.
        """
        if not self._world.synced:
            return None
        began = time.perf_counter()
        seen = self._world.snapshot()
        self._planned.changed |= seen.changed  # they are told once; a decision that fails is made again
        fleet = self._picture.fleet(seen.views)
        devices = Devices(seen.views, fleet, self._standing)
        queue = Queue(seen.cluster, fleet, self._matching, self._eligible(seen.cluster.nodes))
        demands = demand_of(queue, self._patience.widened(queue))
        waited_for = {demand.key for demand in demands}
        protected = [offer for offer in devices.open if Key(offer.type, offer.profile) in waited_for]
        self._learn(queue)
        curation = self._curator.curate(fleet, demands, devices.open, protected)
        offers = devices.offerable(curation.offers, seen.withdrawing)
        excess = (device for offer, device in devices.obeying.items() if offer not in offers)
        self._start(seen, devices)
        withdrawn = self._withdrawals.decide(frozenset(excess), devices.is_published)
        blocked = self._let_through(devices, offers)
        specs = plan_specs(seen.views, fleet, offers - blocked, withdrawn, self._planned)
        written = self._writer.write(specs, seen.plans, self._planned.owners, self._planned.changed)
        self._planned.changed.clear()
        if written:
            elapsed = (time.perf_counter() - began) * 1000
            log.info("wrote plans", extra={"plans": written, "offers": len(curation.offers), "ms": f"{elapsed:.0f}"})
        self._teller.labels(seen.cluster.nodes, fleet)
        self._tell_claims(queue, devices, seen)
        self._decided_at = time.monotonic()
        return soonest(
            self._writer.due_in_s(), self._unused.next_s, self._patience.next_s, RETRY_S if blocked else None
        )

    def decides(self) -> bool:
        """Whether decisions are made: nodes may rely on their plans then."""
        return time.monotonic() - self._decided_at < 2 * LOOK_S

    def _eligible(self, nodes: tuple[Node, ...]) -> Eligibility:
        """Where pods may run; what was found stays known until a node changes."""
        if nodes != self._nodes:
            self._nodes, self._eligibility = nodes, Eligibility(nodes)
        return self._eligibility

    def _learn(self, queue: Queue) -> None:
        """Rank by what claims ask for; other weights need another curator, since what it remembers is for its own."""
        if self._learner is not None and self._learner.learn(queue):
            self._curator = Curator(Ranking(Measure(self._learner.weights)), self._curator.settings)

    def _start(self, seen: Snapshot, devices: Devices) -> None:
        """Go on with the fence of the leader before; once."""
        if not self._started:
            self._fence.start(devices.of(offer for plan in seen.plans.values() for offer in plan.spec.offered))
            self._started = True

    def _let_through(self, devices: Devices, offers: Collection[Offer]) -> set[Offer]:
        """What is offered must not be fenced, by whomever; returns which of ``offers`` are all the same."""
        free = {device for offer, device in devices.standing.items() if offer not in devices.obeying}
        fenced = {device for device in devices.of(offers) | free if self._fence.is_fenced(device)}
        if not fenced:
            return set()
        try:
            self._fence.lift(fenced)
        except ApiError as error:
            log.warning("what is fenced can't be offered now", extra={"count": len(fenced), "error": str(error)})
            return {offer for offer in offers if devices.of([offer]) & fenced}
        return set()

    def _tell_claims(self, queue: Queue, devices: Devices, seen: Snapshot) -> None:
        """Why claims wait: nothing could satisfy them, or something else than offers keeps them waiting."""
        found = {offer: devices.standing[offer] for offer in devices.open}
        free = {offer: device for offer, device in found.items() if not self._fence.is_fenced(device)}
        reasons = reasons_of(queue, self._hearing.listen(seen.views))
        self._teller.claims(queue, [*reasons, *self._unused.look(queue, free, seen.incomplete)])
