"""The node's writes to the API server about its plan.

Its status, from which the controller and operators learn of the node; and the release of the controller's fence.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from driver.errors import CONFLICT, FORBIDDEN, accepted_status
from driver.kube.client import KubeClient
from driver.kube.get_and_list import owner_reference
from driver.kube.types import GpuNodePlan
from driver.kube.work_loop import Loop, MakeLoop
from driver.model.device import Device
from driver.model.offer import OF_SEVERAL, Offer
from driver.model.plan import API_VERSION, FENCE, KIND, PATH, ConfigStatus, OfferMode, PlanMode, PlanStatus, Summary
from driver.model.reported_gpus import encode_inventory, gpu_line
from driver.slices.slice_names import Pool
from kubelet_plugin.health.device_health import HealthMonitor
from kubelet_plugin.health.failed_preparations import UNPREPARE
from kubelet_plugin.health.node_problems import NodeConditions
from kubelet_plugin.plan.follower import PlanFollower, Publication
from kubelet_plugin.plan.mode import ModeChoice
from kubelet_plugin.plan.node_config import ConfigFollower
from kubelet_plugin.usage.sampler import IdleClaims

STATUS_COALESCE_SECONDS, RELEASE_COALESCE_SECONDS = 0.5, 0.05

STATUS_INTERVAL_SECONDS = 5.0
"""Minimum time between two writes of fields that only explain something, such as ``refused``; nothing is decided by
them. The controller sees what is held and offered in claims and slices."""

FAILED_INTERVAL_SECONDS = 60.0
"""Time until failed preparations are read again: nothing reports that the kubelet has given one up."""

CREATE_INTERVAL_SECONDS = 30.0
"""Time until a node without a plan object tries again to create it, or looks for it again."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Thread-safe. ``health`` has the faults that operators can clear, ``config`` the node's configuration."""

    follower: PlanFollower
    health: HealthMonitor | None = None
    config: ConfigFollower | None = None
    idle: IdleClaims | None = None

    def status(self) -> PlanStatus:
        follower = self.follower
        plan, publication, memory = follower.instructions.plan(), follower.publication, follower.memory.now
        states = follower.inventory.states()
        is_followed = plan is not None and memory.mode is PlanMode.PLANNED
        idle, idle_as_of = self.idle.report if self.idle is not None else ((), "")
        return PlanStatus(
            observed_generation=plan.metadata.generation if plan else 0,
            epoch=memory.epoch,
            mode=memory.mode,
            summary=Summary(len(states), len(publication.held), publication.visible_offers),
            gpus=tuple(gpu_line(state) for state in states),
            inventory=encode_inventory(states),
            refused=tuple(self._refused(plan, publication)) if plan is not None and is_followed else (),
            faults=self.health.describe_faults() if self.health is not None else (),
            offer_mode=publication.offer_mode,
            dropped=publication.dropped,
            left_out=publication.left_out,
            unprepared=self.health.failed_preparations.reported() if self.health is not None else (),
            unreleased=self.health.failed_preparations.reported(UNPREPARE) if self.health is not None else (),
            conditions=self.health.node_conditions.current() if self.health is not None else (),
            config=self.config.status if self.config is not None else ConfigStatus(),
            idle=idle,
            idle_as_of=idle_as_of,
        )

    def _refused(self, plan: GpuNodePlan, publication: Publication) -> Iterator[str]:
        """One line for each offer of the plan that is not published, with the reason."""
        inventory = self.follower.inventory
        offering = {offer.gpu for offer in plan.spec.offered}
        gpus = (gpu for gpu in inventory.gpus if gpu.uuid in offering)
        by_offer = {device.offer: device for gpu in gpus for device in inventory.devices_on(gpu)}
        for text in plan.spec.offers:
            offer = Offer.parse(text)
            if offer is None or offer not in by_offer:
                yield f"{text}: this node has no such device"
            elif by_offer[offer].name not in publication.names or self._is_held_unplanned(by_offer[offer], plan):
                yield f"{text}: {self._unpublished_reason(by_offer[offer], publication.offer_mode)}"
            elif offer.gpu in self.follower.memory.now.unpublished:
                # Held devices that the plan lacks keep the offers of an unpublished GPU from being published.
                held = {device.name for device in inventory.held_on(by_offer[offer].gpu)}
                if unplanned := ", ".join(sorted(held - plan.spec.held_devices)):
                    yield f"{text}: the plan lacks a device of its GPU that a claim still has: {unplanned}"

    def _is_held_unplanned(self, device: Device, plan: GpuNodePlan) -> bool:
        """Whether a claim still has ``device`` although ``plan`` does not list it as held.

        Then it is published as held. This happens after a pod and its claim were deleted by force while the kubelet
        was down.
        """
        held = {held.name for held in self.follower.inventory.held_on(device.gpu)}
        return device.kind not in OF_SEVERAL and device.name in held - plan.spec.held_devices

    def _unpublished_reason(self, device: Device, offer_mode: OfferMode) -> str:
        conflict = self.follower.inventory.conflict("", device)
        if conflict is not None:
            holder, held = conflict
            return f"{holder.as_holder()} still has {held.name} on this node until its kubelet releases it"
        present = "held" if offer_mode is OfferMode.COUNTERS else "published"
        return f"it does not fit beside the {present} devices, or its GPU can't be used at present"


