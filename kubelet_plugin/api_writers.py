"""Publishing the node to the cluster: its slices, its plan's status, its claims' status, its part of the fence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from driver.kube.client import ApiReach, KubeClient, load_configuration
from driver.kube.events import Recorder
from driver.kube.get_and_list import owner_reference
from driver.model.device import Device
from driver.model.gpu import Gpu
from driver.model.plan import PlanMode, PlanSpec
from driver.slices.build import Content, PublishedGpu, SliceBuilder
from driver.slices.dropped_fields import KeptFields
from driver.slices.publisher import PresentSlices, Publisher, SliceStep, SliceWriteObserver
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.coexistence.other_drivers import OtherDriverWatch
from kubelet_plugin.dra.registration_state import Registration
from kubelet_plugin.health.device_health import HealthMonitor
from kubelet_plugin.metrics.metrics_interface import Measurements
from kubelet_plugin.plan.follower import PlanFollower
from kubelet_plugin.plan.instructions import WatchedInstructions
from kubelet_plugin.plan.node_config import ConfigFollower
from kubelet_plugin.plan.plan_file import PlanFile
from kubelet_plugin.plan.plan_status import FenceRelease, PlanReport, PlanStatusWriter
from kubelet_plugin.reconcile.background_work import BackgroundWork
from kubelet_plugin.reconcile.uninstall import Uninstall
from kubelet_plugin.settings import NodeSettings
from kubelet_plugin.status.claim_status import StatusWriter, device_statuses
from kubelet_plugin.status.events import PluginEvents
from kubelet_plugin.step_names import NodeStep, StepRunner
from kubelet_plugin.usage.sampler import IdleClaims

NODE_USER_AGENT = "tessera-node"

SLICES_DELAY_SECONDS, STATUS_DELAY_SECONDS = 0.5, 2.0
"""Longest time that slices and status wait for claims in progress: a pod may wait for slices."""

PREPARED_DELAY_SECONDS = 0.3
"""Delay of the slices after a prepare, while the containers of its pod start."""


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """The API server: its client, what is known of the fields that it keeps, and the Events that are written to it."""

    client: KubeClient
    fields: KeptFields
    events: PluginEvents


def api_access(
    settings: NodeSettings, changes: ChangeNotifier, reach: ApiReach, measurements: Measurements
) -> tuple[ApiAccess, Recorder]:
    """The access, and what writes its Events. Raises EnvironmentFault."""
    fields = KeptFields(partial(changes.report, NodeChange.KEPT_FIELDS))
    observe = fields.observer(reach.observer(measurements.observe_request))
    client = KubeClient(load_configuration(settings.kubeconfig, in_own_process=True), NODE_USER_AGENT, observe)
    recorder = Recorder(client, NODE_USER_AGENT, settings.node_name)
    return ApiAccess(
        client, fields, PluginEvents(recorder.event, settings.node_name, measurements.count_event)
    ), recorder


class Publishing:
    """Writes nothing until ``writers`` and ``readers`` run, each in a thread of its own. Thread-safe."""

    def __init__(
        self,
        settings: NodeSettings,
        api: ApiAccess,
        stores: ClaimStores,
        health: HealthMonitor,
        other_drivers: OtherDriverWatch,
        background: BackgroundWork,
        changes: ChangeNotifier,
    ) -> None:
        client, fields, node = api.client, api.fields, settings.node_name
        pool, inventory, probes = stores.pool, stores.inventory, background.probes
        self._inventory, self._health, self._watched = inventory, health, probes.publishing
        self._instructions = WatchedInstructions(
            client, settings.namespace, node, lambda: self._config.publish(), changes
        )
        self._config = ConfigFollower(self._instructions, settings, inventory, changes)
        self.check_stored_config = self._config.check_stored
        self._follower = PlanFollower(
            self._instructions, inventory, fields, PlanFile(settings.state_dir), changes, settings.layout
        )
        self.uninstall = Uninstall(self._instructions, stores.checkpoint, stores.cdi, settings.state_dir)
        self.registration = Registration(self._instructions.has_kubelet, health.node_conditions)
        source = NodeSlices(
            client, stores, self._follower, self.uninstall, other_drivers, self.registration, SliceBuilder(pool)
        )
        self._publisher = Publisher(
            client,
            pool,
            source,
            fields,
            SliceObserver(background.steps, background.measurements),
            loop=background.loop(SLICES_DELAY_SECONDS, probes.publishing),
        )
        loop = background.loop(STATUS_DELAY_SECONDS, probes.plan_status)
        self.idle = IdleClaims(client.clock, lambda: self._plan_status.notify())
        report = PlanReport(self._follower, health, self._config, self.idle)
        self._plan_status = PlanStatusWriter(client, node, report, loop=loop)
        self._fence_release = FenceRelease(client, settings.namespace, pool, self._follower.mode_choice)
        self._claim_status = StatusWriter(
            client,
            pool.driver,
            lambda: device_statuses(stores.checkpoint.records(), self._unhealthy_reason),
            steps=background.steps,
            give_way=background.activity.wait_idle(STATUS_DELAY_SECONDS),
            events=api.events,
        )
        self.device_names, self.notify_slices = self._publisher.device_names, self._publisher.notify
        self.notify_claim_status, self.notify_plan_status = self._claim_status.notify, self._plan_status.notify

    @property
    def writers(self) -> tuple[Callable[[threading.Event], None], ...]:
        """Loops that write, and those that decide what."""
        parts = (
            self._publisher,
            self._claim_status,
            self._plan_status,
            self._fence_release,
            self._follower,
            self._config,
        )
        return tuple(part.run for part in parts)

    @property
    def readers(self) -> tuple[Callable[[threading.Event], None], ...]:
        """Loops that receive what the cluster tells the node."""
        return (self._publisher.cache.run, *self._instructions.loops)

    def devices(self) -> list[Device]:
        devices = (self._inventory.device(name) for name in sorted(self._follower.publication.names))
        return [device for device in devices if device is not None]

    def claimed_devices(self, gpu: Gpu) -> frozenset[str]:
        """The devices of ``gpu`` that claims hold. Without a controller, a node does not know claims that are allocated
        and not prepared yet."""
        plan, names = self._instructions.plan(), {device.name for device in self._inventory.devices_on(gpu)}
        allocated = plan.spec.held_devices if plan is not None else frozenset[str]()
        return frozenset(device.name for device in self._inventory.held_on(gpu)) | (allocated & names)

    def offers_to_withdraw(self, gpu: Gpu) -> frozenset[str]:
        """The devices of ``gpu``, which is cordoned, that are in the slices until the controller has withdrawn them.

        Where the API server keeps no taints, they leave the slices at once.
        """
        names = {device.name for device in self._inventory.devices_on(gpu)}
        is_planned = self._follower.mode_choice.mode is PlanMode.PLANNED
        present = self._publisher.device_names() if is_planned else set[str]()
        return self._follower.publication.offered & names & present

    def not_ready(self) -> str | None:
        """Why the slices are not as they must be, or None."""
        waiting = None if self._publisher.published.is_set() else "they have not been published yet"
        return self._watched.failure or waiting

    def notify(self) -> None:
        """The devices to publish may have changed."""
        self._publisher.notify()
        self._plan_status.notify()
        self._fence_release.notify()

    def label_changed(self) -> None:
        self._config.notify()
        self.notify()

    def plan_changed(self) -> None:
        self._config.notify()
        if self._instructions.synced:
            plan = self._instructions.plan()
            self._health.apply_plan(PlanSpec() if plan is None else plan.spec)
        self.notify()

    def claim_prepared(self) -> None:
        self._held_changed(within_s=max(self._follower.mode_choice.held_lag_seconds, PREPARED_DELAY_SECONDS))

    def claim_released(self) -> None:
        self._config.notify()
        self._held_changed(within_s=self._follower.mode_choice.held_lag_seconds)

    def _held_changed(self, within_s: float) -> None:
        self._publisher.notify_within(within_s)
        self._plan_status.notify()
        self._claim_status.notify()

    def _unhealthy_reason(self, name: str) -> str | None:
        device = self._inventory.device(name)
        return None if device is None else self._health.reason_for_holders(device)


@dataclass(frozen=True, slots=True)
class NodeSlices:
    """What the slices of the node contain (``SliceSource``)."""

    client: KubeClient
    stores: ClaimStores
    follower: PlanFollower
    uninstall: Uninstall
    other_drivers: OtherDriverWatch
    registration: Registration
    builder: SliceBuilder

    def desired(self, slices: PresentSlices) -> Mapping[str, Content]:
        if self.uninstall.due():
            return {}
        self.other_drivers.wait_until_known()
        return self.builder.build(with_mig_uuids(self.follower.published(slices), self.stores.checkpoint.records()))

    def monitors(self) -> Mapping[str, Content] | None:
        monitors = [] if self.uninstall.due() else self.follower.monitors()
        return None if monitors is None else self.builder.monitors(monitors)

    def is_complete(self) -> bool:
        return not self.follower.mode_choice.is_waiting

    def creation_delay(self, absent_since: float | None) -> float:
        return self.registration.creation_delay(absent_since)

    def owner(self) -> Mapping[str, Any]:
        return owner_reference(self.client, self.stores.pool.node)


@dataclass(frozen=True)
class SliceObserver(SliceWriteObserver):
    """Makes every write of a slice a step, and counts the writes."""

    steps: StepRunner
    measurements: Measurements

    def step(self, step: SliceStep, slice_name: str) -> AbstractContextManager[object]:
        return self.steps(NodeStep(step.value), slice=slice_name)

    def written(self, count: int, seconds: float) -> None:
        self.measurements.slices_written(count, seconds)


def with_mig_uuids(gpus: Iterable[PublishedGpu], records: Iterable[ClaimRecord]) -> list[PublishedGpu]:
    """``gpus`` with the UUIDs of the partitions in ``records``; a shared one has several."""
    devices = (device for record in records for device in record.devices if not device.share_id)
    uuids = {device.device: device.uuid for device in devices if device.uuid is not None}
    return [
        replace(gpu, mig_uuids={held.name: uuids[held.name] for held in gpu.held if held.name in uuids}) for gpu in gpus
    ]
