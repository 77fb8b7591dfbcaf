"""Follows the controller's plan; without a controller the node is standalone and offers every device that fits.

A new node, of which nothing is published or held, publishes no device until its first plan, if there is a controller.
A node whose label or settings ask for complete publication publishes every device that its GPUs can be; what the plan
says does not matter then.

The node removes a device from its slices only if the plan says that it was withdrawn (fenced, and held by no claim) or
if a prepared device overlaps it. Every other device that a plan leaves out stays, because it may just have been
allocated. A plan is valid for one epoch of the node. An epoch ends when the node becomes standalone, because it then
offers devices that no plan asked for. See ``driver.model.plan``. The mode is kept in a file over restarts.

If the plan allows it, a GPU of which nothing is offered leaves the slices as a whole. Its devices stay in the memory of
this module and come back together, in one update of their slice: see ``PublishPolicy``. So the file is as important as
the slices then, and is written durably before a GPU leaves them.

Where the API server does not keep shared counters, offers are disjoint whatever the plan says (``OfferMode``). A GPU of
which published devices overlap, because the API server was downgraded, keeps its counters as long as its slice has any.
If they would be lost, its devices are left out of the slices, and the plan's status names them until the plan has
withdrawn what overlaps.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from driver.errors import StateError
from driver.kube.types import GpuNodePlan
from driver.model.device import Device
from driver.model.gpu import Gpu
from driver.model.offer import Offer
from driver.model.plan import (
    COUNTERS_FIELD,
    MODE_SPREAD_SECONDS,
    TAINTS_FIELD,
    OfferMode,
    PlanMode,
    PlanStatus,
    PublishHeld,
    Summary,
    described,
    line,
)
from driver.slices.build import PublishedGpu
from kubelet_plugin.checkpoint.files import write_atomically
from kubelet_plugin.inventory.inventory import Inventory
from kubelet_plugin.inventory.layouts import standalone_offers
from kubelet_plugin.inventory.published_devices import PublishPolicy

log = logging.getLogger(__name__)

FIRST_PLAN_TIMEOUT_SECONDS = 30.0
"""How long a plugin waits for the controller after its start."""

HELD_LAG_SECONDS = 2.0
"""How late the slices may show prepared and released devices while the node follows a plan: the scheduler knows them
from the claims, and each slice update wakes every pending pod."""

MODE_CHECK_INTERVAL_SECONDS = 1.0

ENTERED = {
    PlanMode.PLANNED: "following the controller's plan",
    PlanMode.STANDALONE: "running standalone: no controller",
    PlanMode.COMPLETE: "publishing every device that the GPUs can be",
}


class PlanFollower:
    """Thread-safe. ``on_mode`` is called after the mode changed, ``on_published`` after the published devices changed,
    of which ``status`` reports; both must return quickly."""

    def __init__(
        self,
        plan: Callable[[], GpuNodePlan | None],
        alive: Callable[[], bool],
        inventory: Inventory,
        memory: PlanMemory | None,
        save: Callable[[PlanMemory, bool], None],
        published_before: Callable[[], Iterable[str]],
        on_mode: Callable[[], None],
        on_published: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        spread: Callable[[], float] = random.random,
        faults: Callable[[], tuple[str, ...]] = tuple,
        dropped: Callable[[], tuple[str, ...]] = tuple,
        has_counters: Callable[[PublishedGpu], bool] = lambda _: False,
        standalone_offers: Callable[[Gpu, Sequence[Device]], Iterable[Device]] = standalone_offers,
        complete: Callable[[], bool | None] = lambda: False,
        has_controller: Callable[[], bool] = lambda: False,
    ) -> None:
        """``plan`` returns the node's plan as last received, ``alive`` whether the controller has renewed its heartbeat
        recently. ``memory`` is what the last process has saved; ``save`` takes (memory, whether durably).
        ``published_before`` names the devices in the node's slices; it is called once, when they are known. ``faults``
        are the faults in the status, which operators can clear. ``dropped`` are the fields of devices that the API
        server does not keep, ``has_counters`` whether the slice of a GPU's devices has any at present.
        ``standalone_offers`` are, among all devices of a GPU, the disjoint offers of a node without controller.
        ``complete``: whether every device is to be published, None: not known yet. ``has_controller``: whether the
        cluster has a controller or had one, or that is not known yet.
        """
        self._plan, self._alive = plan, alive
        self._inventory = inventory
        self._save = save
        self._published_before = published_before
        self._on_mode = on_mode
        self._on_published = on_published
        self._clock = clock
        self._spread = spread
        self._faults = faults
        self._dropped, self._has_counters, self._offers_of = dropped, has_counters, standalone_offers
        self._complete, self._has_controller = complete, has_controller
        self._left_out: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._memory = memory or PlanMemory(new_epoch(), PlanMode.STANDALONE)
        self._new_until = clock() + FIRST_PLAN_TIMEOUT_SECONDS if memory is None else None
        """Until when a new node waits for its first plan; None: it does not."""
        self._offered: frozenset[str] | None = None
        self._held: frozenset[str] = frozenset()
        self._open = 0
        """Number of offers on published GPUs."""

        self._offer_mode = self._memory.offer_mode
        """The mode in which the devices were published last."""
        self._standalone_at: float | None = clock() + FIRST_PLAN_TIMEOUT_SECONDS + MODE_SPREAD_SECONDS * spread()

    @property
    def mode(self) -> PlanMode:
        return self._memory.mode

    @property
    def is_waiting(self) -> bool:
        """Whether this is a new node that waits for its first plan and publishes no device."""
        return self._new_until is not None

    def unplanned_epoch(self) -> str | None:
        """The epoch in which the node offers devices that no plan asked for; None while it follows plans."""
        return None if self.mode is PlanMode.PLANNED or self.is_waiting else self._memory.epoch

    @property
    def held_lag_seconds(self) -> float:
        """Within how many seconds the slices must show prepared and released devices."""
        return HELD_LAG_SECONDS if self.mode is PlanMode.PLANNED else 0.0

    def published(self) -> list[PublishedGpu]:
        """The devices to publish now."""
        with self._lock:
            changed = self._choose_mode()
            last = self._reported
            before = self._offered | self._held if self._offered is not None else self._published_before_start()
            if self.is_waiting and (before or not self._awaits_plan()):
                self._new_until, changed = None, True
            policy = PublishPolicy(offers=frozenset()) if self.is_waiting else self._policy(before)
            found = self._without_lost_counters(self._inventory.published(policy))
            counted = policy.mode is OfferMode.COUNTERS or any(entry.counted for entry in found)
            self._offer_mode = OfferMode.COUNTERS if counted else OfferMode.DISJOINT
            self._offered = frozenset(device.name for entry in found for device in entry.offers)
            self._held = frozenset(device.name for entry in found for device in entry.held)
            self._open = sum(len(entry.offers) for entry in found if not entry.unpublished)
            unpublished = tuple(sorted(entry.gpu.uuid for entry in found if entry.unpublished))
            self._remember(
                durable=not set(unpublished) <= set(self._memory.unpublished),
                published=tuple(sorted(self._offered | self._held)),
                unpublished=unpublished,
            )
            differs = last != self._reported
        if changed:
            self._on_mode()
        if differs:
            self._on_published()
        return found

    def status(self) -> PlanStatus:
        """The status of the plan object."""
        plan = self._plan()
        states = self._inventory.states()
        return PlanStatus(
            observed_generation=plan.metadata.generation if plan else 0,
            epoch=self._memory.epoch,
            mode=self._memory.mode,
            summary=Summary(len(states), len(self._held), self._open),
            gpus=tuple(line(state) for state in states),
            inventory=described(states),
            refused=tuple(self._refused(plan)) if plan and self.mode is PlanMode.PLANNED else (),
            faults=self._faults(),
            offer_mode=self._offer_mode,
            dropped=self._dropped(),
            left_out=self._left_out,
        )

    @property
    def published_names(self) -> frozenset[str]:
        """The devices of the last ``published``, including those of unpublished GPUs."""
        return self._held | (self._offered or frozenset())

    def run(self, stop: threading.Event) -> None:
        """Update the mode until ``stop`` is set."""
        while not stop.wait(MODE_CHECK_INTERVAL_SECONDS):
            self.update_mode()

    def update_mode(self) -> None:
        """Change the mode if it is time to."""
        with self._lock:
            changed = self._choose_mode() or (self.is_waiting and not self._awaits_plan())
        if changed:
            self._on_mode()

    def _policy(self, before: frozenset[str]) -> PublishPolicy:
        plan, dropped = self._plan(), self._dropped()
        answer = plan.spec if plan is not None and plan.spec.epoch == self._memory.epoch else None
        if answer is not None and self.mode is PlanMode.PLANNED:
            self._remember(durable=False, offer_mode=answer.offer_mode)
        held = plan.spec.held_devices if plan is not None else frozenset()
        mode = OfferMode.DISJOINT if COUNTERS_FIELD in dropped else self._memory.offer_mode
        policy = PublishPolicy(held, kept=before, mode=mode, keeps_taints=TAINTS_FIELD not in dropped)
        if self.mode is PlanMode.COMPLETE:
            return replace(policy, complete=True)
        if self.mode is PlanMode.STANDALONE:
            return policy if mode is OfferMode.COUNTERS else replace(policy, offers=self._standalone_offers())
        unpublished = frozenset(self._memory.unpublished)
        if answer is None:  # not received yet, or not the answer to this node
            return replace(policy, offers=frozenset(), unpublished=unpublished)
        kept = before - frozenset(answer.withdrawn)
        policy = replace(policy, offers=answer.offered, listed=answer.listed_offers, kept=kept, closing=True)
        if answer.publish_held is PublishHeld.ALWAYS:
            return policy
        return replace(policy, publish_held=False, unpublished=unpublished)

    def _standalone_offers(self) -> frozenset[Offer]:
        inventory = self._inventory
        return frozenset(
            device.offer for gpu in inventory.gpus for device in self._offers_of(gpu, inventory.devices_on(gpu))
        )

    def _without_lost_counters(self, found: Iterable[PublishedGpu]) -> list[PublishedGpu]:
        """``found``, with GPUs unpublished of which devices overlap and would lose their counters."""
        drops = COUNTERS_FIELD in self._dropped()
        lost = {entry.gpu.uuid for entry in found if drops and entry.counted and not self._has_counters(entry)}
        self._left_out = tuple(sorted(d.name for entry in found if entry.gpu.uuid in lost for d in entry.offers))
        return [replace(entry, unpublished=True) if entry.gpu.uuid in lost else entry for entry in found]

    @property
    def _reported(self) -> object:
        return self._offered, self._held, self._open, self._offer_mode, self._left_out, self._dropped()

    def _awaits_plan(self) -> bool:
        """Whether a new node has to wait for its first plan still. The caller holds the lock."""
        waits = self._new_until is not None and self._clock() < self._new_until and self.mode is PlanMode.STANDALONE
        held = any(self._inventory.held_on(gpu) for gpu in self._inventory.gpus)
        return waits and not held and self._has_controller()

    def _choose_mode(self) -> bool:
        """Choose the mode by label, plan and heartbeat; returns whether it changed. The caller holds the lock."""
        complete = COUNTERS_FIELD not in self._dropped() and self._complete()
        if self.mode is PlanMode.COMPLETE:
            return complete is False and self._enter(PlanMode.STANDALONE, new_epoch())
        if complete:
            return self._enter(PlanMode.COMPLETE, new_epoch())
        plan = self._plan()
        followed = plan is not None and plan.spec.epoch == self._memory.epoch
        if self.mode is PlanMode.STANDALONE:
            # A plan that answers a new node's epoch, which is random, is the work of a live controller.
            if not followed or not (self.is_waiting or self._alive()):
                return False
            self._enter(PlanMode.PLANNED, self._memory.epoch)
            self._standalone_at = self._clock() + FIRST_PLAN_TIMEOUT_SECONDS
            return True
        if plan is not None and self._alive():
            self._standalone_at = None
            return False
        if self._standalone_at is None:
            self._standalone_at = self._clock() + MODE_SPREAD_SECONDS * self._spread()
        return self._clock() >= self._standalone_at and self._enter(PlanMode.STANDALONE, new_epoch())

    def _published_before_start(self) -> frozenset[str]:
        """The devices in the slices and those that the last process published: a kubelet that starts, or that has not
        seen the plugin for long, deletes the slices."""
        return frozenset(self._published_before()) | frozenset(self._memory.published)

    def _remember(self, *, durable: bool, **changes: Any) -> None:
        wanted = msgspec.structs.replace(self._memory, **changes)
        if wanted == self._memory:
            return
        self._memory = wanted
        try:
            self._save(wanted, durable)
        except StateError as error:
            log.error("can't save the plan mode for the next start", extra={"error": str(error)})

    def _enter(self, mode: PlanMode, epoch: str) -> bool:
        self._standalone_at = None
        self._remember(durable=True, epoch=epoch, mode=mode)
        log.info(ENTERED[mode])
        return True

    def _refused(self, plan: GpuNodePlan) -> Iterable[str]:
        devices = (device for gpu in self._inventory.gpus for device in self._inventory.devices_on(gpu))
        by_offer = {device.offer: device for device in devices}
        published = self.published_names
        gpus = filter(None, map(self._inventory.gpu, self._memory.unpublished))
        held = {gpu.uuid: {device.name for device in self._inventory.held_on(gpu)} for gpu in gpus}
        for text in plan.spec.offers:
            offer = Offer.parse(text)
            if offer is None or offer not in by_offer:
                yield f"{text}: this node has no such device"
            elif by_offer[offer].name not in published and (conflict := self._inventory.conflict("", by_offer[offer])):
                holder, device = conflict
                yield f"{text}: {holder.as_holder()} still has {device.name} on this node"
            elif by_offer[offer].name not in published:
                beside = "held" if self._offer_mode is OfferMode.COUNTERS else "published"
                yield f"{text}: it does not fit beside the {beside} devices, or its GPU can't be used at present"
            elif missing := held.get(offer.gpu, set()) - plan.spec.held_devices:
                yield f"{text}: the plan lacks a device of its GPU that a claim still has: {', '.join(sorted(missing))}"


class PlanMemory(msgspec.Struct, frozen=True):
    """The content of ``plan.json``.

    ``published`` are the devices in the slices, which may get deleted meanwhile, and those of ``unpublished`` GPUs
    (UUIDs), which come back together with the next offer of their GPU. ``offer_mode`` is that of the last plan.
    """

    epoch: str
    mode: PlanMode
    published: tuple[str, ...] = ()
    unpublished: tuple[str, ...] = ()
    offer_mode: OfferMode = OfferMode.COUNTERS


MEMORY = msgspec.json.Decoder(PlanMemory)


class PlanFile:
    """``plan.json`` in the state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "plan.json"

    def load(self) -> PlanMemory | None:
        try:
            return MEMORY.decode(self._path.read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None

    def save(self, memory: PlanMemory, durable: bool) -> None:
        write_atomically(self._path, msgspec.json.encode(memory), durable=durable)


def new_epoch() -> str:
    return uuid.uuid4().hex[:12]
