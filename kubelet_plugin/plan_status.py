"""Telling the controller about this node: the status of its GpuNodePlan."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from driver.errors import CONFLICT, NOT_FOUND, ApiError
from driver.kube.loop import Loop, MakeLoop
from driver.kube.plans import GpuNodePlan
from driver.kube.transport import KubeClient
from driver.model.plan import PATH, PlanMode, PlanStatus

COALESCE_S = 0.5

LAZY_S = 5.0
"""Between two writes of what only people read: the controller sees what is held and offered in claims and slices."""


class PlanStatusWriter:
    """Writes ``status()`` where it differs from what was written last. The controller makes the plan object."""

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
        self._said: tuple[str, PlanStatus] | None = None
        self._said_at = 0.0
        self._loop = loop("writing the plan's status", self._write, COALESCE_S)
        self.notify = self._loop.notify
        self.run = self._loop.run

    def _write(self) -> float | None:
        """Write what is new, now or in as many seconds as returned. Raises ApiError."""
        plan = self._plan()
        if plan is None:
            return None
        wanted = self._status()
        if self._said == (plan.metadata.uid, wanted):
            return None
        left = self._said_at + LAZY_S - self._clock()
        if left > 0 and self._said is not None and _matters(plan.metadata.uid, wanted) == _matters(*self._said):
            return left
        # By uid, so that it is never about a plan that was deleted and made anew since we heard of it.
        body = {"metadata": {"uid": plan.metadata.uid}, "status": msgspec.to_builtins(wanted)}
        try:
            self._client.patch(f"{PATH}/{plan.metadata.name}/status", body)
        except ApiError as error:
            # Deleted, or deleted and made anew, since we heard of it: the watch brings the news and another call.
            if error.status not in (NOT_FOUND, CONFLICT):
                raise
            return None
        self._said, self._said_at = (plan.metadata.uid, wanted), self._clock()
        return None


def _matters(uid: str, status: PlanStatus) -> tuple[str, str, PlanMode, str, tuple[str, ...]]:
    """What the controller, or an operator, decides by."""
    return uid, status.epoch, status.mode, status.inventory, status.faults