class PlanStatusWriter:
    """Writes the status of ``report`` when it differs from the last write.

    The controller creates the plan object. If there is no controller, the node creates it without a spec, so that
    commands know its GPUs.
    """

    def __init__(self, client: KubeClient, node: str, report: PlanReport, loop: MakeLoop = Loop) -> None:
        self._client, self._node = client, node
        self._instructions, self._report = report.follower.instructions, report
        self._written: tuple[str, PlanStatus] | None = None
        self._written_at = 0.0
        self._loop = loop("writing the plan's status", self._write, STATUS_COALESCE_SECONDS)
        self.notify = self._loop.notify
        self.run = self._loop.run

    def _write(self) -> float | None:
        """Write a changed status, or return after how many seconds to call again. Raises ApiError."""
        plan = self._instructions.plan()
        if plan is None:
            return self._create() if self._instructions.lacks_plan() else None
        uid, status = plan.metadata.uid, self._report.status()
        if self._written == (uid, status):
            return FAILED_INTERVAL_SECONDS if status.unprepared or status.unreleased else None
        seconds = self._written_at + STATUS_INTERVAL_SECONDS - time.monotonic()
        if seconds > 0 and self._written is not None and _urgent(uid, status) == _urgent(*self._written):
            return seconds
        # With the uid, so that a plan that was deleted and created again in between is never changed.
        body = {"metadata": {"uid": uid}, "status": msgspec.to_builtins(status)}
        if self._client.patch_existing(f"{PATH}/{plan.metadata.name}/status", body) is None:
            # Deleted or replaced, which the watch reports, or a conflict of writers, which nothing reports.
            return STATUS_INTERVAL_SECONDS
        self._written, self._written_at = (uid, status), time.monotonic()
        return FAILED_INTERVAL_SECONDS if status.unprepared or status.unreleased else None

    def _create(self) -> float:
        """Create a plan without a spec. Returns after how many seconds to look again. Raises ApiError."""
        metadata = {"name": self._node, "ownerReferences": [owner_reference(self._client, self._node)]}
        with accepted_status(CONFLICT, FORBIDDEN):  # a controller was faster; the role is of an older chart
            self._client.create(PATH, {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata})
        return CREATE_INTERVAL_SECONDS


class ConditionsWriter:
    """Writes nothing but the node's conditions into its plan's status, if it has a plan.

    The rest of the status is unknown without hardware. Call ``notify`` when a condition has changed.
    """

    def __init__(self, client: KubeClient, node: str, conditions: NodeConditions, loop: MakeLoop = Loop) -> None:
        self._client, self._path, self._conditions = client, f"{PATH}/{node}/status", conditions
        self._loop = loop("writing the node's conditions", self._write, STATUS_COALESCE_SECONDS)
        self.notify = self._loop.notify
        self.run = self._loop.run

    def _write(self) -> float | None:
        """Returns after how many seconds to look again for the plan. Raises ApiError."""
        body = {"status": {"conditions": msgspec.to_builtins(self._conditions.current())}}
        return CREATE_INTERVAL_SECONDS if self._client.patch_existing(self._path, body) is None else None


def _urgent(uid: str, status: PlanStatus) -> tuple[object, ...]:
    """The fields that the controller or an operator acts on."""
    modes = (status.mode, status.offer_mode, status.dropped, status.left_out)
    failed = [[(claim.uid, claim.cause) for claim in claims] for claims in (status.unprepared, status.unreleased)]
    return uid, status.epoch, *modes, status.inventory, status.faults, status.conditions, status.config, *failed


class FenceRelease:
    """Releases the controller's fence around this node's devices when the node becomes standalone or complete.

    The node then also offers devices that a controller has fenced. They are in the slices again, so the scheduler
    counts them. Without a controller, nothing else releases the fence. Call ``notify`` when the mode has changed.
    """

    def __init__(self, client: KubeClient, namespace: str, pool: Pool, mode: ModeChoice, loop: MakeLoop = Loop) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/configmaps/{FENCE}"
        self._pool = pool
        self._mode = mode
        self._released: str | None = None
        self._loop = loop("releasing the fence around this node's devices", self._release, RELEASE_COALESCE_SECONDS)
        self.notify = self._loop.notify
        self.run = self._loop.run

    def _release(self) -> None:
        """Release the fence once in each epoch. Raises ApiError."""
        epoch = self._mode.unplanned_epoch()
        if epoch is None or epoch == self._released:
            return
        self._client.patch_existing(self._path, {"data": {self._pool.name: None}})
        self._released = epoch
