"""Whether a node follows the controller's plans, is standalone, or publishes every device.

A new epoch, a random name, begins whenever the node enters standalone or complete mode, because it then offers devices
that no plan asked for. The node follows only a plan that names its epoch. A new node, of which nothing is published or
held, waits for its first plan if there is a controller.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from driver.model.plan import COUNTERS_FIELD, MODE_SPREAD_SECONDS, PlanMode, PlanSpec
from driver.slices.dropped_fields import KeptFields
from kubelet_plugin.inventory.inventory import Inventory
from kubelet_plugin.plan.instructions import Instructions
from kubelet_plugin.plan.plan_file import RememberedPlan, new_epoch

log = logging.getLogger(__name__)

FIRST_PLAN_TIMEOUT_SECONDS = 30.0
"""Time that a node waits for a controller after the plugin has started, and for its heartbeat after it has begun to
follow plans."""

HELD_LAG_SECONDS = 2.0
"""How late the slices may show prepared and released devices while the node follows a plan: the scheduler knows them
from the claims, and each slice update wakes every pending pod."""

ENTERED = {
    PlanMode.PLANNED: "following the controller's plan",
    PlanMode.STANDALONE: "running standalone until a live controller plans for this node",
    PlanMode.COMPLETE: "publishing every device that the GPUs can be",
}


@dataclass(frozen=True, slots=True)
class ModeTiming:
    """The clock, and which part of MODE_SPREAD_SECONDS, from 0 to 1, this node waits."""

    clock: Callable[[], float] = time.monotonic
    spread: Callable[[], float] = random.random


PLUGIN_TIMING = ModeTiming()


class ModeChoice:
    """``choose`` and ``end_wait_if_due`` are for the holder of the follower's lock; the rest is for any thread."""

    def __init__(
        self,
        instructions: Instructions,
        inventory: Inventory,
        fields: KeptFields,
        memory: RememberedPlan,
        timing: ModeTiming,
    ) -> None:
        self._instructions, self._inventory, self._fields, self._memory = instructions, inventory, fields, memory
        self._clock, self._spread = timing.clock, timing.spread
        first_plan_until = self._clock() + FIRST_PLAN_TIMEOUT_SECONDS
        self._new_until = first_plan_until if memory.is_new else None
        """Until when a new node waits for its first plan; None: it does not."""
        self._standalone_at: float | None = first_plan_until + MODE_SPREAD_SECONDS * self._spread()
        """When a node that follows plans becomes standalone unless a controller is alive; None: no such deadline."""

    @property
    def mode(self) -> PlanMode:
        return self._memory.now.mode

    @property
    def is_waiting(self) -> bool:
        """Whether this is a new node that waits for its first plan and publishes no device."""
        return self._new_until is not None

    @property
    def held_lag_seconds(self) -> float:
        """Within how many seconds the slices must show prepared and released devices."""
        return HELD_LAG_SECONDS if self.mode is PlanMode.PLANNED else 0.0

    def unplanned_epoch(self) -> str | None:
        """The epoch in which the node offers devices that no plan asked for; None while it follows plans."""
        return None if self.mode is PlanMode.PLANNED or self.is_waiting else self._memory.now.epoch

    def plan_of_epoch(self) -> PlanSpec | None:
        """The plan for the present epoch; None if it has not been received yet."""
        plan = self._instructions.plan()
        return plan.spec if plan is not None and plan.spec.epoch == self._memory.now.epoch else None

    def end_wait_if_due(self, *, has_devices: bool = False) -> bool:
        """End the wait of a new node for its first plan if that is over; returns whether it ended now.

        ``has_devices``: devices of the node are published.
        """
        if self._new_until is None:
            return False
        if self._clock() < self._new_until and self.mode is PlanMode.STANDALONE and not has_devices:
            holds_devices = any(self._inventory.held_on(gpu) for gpu in self._inventory.gpus)
            if not holds_devices and self._instructions.has_controller():
                return False
        self._new_until = None
        return True

    def choose(self) -> bool:
        """Choose the mode by label, plan and heartbeat; returns whether it changed."""
        before = self.mode
        publish_all = COUNTERS_FIELD not in self._fields.dropped and self._instructions.publishes_all()
        if before is PlanMode.COMPLETE:
            if publish_all is False:
                self._enter(PlanMode.STANDALONE, new_epoch())
        elif publish_all:
            self._enter(PlanMode.COMPLETE, new_epoch())
        elif before is PlanMode.STANDALONE:
            # The epoch of a new node is random, so a plan for it proves that a controller is alive.
            if self.plan_of_epoch() is not None and (self.is_waiting or self._instructions.controller_is_alive()):
                self._enter(PlanMode.PLANNED, self._memory.now.epoch)
                self._standalone_at = self._clock() + FIRST_PLAN_TIMEOUT_SECONDS
        elif self._instructions.plan() is not None and self._instructions.controller_is_alive():
            self._standalone_at = None
        else:
            if self._standalone_at is None:
                self._standalone_at = self._clock() + MODE_SPREAD_SECONDS * self._spread()
            if self._clock() >= self._standalone_at:
                self._enter(PlanMode.STANDALONE, new_epoch())
        return self.mode is not before

    def _enter(self, mode: PlanMode, epoch: str) -> None:
        self._standalone_at = None
        self._memory.change(durable=True, epoch=epoch, mode=mode)
        log.info(ENTERED[mode])
