"""The fourth stage of a decision: admit the offers that new claims may be allocated from now on."""

from __future__ import annotations

import logging
from collections.abc import Collection

from controller.cluster.cache import ClusterCache
from controller.cluster.published_offers import DeviceIndex
from controller.decision.choose import ChosenOffers, WaitsFor
from controller.decision.held_publication import first_offers
from controller.decision.read import DecisionInput
from controller.fence.fence import Fence
from driver.errors import ApiError
from driver.model.offer import Offer

log = logging.getLogger(__name__)

BLOCKED_RETRY_INTERVAL_SECONDS = 2.0
"""Time until the next decision after devices could not be offered: they stay fenced, or claims are not up to date."""


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
        offers = offers.let_wait(self._unverified(offers.possible, seen), WaitsFor.CLAIMS)
        self._is_blocked = bool(offers.waiting)
        return offers

    def _unfence(self, offers: Collection[Offer], devices: DeviceIndex) -> set[Offer]:
        """Lift the fence from offered devices. Returns those of ``offers`` that stay fenced because that failed."""
        unmanaged = {device for offer, device in devices.free.items() if offer not in devices.managed}
        fenced = {device for device in devices.of(offers) | unmanaged if self._fence.is_fenced(device)}
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

        The scheduler does not count the memory of devices on such a GPU, so the plan that offers something of it again
        must name every device of it that a claim holds. Hence this waits until the cache of claims has processed every
        change up to now, and leaves out the nodes on which that changed anything: another decision follows at once.
        """
        node_of = first_offers(offers, seen.fleet, seen.snapshot.plans)
        if not node_of:
            return set()
        nodes = set(node_of.values())
        if self._fence.catch_up():
            views = (view for view in seen.snapshot.views if view.name in nodes)
            nodes = {view.name for view in views if self._cache.held_on(view.pool) != view.held}
        return {offer for offer, node in node_of.items() if node in nodes}
