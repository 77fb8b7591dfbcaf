"""Following the controller's plan, or standing alone without word from it.

The node takes a device out of its slices only where the plan says that it was withdrawn (fenced, and held by
nobody) or where something prepared overlaps it: whatever else a plan leaves out stays, since somebody may have been
given it just now. A plan answers one epoch of the node; an epoch ends when the node stands alone, for then it
offers what no plan asked for. See ``driver.model.plan``.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from driver.errors import StateError
from driver.kube.plans import GpuNodePlan
from driver.model.plan import Offer, PlanMode, PlanStatus, Summary, offer_of
from driver.model.plan_gpus import described, line
from driver.slices.build import PublishedGpu
from kubelet_plugin.inventory import Inventory
from kubelet_plugin.offering import Directions
from kubelet_plugin.plan_memory import Keeper, Memory, new_epoch

log = logging.getLogger(__name__)

SPREAD_S = 60.0
"""Nodes that lose the controller together change their slices apart: each update wakes every waiting pod."""

PATIENCE_S = 30.0
"""How long a plugin that has just started waits for a first sign of life."""

HELD_LAG_S = 2.0
"""How long the slices may say nothing of what has just been prepared or let go, while a plan says what to offer: the
scheduler knows it from the claims, and each update of a slice wakes every waiting pod."""

LOOK_S = 1.0
"""How often the clock is looked at."""


class Word(Protocol):
    """What the node hears from the controller."""

    def plan(self) -> GpuNodePlan | None:
        """The node's plan as last heard of; None where there is none."""
        ...

    def alive(self) -> bool:
        """Whether the controller has shown a sign of life of late."""
        ...


class PlanFollower:
    """Thread-safe. ``on_change`` is called after the mode changed; it must return quickly."""

    def __init__(
        self,
        word: Word,
        inventory: Inventory,
        kept: Keeper,
        published_before: Callable[[], Iterable[str]],
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        spread: Callable[[], float] = random.random,
        faults: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """``kept`` is what survives this process. ``published_before`` names the devices in the node's slices; asked
        once, when they are known.

        ``faults`` are the lines of the status about what operators can clear.
        """
        self._word = word
        self._inventory = inventory
        self._kept = kept
        self._published_before = published_before
        self._on_change = on_change
        self._clock = clock
        self._spread = spread
        self._faults = faults
        self._lock = threading.Lock()
        self._memory = kept.load() or Memory(new_epoch(), PlanMode.ALONE)
        self._offered: frozenset[str] | None = None
        self._held: frozenset[str] = frozenset()
        self._alone_at: float | None = clock() + PATIENCE_S + SPREAD_S * spread()

    @property
    def mode(self) -> PlanMode:
        return self._memory.mode

    def alone(self) -> str | None:
        """The epoch in which the node stands alone; None while it follows plans."""
        return self._memory.epoch if self.mode is PlanMode.ALONE else None

    @property
    def held_lag_s(self) -> float:
        """Within how many seconds the slices have to follow what is held."""
        return HELD_LAG_S if self.mode is PlanMode.PLANNED else 0.0

    def published(self) -> list[PublishedGpu]:
        """What the slices should say now."""
        with self._lock:
            changed = self._decide()
            before = self._offered | self._held if self._offered is not None else self._known_before()
            found = self._inventory.published(self._directions(before))
            self._offered = frozenset(device.name for entry in found for device in entry.offers)
            self._held = frozenset(device.name for entry in found for device in entry.held)
            self._remember(durable=False, published=tuple(sorted(self._offered | self._held)))
        if changed:
            self._on_change()
        return found

    def status(self) -> PlanStatus:
        """What to tell the controller."""
        plan = self._word.plan()
        states = self._inventory.states()
        return PlanStatus(
            observed_generation=plan.metadata.generation if plan else 0,
            epoch=self._memory.epoch,
            mode=self._memory.mode,
            summary=Summary(len(states), len(self._held), len(self._offered or ())),
            gpus=tuple(line(state) for state in states),
            inventory=described(states),
            refused=tuple(self._refused(plan)) if plan and self.mode is PlanMode.PLANNED else (),
            faults=self._faults(),
        )

    @property
    def published_names(self) -> frozenset[str]:
        """The devices that the slices have had since they were last decided on."""
        return self._held | (self._offered or frozenset())

    def run(self, stop: threading.Event) -> None:
        """Watch the clock until ``stop`` is set."""
        while not stop.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Take another mode if it is time to."""
        with self._lock:
            changed = self._decide()
        if changed:
            self._on_change()

    def _directions(self, before: frozenset[str]) -> Directions:
        plan = self._word.plan()
        if plan is None:  # there is none, or it was not heard of yet
            return (
                Directions(kept=before) if self.mode is PlanMode.ALONE else Directions(offers=frozenset(), kept=before)
            )
        held = plan.spec.held_devices
        if self.mode is PlanMode.ALONE:
            return Directions(held, kept=before)
        if plan.spec.epoch != self._memory.epoch:
            return Directions(held, frozenset(), before)
        return Directions(held, plan.spec.offered, before - frozenset(plan.spec.withdrawn), closing=True)

    def _decide(self) -> bool:
        """Take the mode that fits what is heard; says whether that is another. The caller holds the lock."""
        plan = self._word.plan()
        followed = plan is not None and plan.spec.epoch == self._memory.epoch
        if self.mode is PlanMode.ALONE:
            return followed and self._word.alive() and self._enter(PlanMode.PLANNED, self._memory.epoch)
        if plan is not None and self._word.alive():
            self._alone_at = None
            return False
        if self._alone_at is None:
            self._alone_at = self._clock() + SPREAD_S * self._spread()
        return self._clock() >= self._alone_at and self._enter(PlanMode.ALONE, new_epoch())

    def _known_before(self) -> frozenset[str]:
        """What was published before this process: by the slices, and by what the last one kept, for a kubelet that
        starts or misses the plugin for long deletes them."""
        return frozenset(self._published_before()) | frozenset(self._memory.published)

    def _remember(self, *, durable: bool, **changes: Any) -> None:
        wanted = msgspec.structs.replace(self._memory, **changes)
        if wanted == self._memory:
            return
        self._memory = wanted
        try:
            self._kept.keep(wanted, durable=durable)
        except StateError as error:
            log.error("can't keep what the plan needs after a restart", extra={"error": str(error)})

    def _enter(self, mode: PlanMode, epoch: str) -> bool:
        self._alone_at = None
        self._remember(durable=True, epoch=epoch, mode=mode)
        log.info("follows the controller's plan" if mode is PlanMode.PLANNED else "stands alone: no controller")
        return True

    def _refused(self, plan: GpuNodePlan) -> Iterable[str]:
        devices = (device for gpu in self._inventory.gpus for device in self._inventory.devices_on(gpu))
        names = {offer_of(device): device.name for device in devices}
        published = self.published_names
        for text in plan.spec.offers:
            offer = Offer.parse(text)
            if offer is None or offer not in names:
                yield f"{text}: there is no such device on this node"
            elif names[offer] not in published:
                yield f"{text}: it does not fit beside what is held, or its GPU can't be used at present"
