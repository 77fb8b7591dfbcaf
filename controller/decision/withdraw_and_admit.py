"""The third and the fourth stage of a decision: take back what is no longer to be offered, and admit what is.

An unwanted device is fenced before it leaves the slices, and an offer is made only when no fence is around its device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from controller.cluster.cache import ClusterCache
from controller.cluster.claim_index import PoolDevice
from controller.cluster.fleet import Fleet
from controller.cluster.unheld_devices import UnheldDevices
from controller.decision.choose import ChosenOffers, WaitsFor
from controller.decision.read import DecisionInput
from controller.fence.fence import Fence
from controller.fence.withdrawals import Withdrawals
from controller.settings import ControllerSettings
from controller.step_names import Observer
from driver.errors import ApiError
from driver.kube.types import GpuNodePlan
from driver.model.offer import Offer

log = logging.getLogger(__name__)

BLOCKED_RETRY_INTERVAL_SECONDS = 2.0
"""Time until the next decision after devices could not be offered: they stay fenced, or claims are not up to date."""


class WithdrawStage:
    """Hands unwanted devices to the withdrawals, which fence them in a thread of their own."""

    def __init__(
        self, fence: Fence, settings: ControllerSettings, wake: Callable[[], None], observer: Observer
    ) -> None:
        """``wake`` is called when a device may be withdrawn."""
        self._fence = fence
        self._is_started = self._is_withdrawing = False
        self.withdrawals = Withdrawals(fence, wake, settings.linger_s, observer=observer)

    def withdraw(self, seen: DecisionInput, offers: ChosenOffers) -> ChosenOffers:
        """``offers`` with the devices that are withdrawn now, and the offers that other devices keep waiting.

        Raises ApiError if the fence of the previous leader can not be read.
        """
        devices, by_claim = seen.devices, offers.planned.by_claim
        if not self._is_started:
            plans = seen.snapshot.plans.values()
            self._fence.start(devices.of(offer for plan in plans for offer in plan.spec.offered))
            self._is_started = True
            self.withdrawals.loop.notify()  # from now on it reads the fence again
        staying = offers.wanted | offers.listed
        excess = frozenset(device for offer, device in devices.managed.items() if offer not in staying)
        urgent = frozenset[PoolDevice]()
        if by_claim:
            awaited = {offer for planned in by_claim.values() for offer in planned}
            urgent = urgent.union(*devices.obstacles(awaited, ()).values())
        withdrawn = frozenset[PoolDevice]()
        if excess or self._is_withdrawing:
            urgent |= devices.on_unable_nodes(excess)
            withdrawn = self.withdrawals.decide(excess, devices.is_published, urgent)
        self._is_withdrawing = bool(excess)
        offers = replace(offers, withdrawn=withdrawn)
        if by_claim is None:  # counters keep offers of one GPU apart
            return offers
        return offers.let_wait(devices.obstacles(offers.wanted, withdrawn), WaitsFor.OVERLAPPING_DEVICES)


class AdmitStage:
    """Lifts the fence from offered devices, and verifies what is held on GPUs that were not published."""

    def __init__(self, cache: ClusterCache, fence: Fence) -> None:
        self._cache = cache
        self._fence = fence
        self._is_blocked = False

    @property
    def next_s(self) -> float | None:
        return BLOCKED_RETRY_INTERVAL_SECONDS if self._is_blocked else None

    def admit(self, seen: DecisionInput, offers: ChosenOffers) -> ChosenOffers:
        """``offers``, of which more may wait."""
        offers = offers.let_wait(self._unfence(offers.possible, seen.devices), WaitsFor.FENCE)
        if seen.nodes.leaving_out_held:
            offers = offers.let_wait(self._unverified(offers.possible, seen), WaitsFor.CLAIMS)
        self._is_blocked = bool(offers.waiting)
        return offers

    def _unfence(self, offers: Collection[Offer], devices: UnheldDevices) -> set[Offer]:
        """Lift the fence from offered devices. Returns those of ``offers`` that stay fenced because that failed."""
        unmanaged = {device for offer, device in devices.free.items() if offer not in devices.managed}
        fenced = {device for device in devices.of(offers) | unmanaged if device in self._fence.fenced.devices}
        if not fenced:
            return set()
        try:
            self._fence.lift(fenced)
        except ApiError as error:
            log.warning("fenced devices cannot be offered now", extra={"count": len(fenced), "error": str(error)})
            return {offer for offer in offers if devices.of([offer]) & fenced}
        return set()

    def _unverified(self, offers: Collection[Offer], seen: DecisionInput) -> set[Offer]:
        """Those of ``offers`` on unpublished GPUs whose plans may lack a held device.

        The scheduler does not count the memory of devices on such a GPU, so the plan that offers something of its node
        again must name every device of it that a claim holds. Hence this waits until the cache of claims has processed
        every change up to now, and leaves out the nodes on which that changed anything: another decision follows at
        once.
        """
        node_of = first_offers(offers, seen.fleet, seen.devices, seen.snapshot.plans)
        if not node_of:
            return set()
        nodes = set(node_of.values())
        if self._fence.catch_up():
            views = (view for view in seen.snapshot.views if view.name in nodes)
            nodes = {view.name for view in views if self._cache.held_on(view.pool) != view.held}
        return {offer for offer, node in node_of.items() if node in nodes}


def first_offers(
    offers: Collection[Offer], fleet: Fleet, devices: UnheldDevices, plans: Mapping[str, GpuNodePlan]
) -> dict[Offer, str]:
    """Those of ``offers``, with their nodes, whose GPUs may be unpublished: the plan offers nothing of the node so far,
    or the slices lack a held device of the GPU (older node plugins leave out each GPU of which nothing is offered)."""
    leaving_out = {
        name: plans[name].spec
        for name in {fleet.gpus[offer.gpu].node for offer in offers}
        if name in plans and plans[name].spec.leaves_out_held
    }
    gpus = ((offer, fleet.gpus[offer.gpu]) for offer in offers)
    return {
        offer: gpu.node
        for offer, gpu in gpus
        if gpu.node in leaving_out and (not leaving_out[gpu.node].offers or devices.lacks_held(gpu))
    }
