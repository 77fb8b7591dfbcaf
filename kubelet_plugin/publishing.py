"""Publishing the node to the cluster: its slices, its plan's status, its claims' status, its part of the fence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from driver.kube.client import KubeClient
from driver.kube.reads import owner_reference
from driver.kube.work_loop import Loop, MakeLoop
from driver.model.device import Device
from driver.model.plan import PlanSpec
from driver.slices.build import Content, PublishedGpu, SliceBuilder
from driver.slices.kept_fields import KeptFields
from driver.slices.publisher import Publisher
from driver.watchdog import Watched
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.claims.context import PluginContext
from kubelet_plugin.claims.steps import Step
from kubelet_plugin.health.monitor import HealthMonitor
from kubelet_plugin.inventory.layouts import standalone_offers
from kubelet_plugin.metrics.probes import NodeProbes
from kubelet_plugin.plan.api import FenceRelease, PlanStatusWriter, PlanWatch, PublishLabel
from kubelet_plugin.plan.follower import PlanFile, PlanFollower
from kubelet_plugin.reconcile.claim_activity import ClaimActivity
from kubelet_plugin.reconcile.uninstall import Uninstall
from kubelet_plugin.settings import NodeSettings
from kubelet_plugin.status.claim_status import StatusWriter, device_statuses

SLICES_DELAY_SECONDS, STATUS_DELAY_SECONDS = 0.5, 2.0
"""Longest time that slices and status wait for claims in progress: a pod may wait for slices."""

PREPARED_DELAY_SECONDS = 0.3
"""Delay of the slices after a prepare, while the containers of its pod start."""


class Publishing:
    """Writes nothing until ``writers`` and ``readers`` run, each in a thread of its own. Thread-safe.

    ``wait_ready`` returns when it is known which GPUs may be published.
    """

    def __init__(
        self,
        settings: NodeSettings,
        client: KubeClient,
        context: PluginContext,
        health: HealthMonitor,
        activity: ClaimActivity,
        slices_written: Callable[[int, float], None],
        node_probes: NodeProbes,
        wait_ready: Callable[[], None],
        fields: KeptFields,
    ) -> None:
        self._context, self._health, self._wait_ready = context, health, wait_ready
        self._builder = SliceBuilder(context.pool)

        def loop(delay_seconds: float, watched: Watched) -> MakeLoop:
            return node_probes.watchdog.loops(partial(Loop, give_way=activity.wait_idle(delay_seconds)), watched)

        self._publisher = Publisher(
            client,
            context.pool,
            self._desired,
            lambda: owner_reference(client, settings.node_name),
            lambda step, name: context.step(Step(step.value), slice=name),
            slices_written,
            loop=loop(SLICES_DELAY_SECONDS, node_probes.publishing),
            fields=fields,
            is_complete=lambda: not self._follower.is_waiting,
        )
        fields.on_due = self._publisher.notify
        node_probes.add_slices(self._publisher.published)
        self._plan = PlanWatch(client, settings.namespace, settings.node_name, self._plan_changed)
        self._label = PublishLabel(client, settings.node_name, settings.publish, self.notify)
        plan_file = PlanFile(settings.state_dir)
        self._follower = PlanFollower(
            self._plan.plan,
            self._plan.alive,
            context.inventory,
            plan_file.load(),
            plan_file.save,
            self._publisher.device_names,
            self.notify,
            lambda: self._plan_status.notify(),
            faults=health.describe_faults,
            dropped=lambda: fields.dropped,
            standalone_offers=partial(standalone_offers, layouts=settings.layout),
            complete=self._label.complete,
            has_controller=self._plan.has_controller,
            has_counters=lambda entry: self._publisher.has_counters(
                context.pool.device_slice(entry.number, divided=entry.divided)
            ),
        )
        status_loop = loop(STATUS_DELAY_SECONDS, node_probes.plan_status)
        self._plan_status = PlanStatusWriter(
            client, settings.node_name, self._plan.plan, self._follower.status, self._plan.lacks_plan, loop=status_loop
        )
        self._fence_release = FenceRelease(
            client, settings.namespace, context.pool.name, self._follower.unplanned_epoch
        )
        self._status = StatusWriter(
            client,
            settings.driver_name,
            lambda: device_statuses(context.checkpoint.records(), self._unhealthy),
            steps=context.step,
            give_way=activity.wait_idle(STATUS_DELAY_SECONDS),
        )
        self.uninstall = Uninstall(self._plan.uninstalling, context.checkpoint, context.cdi, settings.state_dir)
        self.writers = (self._publisher.run, self._status.run, self._plan_status.run, self._fence_release.run)
        self.readers = (self._publisher.cache.run, *self._plan.loops, self._label.run)
        self.follow = self._follower.run
        self.device_names = self._publisher.device_names
        """Names of the devices in the slices at the API server."""

        self.notify_slices = self._publisher.notify
        """The slices may have been changed or deleted."""

        self.notify_status = self._status.notify
        """The status of claims may have changed."""

    def notify(self) -> None:
        """The devices to publish may have changed."""
        self._publisher.notify()
        self._plan_status.notify()
        self._fence_release.notify()

    def claim_prepared(self) -> None:
        self._held_changed(within_s=max(self._follower.held_lag_seconds, PREPARED_DELAY_SECONDS))

    def claim_released(self) -> None:
        self._held_changed(within_s=self._follower.held_lag_seconds)

    def devices(self) -> list[Device]:
        """The devices to publish."""
        devices = (self._context.inventory.device(name) for name in sorted(self._follower.published_names))
        return [device for device in devices if device is not None]

    def _held_changed(self, within_s: float) -> None:
        self._publisher.notify_within(within_s)
        self._plan_status.notify()
        self._status.notify()

    def _plan_changed(self) -> None:
        if self._plan.synced:
            plan = self._plan.plan()
            self._health.apply_plan(PlanSpec() if plan is None else plan.spec)
        self.notify()

    def _desired(self) -> Mapping[str, Content]:
        if self.uninstall.due():
            return {}
        self._wait_ready()
        return self._builder.build(with_mig_uuids(self._follower.published(), self._context.checkpoint.records()))

    def _unhealthy(self, name: str) -> str | None:
        device = self._context.inventory.device(name)
        return None if device is None else self._health.unhealthy_reason(device)


def with_mig_uuids(gpus: Iterable[PublishedGpu], records: Iterable[ClaimRecord]) -> list[PublishedGpu]:
    """``gpus`` with the UUIDs of the partitions in ``records``."""
    uuids = {device.device: device.uuid for record in records for device in record.devices if device.uuid is not None}
    return [
        replace(entry, mig_uuids={held.name: uuids[held.name] for held in entry.held if held.name in uuids})
        for entry in gpus
    ]
