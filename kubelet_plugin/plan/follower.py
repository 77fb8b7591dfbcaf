"""What a node publishes, according to its mode and the controller's plan.

The node removes a device from its slices only if the plan says that it was withdrawn (fenced, and held by no claim) or
if a prepared device overlaps it. Every other device that a plan leaves out stays, because it may just have been
allocated. A plan is valid for one epoch of the node (``kubelet_plugin.plan.mode``).

If the plan allows it, the GPUs of a node that offers nothing leave the slices as a whole. Their devices stay in the
memory of this module and come back together, those of one GPU in one update of their slice: see ``PublishPolicy``. So
the file ``plan.json`` is as important as the slices then, and is written durably before a GPU leaves them.

Where the API server does not keep shared counters, offers are disjoint whatever the plan says (``OfferMode``). A GPU
whose published devices overlap, because the API server was downgraded, keeps its counters as long as its slice has any.
If they would be lost, its devices are left out of the slices, and the plan's status names them until the plan has
withdrawn what overlaps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from driver.model.device import Monitor
from driver.model.gpu_settings import NO_LAYOUTS, Layouts
from driver.model.offer import DeviceKind, Offer, parsed_offers
from driver.model.plan import COUNTERS_FIELD, TAINTS_FIELD, OfferMode, PlanMode, PublishHeld
from driver.model.shared_memory import SHARING_FIELD
from driver.slices.build import PublishedGpu
from driver.slices.dropped_fields import KeptFields
from driver.slices.publisher import PresentSlices
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.inventory.inventory import Inventory
from kubelet_plugin.inventory.published_devices import PublishPolicy
from kubelet_plugin.inventory.standalone_offers import standalone_offers
from kubelet_plugin.plan.instructions import Instructions
from kubelet_plugin.plan.mode import PLUGIN_TIMING, ModeChoice, ModeTiming
from kubelet_plugin.plan.plan_file import RememberedPlan

MODE_CHECK_INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Publication:
    """The devices that may have been allocated, by name: those in the slices, and those of unpublished GPUs.

    ``visible_offers`` is the number of offers in the slices, ``offer_mode`` the mode in which the devices were
    published, ``dropped`` the fields of devices that the API server did not keep. ``left_out`` are free devices that
    overlap and would lose their counters.
    """

    offer_mode: OfferMode
    offered: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    visible_offers: int = 0
    left_out: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        return self.offered | self.held


class PlanFollower:
    """Thread-safe. Reports changes of the mode and of the published devices.

    ``layouts`` are the disjoint offers of a node without controller.
    """

    def __init__(
        self,
        instructions: Instructions,
        inventory: Inventory,
        fields: KeptFields,
        memory: RememberedPlan,
        changes: ChangeNotifier,
        layouts: Layouts = NO_LAYOUTS,
        timing: ModeTiming = PLUGIN_TIMING,
    ) -> None:
        self.memory, self.mode_choice = memory, ModeChoice(instructions, inventory, fields, memory, timing)
        self.instructions, self.inventory, self._fields = instructions, inventory, fields
        self._changes, self._layouts = changes, layouts
        self._lock = threading.Lock()
        self._has_published = False
        self.publication = Publication(self.memory.now.offer_mode, dropped=fields.dropped)

    def published(self, slices: PresentSlices) -> list[PublishedGpu]:
        """The devices to publish now, given the node's ``slices`` at the API server."""
        with self._lock:
            mode_changed = self.mode_choice.choose()
            last = self.publication
            # The slices are not enough at first: a kubelet that just started, or long missed the plugin, deletes them.
            before = last.names if self._has_published else {*slices.device_names(), *self.memory.now.published}
            mode_changed |= self.mode_choice.end_wait_if_due(has_devices=bool(before))
            policy = (
                PublishPolicy(offers=frozenset()) if self.mode_choice.is_waiting else self._policy(frozenset(before))
            )
            gpus, left_out = self._without_lost_counters(self.inventory.published(policy), slices)
            self._remember_published(gpus, left_out, policy)
            differs = self.publication != last
        if mode_changed:
            self._changes.report(NodeChange.MODE)
        if differs:
            self._changes.report(NodeChange.PUBLISHED)
        return gpus

    def monitors(self) -> list[Monitor] | None:
        """The monitor devices to publish now: those of all GPUs that answer and are not reserved for another driver.

        None: what is published stays as it is, because the plan has not been received yet.

        Unhealthy, held and cordoned GPUs are monitored, too. While the node follows plans, the plan says whether
        monitor devices are needed. Otherwise they are always published: a standalone node has no controller that could
        say so, and an autoscaler counts a complete node as unready if it has fewer pools than the node that it copied.
        """
        is_needed = True
        if self.mode_choice.mode is PlanMode.PLANNED:
            plan = self.instructions.plan()
            if plan is None:
                return None
            is_needed = plan.spec.monitors
        return self.inventory.monitors() if is_needed and not self.mode_choice.is_waiting else []

    def run(self, stop: threading.Event) -> None:
        """Update the mode until ``stop`` is set."""
        while not stop.wait(MODE_CHECK_INTERVAL_SECONDS):
            self.update_mode()

    def update_mode(self) -> None:
        """Change the mode if it is time to."""
        with self._lock:
            changed = self.mode_choice.choose() or self.mode_choice.end_wait_if_due()
        if changed:
            self._changes.report(NodeChange.MODE)

    def _remember_published(
        self, gpus: Sequence[PublishedGpu], left_out: tuple[str, ...], policy: PublishPolicy
    ) -> None:
        """Remember what is published from now on. The caller holds the lock."""
        counted = policy.mode is OfferMode.COUNTERS or any(gpu.counted for gpu in gpus)
        self._has_published = True
        self.publication = Publication(
            offer_mode=OfferMode.COUNTERS if counted else OfferMode.DISJOINT,
            offered=frozenset(device.name for gpu in gpus for device in gpu.offers),
            held=frozenset(device.name for gpu in gpus for device in gpu.held),
            visible_offers=sum(gpu.visible_offers for gpu in gpus),
            left_out=left_out,
            dropped=self._fields.dropped,
        )
        unpublished = tuple(sorted(gpu.gpu.uuid for gpu in gpus if gpu.unpublished))
        self.memory.change(
            durable=not set(unpublished) <= set(self.memory.now.unpublished),
            published=tuple(sorted(self.publication.names)),
            unpublished=unpublished,
            held_gpus={gpu.gpu.uuid: gpu.number for gpu in gpus if gpu.held},
            held_shares=_held_shares(gpus),
        )

    def _policy(self, before: frozenset[str]) -> PublishPolicy:
        mode, plan, spec = self.mode_choice.mode, self.instructions.plan(), self.mode_choice.plan_of_epoch()
        if spec is not None and mode is PlanMode.PLANNED:
            self.memory.change(durable=False, offer_mode=spec.offer_mode)
        held = plan.spec.held_devices if plan is not None else frozenset()
        dropped = self._fields.dropped
        offer_mode = OfferMode.DISJOINT if COUNTERS_FIELD in dropped else self.memory.now.offer_mode
        policy = PublishPolicy(
            held,
            kept=before,
            mode=offer_mode,
            keeps_taints=TAINTS_FIELD not in dropped,
            keeps_sharing=SHARING_FIELD not in dropped,
        )
        if mode is PlanMode.COMPLETE:
            return replace(policy, complete=True)
        if mode is PlanMode.STANDALONE:
            return policy if offer_mode is OfferMode.COUNTERS else replace(policy, offers=self._standalone_offers())
        unpublished = frozenset(self.memory.now.unpublished)
        if spec is None:  # no plan yet, or one for an earlier epoch
            return replace(policy, offers=frozenset(), unpublished=unpublished)
        kept = before - frozenset(spec.withdrawn)
        policy = replace(policy, offers=spec.offered, listed=parsed_offers(spec.listed), kept=kept, closing=True)
        if spec.publish_held is PublishHeld.ALWAYS:
            return policy
        return replace(policy, publish_held=False, unpublished=unpublished)

    def _standalone_offers(self) -> frozenset[Offer]:
        inventory = self.inventory
        return frozenset(
            device.offer
            for gpu in inventory.gpus
            for device in standalone_offers(gpu, inventory.devices_on(gpu), self._layouts)
        )

    def _without_lost_counters(
        self, gpus: Sequence[PublishedGpu], slices: PresentSlices
    ) -> tuple[list[PublishedGpu], tuple[str, ...]]:
        """``gpus``, with those unpublished whose devices overlap and would lose counters; the names of their offers."""
        if COUNTERS_FIELD not in self._fields.dropped:
            return list(gpus), ()
        lost = {gpu.gpu.uuid for gpu in gpus if gpu.counted and not slices.has_counters(gpu)}
        left_out = sorted(device.name for gpu in gpus if gpu.gpu.uuid in lost for device in gpu.offers)
        return [replace(gpu, unpublished=True) if gpu.gpu.uuid in lost else gpu for gpu in gpus], tuple(left_out)


def _held_shares(gpus: Iterable[PublishedGpu]) -> dict[str, dict[int, int]]:
    shares: dict[str, dict[int, int]] = {}
    for device in (device for gpu in gpus for device in gpu.held if device.kind is DeviceKind.SHARE):
        shares.setdefault(device.gpu.uuid, {})[device.spot.at] = device.shares
    return shares
