"""The node's requests to the API server about its plan: watch it, write its status, release the controller's fence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from driver.kube.client import KubeClient
from driver.kube.controller_heartbeat import HeartbeatWatch
from driver.kube.types import GpuNodePlan, PlanMetadata
from driver.kube.watch_cache import WatchCache
from driver.kube.work_loop import Loop, MakeLoop
from driver.model.plan import FENCE, PATH, PlanStatus

STATUS_COALESCE_SECONDS, RELEASE_COALESCE_SECONDS = 0.5, 0.05

STATUS_INTERVAL_SECONDS = 5.0
"""Minimum time between two writes of fields that only people read. The controller sees what is held and offered in
claims and slices."""

NO_CRD = (
    "CustomResourceDefinition gpunodeplans is not installed: this node runs standalone and ignores `tessera cordon`; "
    "see docs/install.md"
)


class PlanWatch:
    """The node's plan and the controller's heartbeat. ``on_change`` is called when the plan has changed or Tessera is
    being uninstalled; it must return quickly."""

    def __init__(self, client: KubeClient, namespace: str, node: str, on_change: Callable[[], None]) -> None:
        selector = {"fieldSelector": f"metadata.name={node}"}
        self._plans = WatchCache(client, PATH, GpuNodePlan, without_status, lambda _: on_change(), selector, NO_CRD)
        self._heartbeat = HeartbeatWatch(client, namespace, on_leaving=on_change)
        self.alive = self._heartbeat.alive
        self.loops: tuple[Callable[[threading.Event], None], ...] = (self._plans.run, self._heartbeat.run)

    @property
    def synced(self) -> bool:
        """Whether the first list has been received, so that ``plan`` is reliable."""
        return self._plans.synced

    def plan(self) -> GpuNodePlan | None:
        """The node's plan; None if there is none, or none has been received yet."""
        return next(iter(self._plans.snapshot().values()), None)

    def uninstalling(self) -> bool:
        """Whether Tessera is being uninstalled."""
        return self._heartbeat.leaving


def without_status(found: GpuNodePlan) -> GpuNodePlan:
    """The part of the plan that its node reads: a write of its own status must not count as a change."""
    metadata = found.metadata
    return GpuNodePlan(PlanMetadata(metadata.name, uid=metadata.uid, generation=metadata.generation), found.spec)


class PlanStatusWriter:
    """Writes ``status()`` when it differs from the last write. The controller creates the plan object."""

    def __init__(
        self,
        client: KubeClient,
        plan: Callable[[], GpuNodePlan | None],
        status: Callable[[], PlanStatus],
        clock: Callable[[], float] = time.monotonic,
        loop: MakeLoop = Loop,
    ) -> None:
        self._client = client
        self._plan = plan
        self._status = status
        self._clock = clock
        self._written: tuple[str, PlanStatus] | None = None
        self._written_at = 0.0
        self._loop = loop("writing the plan's status", self._write, STATUS_COALESCE_SECONDS)
        self.notify = self._loop.notify
        self.run = self._loop.run

    def _write(self) -> float | None:
        """Write a changed status, or return after how many seconds to call again. Raises ApiError."""
        plan = self._plan()
        if plan is None:
            return None
        wanted = (plan.metadata.uid, self._status())
        if self._written == wanted:
            return None
        left = self._written_at + STATUS_INTERVAL_SECONDS - self._clock()
        if left > 0 and self._written is not None and _urgent(*wanted) == _urgent(*self._written):
            return left
        # With the uid, so that a plan that was deleted and created again in between is never changed.
        body = {"metadata": {"uid": plan.metadata.uid}, "status": msgspec.to_builtins(wanted[1])}
        if self._client.patch_existing(f"{PATH}/{plan.metadata.name}/status", body) is None:
            # Deleted or replaced, which the watch reports, or a conflict of writers, which nothing reports.
            return STATUS_INTERVAL_SECONDS
        self._written, self._written_at = wanted, self._clock()
        return None


def _urgent(uid: str, status: PlanStatus) -> tuple[object, ...]:
    """The fields that the controller or an operator acts on."""
    modes = (status.mode, status.offer_mode, status.dropped, status.left_out)
    return uid, status.epoch, *modes, status.inventory, status.faults


class FenceRelease:
    """Releases the controller's fence around this node's devices when the node becomes standalone.

    A standalone node offers every device that fits, also devices that a controller has fenced. They are in the slices
    again, so the scheduler counts them, and no controller would release the fence.

    ``standalone_epoch`` is the epoch in which the node is standalone, None while it follows a plan; call ``notify``
    when it has changed.
    """

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        pool: str,
        standalone_epoch: Callable[[], str | None],
        loop: MakeLoop = Loop,
    ) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/configmaps/{FENCE}"
        self._pool = pool
        self._standalone_epoch = standalone_epoch
        self._released: str | None = None
        self._loop = loop("releasing the fence of an absent controller", self._release, RELEASE_COALESCE_SECONDS)
        self.notify = self._loop.notify
        self.run = self._loop.run

    def _release(self) -> None:
        """Release the fence once in each epoch. Raises ApiError."""
        epoch = self._standalone_epoch()
        if epoch is None or epoch == self._released:
            return
        self._client.patch_existing(self._path, {"data": {self._pool: None}})
        self._released = epoch
