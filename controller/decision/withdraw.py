"""The third stage of a decision: take back what is no longer to be offered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from controller.cluster.claim_index import PoolDevice
from controller.decision.choose import ChosenOffers, WaitsFor
from controller.decision.read import DecisionInput
from controller.fence.fence import Fence
from controller.fence.withdrawals import Withdrawals
from controller.settings import ControllerSettings
from controller.steps import Observer


class WithdrawStage:
    """Hands unwanted devices to the withdrawals, which fence them in a thread of their own."""

    next_s = None

    def __init__(
        self, fence: Fence, settings: ControllerSettings, wake: Callable[[], None], observer: Observer
    ) -> None:
        """``wake`` is called when a device may be withdrawn."""
        self._fence = fence
        self._is_started = False
        self.withdrawals = Withdrawals(fence, wake, settings.linger_s, observer=observer)

    def withdraw(self, seen: DecisionInput, offers: ChosenOffers) -> ChosenOffers:
        """``offers`` with the devices that are withdrawn now, and the offers that other devices keep waiting.

        Raises ApiError if the fence of the previous leader can not be read.
        """
        devices, planner = seen.devices, offers.planner
        if not self._is_started:
            plans = seen.snapshot.plans.values()
            self._fence.start(devices.of(offer for plan in plans for offer in plan.spec.offered))
            self._is_started = True
        staying = offers.wanted | offers.listed
        excess = frozenset(device for offer, device in devices.managed.items() if offer not in staying)
        awaited = {offer for planned in (offers.planned.by_claim or {}).values() for offer in planned}
        urgent = frozenset[PoolDevice]().union(*planner.obstacles(devices, awaited).values())
        withdrawn = self.withdrawals.decide(excess, devices.is_published, urgent)
        obstructed = planner.obstacles(devices, offers.wanted, withdrawn)
        return replace(offers, withdrawn=withdrawn).let_wait(obstructed, WaitsFor.OVERLAPPING_DEVICES)
