"""The node's requests to the API server about its plan: watch it, write its status, release the controller's fence.

And the watch of the label that selects complete publication.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from driver.errors import CONFLICT, FORBIDDEN, ApiError
from driver.kube.client import KubeClient
from driver.kube.controller_heartbeat import HeartbeatWatch
from driver.kube.reads import owner_reference
from driver.kube.types import GpuNodePlan, Node, PlanMetadata
from driver.kube.watch_cache import WatchCache
from driver.kube.work_loop import Loop, MakeLoop
from driver.model.plan import API_VERSION, COMPLETE, FENCE, KIND, PATH, PUBLISH, PUBLISH_VALUES, PlanStatus

NODES = "/api/v1/nodes"

STATUS_COALESCE_SECONDS, RELEASE_COALESCE_SECONDS = 0.5, 0.05

STATUS_INTERVAL_SECONDS = 5.0
"""Minimum time between two writes of fields that only people read. The controller sees what is held and offered in
claims and slices."""

CREATE_INTERVAL_SECONDS = 30.0
"""Time until a node that may not create its plan tries again."""

NO_CRD = (
    "CustomResourceDefinition gpunodeplans is not installed: this node runs standalone and ignores `tessera cordon`; "
    "see docs/install.md"
)


class PlanWatch:
    """The node's plan and the controller's heartbeat. ``on_change`` is called when the plan has changed, Tessera is
    being uninstalled, or it is known whether there is a controller; it must return quickly."""

    def __init__(self, client: KubeClient, namespace: str, node: str, on_change: Callable[[], None]) -> None:
        selector = {"fieldSelector": f"metadata.name={node}"}
        self._plans = WatchCache(client, PATH, GpuNodePlan, without_status, lambda _: on_change(), selector, NO_CRD)
        self._heartbeat = HeartbeatWatch(client, namespace, on_change=on_change)
        self.alive = self._heartbeat.alive
        self.loops: tuple[Callable[[threading.Event], None], ...] = (self._plans.run, self._heartbeat.run)

    @property
    def synced(self) -> bool:
        """Whether the first list has been received, so that ``plan`` is reliable."""
        return self._plans.synced

    def plan(self) -> GpuNodePlan | None:
        """The node's plan; None if there is none, or none has been received yet."""
        return next(iter(self._plans.snapshot().values()), None)

    def lacks_plan(self) -> bool:
        """Whether there is no plan, and no controller that would create it."""
        return self.synced and self.plan() is None and not self.has_controller()

    def has_controller(self) -> bool:
        """Whether there is or was a controller, or that is not known yet."""
        return self._heartbeat.exists is not False

    def uninstalling(self) -> bool:
        """Whether Tessera is being uninstalled."""
        return self._heartbeat.leaving


class PublishLabel:
    """The label PUBLISH of the node. ``on_change`` is called when it has changed; it must return quickly.

    ``default`` is one of PUBLISH_VALUES, and applies if the Node has no such label, or one that is not valid.
    """

    def __init__(self, client: KubeClient, node: str, default: str, on_change: Callable[[], None]) -> None:
        self._default = default
        selector = {"fieldSelector": f"metadata.name={node}"}
        self._nodes = WatchCache(client, NODES, Node, _label, lambda _: on_change(), selector)
        self.run = self._nodes.run

    def complete(self) -> bool | None:
        """Whether the node publishes every device; None: the Node has not been received yet."""
        if not self._nodes.synced:
            return None
        label = next(iter(self._nodes.snapshot().values()), None)
        return (label if label in PUBLISH_VALUES else self._default) == COMPLETE


def _label(node: Node) -> str:
    return node.metadata.labels.get(PUBLISH, "")


def without_status(found: GpuNodePlan) -> GpuNodePlan:
    """The part of the plan that its node reads: a write of its own status must not count as a change."""
    metadata = found.metadata
    return GpuNodePlan(PlanMetadata(metadata.name, uid=metadata.uid, generation=metadata.generation), found.spec)


class PlanStatusWriter:
    """Writes ``status()`` when it differs from the last write.

    The controller creates the plan object. If there is none (``lacks_plan``), the node creates it without a spec, so
    that commands know its GPUs.
    """

    def __init__(
        self,
        client: KubeClient,
        node: str,
        plan: Callable[[], GpuNodePlan | None],
        status: Callable[[], PlanStatus],
        lacks_plan: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        loop: MakeLoop = Loop,
    ) -> None:
        self._client, self._node = client, node
        self._plan = plan
        self._status = status
        self._lacks_plan = lacks_plan
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
            return self._create() if self._lacks_plan() else None
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

    def _create(self) -> float:
        """Create a plan without a spec. Returns after how many seconds to look again. Raises ApiError."""
        metadata = {"name": self._node, "ownerReferences": [owner_reference(self._client, self._node)]}
        try:
            self._client.create(PATH, {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata})
        except ApiError as error:
            if error.status not in {CONFLICT, FORBIDDEN}:  # a controller was faster; the role is of an older chart
                raise
        return CREATE_INTERVAL_SECONDS


def _urgent(uid: str, status: PlanStatus) -> tuple[object, ...]:
    """The fields that the controller or an operator acts on."""
    modes = (status.mode, status.offer_mode, status.dropped, status.left_out)
    return uid, status.epoch, *modes, status.inventory, status.faults


class FenceRelease:
    """Releases the controller's fence around this node's devices when the node becomes standalone or complete.

    It then offers devices that a controller has fenced, too. They are in the slices again, so the scheduler counts
    them, and no controller would release the fence.

    ``unplanned_epoch`` is the epoch in which the node follows no plan, None while it does; call ``notify`` when it has
    changed.
    """

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        pool: str,
        unplanned_epoch: Callable[[], str | None],
        loop: MakeLoop = Loop,
    ) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/configmaps/{FENCE}"
        self._pool = pool
        self._unplanned_epoch = unplanned_epoch
        self._released: str | None = None
        self._loop = loop("releasing the fence of an absent controller", self._release, RELEASE_COALESCE_SECONDS)
        self.notify = self._loop.notify
        self.run = self._loop.run

    def _release(self) -> None:
        """Release the fence once in each epoch. Raises ApiError."""
        epoch = self._unplanned_epoch()
        if epoch is None or epoch == self._released:
            return
        self._client.patch_existing(self._path, {"data": {self._pool: None}})
        self._released = epoch
