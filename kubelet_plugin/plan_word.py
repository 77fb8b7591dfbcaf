"""What this node hears from the controller: its plan and the heartbeat."""

from __future__ import annotations

import threading
from collections.abc import Callable

from driver.kube.heartbeat import HeartbeatWatch
from driver.kube.plans import GpuNodePlan, PlanMetadata
from driver.kube.transport import KubeClient
from driver.kube.watch_cache import WatchCache
from driver.model.plan import PATH

NO_KIND = (
    "the cluster knows no GpuNodePlan: this node hears of no plan and no cordon; is the chart's CRD installed? "
    "(docs/install.md)"
)


class ControllersWord:
    """``on_change`` is called when the plan has changed, or ``leaving``; it must return quickly."""

    def __init__(self, client: KubeClient, namespace: str, node: str, on_change: Callable[[], None]) -> None:
        selector = {"fieldSelector": f"metadata.name={node}"}
        self._plans = WatchCache(client, PATH, GpuNodePlan, plan_as_told, lambda _: on_change(), selector, NO_KIND)
        self._heartbeat = HeartbeatWatch(client, namespace, on_leaving=on_change)
        self.loops: tuple[Callable[[threading.Event], None], ...] = (self._plans.run, self._heartbeat.run)

    @property
    def heard(self) -> bool:
        """Whether it is known if there is a plan."""
        return self._plans.synced

    def plan(self) -> GpuNodePlan | None:
        """The node's plan; None where there is none, or none has been heard of yet."""
        return next(iter(self._plans.snapshot().values()), None)

    def leaving(self) -> bool:
        """Whether Tessera is being uninstalled."""
        return self._heartbeat.leaving

    def alive(self) -> bool:
        """Whether the controller has shown a sign of life of late."""
        return self._heartbeat.alive()


def plan_as_told(found: GpuNodePlan) -> GpuNodePlan:
    """Of the plan what its node reads: its own status, and each new version that it makes, are no news to it."""
    metadata = found.metadata
    return GpuNodePlan(PlanMetadata(metadata.name, uid=metadata.uid, generation=metadata.generation), found.spec)
