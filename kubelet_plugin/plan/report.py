"""The status of a node's plan: what the controller and operators learn of the node."""

from __future__ import annotations

from collections.abc import Iterator

from driver.kube.types import GpuNodePlan
from driver.model.device import Device
from driver.model.offer import Offer
from driver.model.plan import OfferMode, PlanMode, PlanStatus, Summary, described, line
from driver.slices.kept_fields import KeptFields
from kubelet_plugin.health.monitor import HealthMonitor
from kubelet_plugin.inventory.inventory import Inventory
from kubelet_plugin.plan.follower import PlanFollower, Publication
from kubelet_plugin.plan.instructions import Instructions


class PlanReport:
    """Thread-safe. ``health`` has the faults that operators can clear."""

    def __init__(
        self,
        follower: PlanFollower,
        inventory: Inventory,
        instructions: Instructions,
        fields: KeptFields,
        health: HealthMonitor | None = None,
    ) -> None:
        self._follower, self._inventory, self._instructions = follower, inventory, instructions
        self._fields, self._health = fields, health

    def status(self) -> PlanStatus:
        """The status of the plan object."""
        plan, publication, memory = self._instructions.plan(), self._follower.publication, self._follower.memory.now
        states = self._inventory.states()
        is_followed = plan is not None and memory.mode is PlanMode.PLANNED
        return PlanStatus(
            observed_generation=plan.metadata.generation if plan else 0,
            epoch=memory.epoch,
            mode=memory.mode,
            summary=Summary(len(states), len(publication.held), publication.open_offers),
            gpus=tuple(line(state) for state in states),
            inventory=described(states),
            refused=tuple(self._refused(plan, publication)) if plan is not None and is_followed else (),
            faults=self._health.describe_faults() if self._health is not None else (),
            offer_mode=publication.offer_mode,
            dropped=self._fields.dropped,
            left_out=publication.left_out,
        )

    def _refused(self, plan: GpuNodePlan, publication: Publication) -> Iterator[str]:
        """One line for each offer of the plan that is not published, with the reason."""
        devices = (device for gpu in self._inventory.gpus for device in self._inventory.devices_on(gpu))
        by_offer = {device.offer: device for device in devices}
        for text in plan.spec.offers:
            offer = Offer.parse(text)
            if offer is None or offer not in by_offer:
                yield f"{text}: this node has no such device"
            elif by_offer[offer].name not in publication.names:
                yield f"{text}: {self._unpublished_reason(by_offer[offer], publication.offer_mode)}"
            else:
                unplanned = self._held_without_plan(offer, plan)
                if unplanned:
                    yield f"{text}: the plan lacks a device of its GPU that a claim still has: {', '.join(unplanned)}"

    def _unpublished_reason(self, device: Device, offer_mode: OfferMode) -> str:
        conflict = self._inventory.conflict("", device)
        if conflict is not None:
            holder, held = conflict
            return f"{holder.as_holder()} still has {held.name} on this node"
        present = "held" if offer_mode is OfferMode.COUNTERS else "published"
        return f"it does not fit beside the {present} devices, or its GPU can't be used at present"

    def _held_without_plan(self, offer: Offer, plan: GpuNodePlan) -> list[str]:
        """The held devices that the plan lacks, on an unpublished GPU: they keep its offers from being published."""
        gpu = self._inventory.gpu(offer.gpu) if offer.gpu in self._follower.memory.now.unpublished else None
        if gpu is None:
            return []
        return sorted({device.name for device in self._inventory.held_on(gpu)} - plan.spec.held_devices)
