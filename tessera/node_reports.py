"""What tells the cluster of a node: its slices, its plan's status, its claims' status, its part of the fence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from driver.config.settings import NodeSettings
from driver.kube.loop import Loop, MakeLoop
from driver.kube.nodes import owner_reference
from driver.kube.transport import KubeClient
from driver.model.device import Device
from driver.model.plan import PlanSpec
from driver.slices.build import Content, SliceBuilder
from driver.slices.publisher import Publisher, SliceStep
from driver.watchdog import Watched
from kubelet_plugin.claim_status import Statuses, device_statuses, prepared_devices
from kubelet_plugin.health import Health
from kubelet_plugin.lull import Lull
from kubelet_plugin.meter import Meter
from kubelet_plugin.node import Node
from kubelet_plugin.plan import PlanFollower
from kubelet_plugin.plan_fence import OwnFence
from kubelet_plugin.plan_memory import MemoryFile
from kubelet_plugin.plan_status import PlanStatusWriter
from kubelet_plugin.plan_word import ControllersWord
from kubelet_plugin.retirement import Retirement
from kubelet_plugin.status_writer import StatusWriter
from kubelet_plugin.steps import Step, Steps
from tessera.node_health import NodeHealth

SLICES_WAIT_S, STATUS_WAITS_S = 0.5, 2.0
"""How long slices and status give way to claims in work: a pod may wait for slices."""

STARTING_S = 0.3
"""How long the slices may say nothing of what was prepared, while its pod's containers start: nobody gains by it."""


@dataclass(frozen=True, slots=True)
class Means:
    """What the parts of a node plugin work with."""

    settings: NodeSettings
    client: KubeClient
    step: Steps
    lull: Lull
    meter: Meter
    soundness: NodeHealth


class Reports:
    """Says nothing before ``writing`` and ``hearing`` run, each in a thread of its own. Thread-safe.

    ``ready`` returns when it is known what may be published.
    """

    def __init__(self, means: Means, node: Node, health: Health, ready: Callable[[], None]) -> None:
        self._means, self._node, self._health, self._ready = means, node, health, ready
        settings, client = means.settings, means.client
        self._builder = SliceBuilder(node.pool)
        self._publisher = self._slices()
        self._word = ControllersWord(client, settings.namespace, settings.node_name, self._plan_heard)
        self._follower = PlanFollower(
            self._word,
            node.inventory,
            MemoryFile(settings.state_dir),
            self._publisher.device_names,
            self.told,
            faults=health.described,
        )
        loop = self._loop(STATUS_WAITS_S, means.soundness.telling_plan)
        self._plan_status = PlanStatusWriter(client, self._word.plan, self._follower.status, loop=loop)
        self._own_fence = OwnFence(client, settings.namespace, node.pool.name, self._follower.alone)
        wait = means.lull.within(STATUS_WAITS_S)
        self._status = StatusWriter(client, settings.driver_name, self._statuses, steps=means.step, give_way=wait)
        self.retirement = Retirement(self._word.leaving, node.checkpoint, node.cdi, settings.state_dir)
        self.writing = (self._publisher.run, self._status.run, self._plan_status.run, self._own_fence.run)
        self.hearing = (self._publisher.cache.run, *self._word.loops)
        self.following = self._follower.run

    def _slices(self) -> Publisher:
        means = self._means
        publisher = Publisher(
            means.client,
            self._node.pool,
            self._desired,
            self._owner,
            self._publishing,
            means.meter.written,
            loop=self._loop(SLICES_WAIT_S, means.soundness.publishing),
        )
        means.soundness.slices(publisher.published)
        return publisher

    def _loop(self, waits_s: float, watched: Watched) -> MakeLoop:
        return self._means.soundness.watchdog.loops(partial(Loop, give_way=self._means.lull.within(waits_s)), watched)

    # What happened

    def told(self) -> None:
        """What is to be published may have changed."""
        self._publisher.notify()
        self._plan_status.notify()
        self._own_fence.notify()

    def held(self) -> None:
        """A claim was prepared."""
        self._held_changed(within_s=max(self._follower.held_lag_s, STARTING_S))

    def let_go(self) -> None:
        """A claim has ended."""
        self._held_changed(within_s=self._follower.held_lag_s)

    def _held_changed(self, within_s: float) -> None:
        self._publisher.notify_within(within_s)
        self._plan_status.notify()
        self._status.notify()

    def claims_told(self) -> None:
        """What claims' status says may have changed."""
        self._status.notify()

    def slices_doubtful(self) -> None:
        """Somebody may have changed or deleted the slices."""
        self._publisher.notify()

    def _plan_heard(self) -> None:
        if self._word.heard:
            plan = self._word.plan()
            self._health.obey(PlanSpec() if plan is None else plan.spec)
        self.told()

    # What is the case

    def device_names(self) -> set[str]:
        """What the slices at the API server say."""
        return self._publisher.device_names()

    def devices(self) -> list[Device]:
        """What is to be published."""
        devices = (self._node.inventory.device(name) for name in sorted(self._follower.published_names))
        return [device for device in devices if device is not None]

    def _statuses(self) -> Statuses:
        return device_statuses(prepared_devices(self._node.checkpoint.records()), self._trouble)

    def _trouble(self, name: str) -> str | None:
        device = self._node.inventory.device(name)
        return None if device is None else self._health.trouble(device)

    def _publishing(self, step: SliceStep, name: str) -> AbstractContextManager[None]:
        return self._means.step(Step(step.value), slice=name)

    def _desired(self) -> Mapping[str, Content]:
        if self.retirement.due():
            return {}
        self._ready()
        return self._builder.build(self._follower.published())

    def _owner(self) -> Mapping[str, Any]:
        return owner_reference(self._means.client, self._means.settings.node_name)
