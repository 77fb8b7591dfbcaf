"""Policies in the mode DryRun: who would be evicted for the pods that wait, said on the policies and counted.

Nobody is evicted. Without a policy that enables preemption, one list of the policies is all that is read. Otherwise a
turn reads all pods and claims, so pauses grow with the time that a turn takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from controller.demand.feasibility import Feasibility
from controller.demand.pending_claims import Queue
from controller.eviction.evictor import Evictor, Outcome, Trigger
from controller.eviction.gpu_policy import GpuPolicies, GpuPolicy, parse_policy, read_policies
from controller.eviction.preemption import RunningPods
from controller.eviction.preemption_preview import Preview, preview_of, read_running
from controller.eviction.recent_evictions import RecentEvictions
from driver.errors import NOT_FOUND, ApiError, UsageError
from driver.kube.client import KubeClient
from driver.kube.events import Recorder
from driver.kube.types import Key, Pod, Reference
from driver.kube.work_loop import Loop
from driver.model.plan import API_VERSION

if TYPE_CHECKING:
    from controller.metrics import ControllerMetrics

INTERVAL_SECONDS, REST_FACTOR = 15.0, 20.0
"""Between two turns, or this multiple of what a turn took if that is longer."""

PODS_PER_TURN = 5
"""Waiting pods whose victims are looked for in a turn, those of the highest priority first."""

SHOWN_PODS = 5

WOULD_EVICT, INVALID = "WouldEvict", "InvalidPolicy"
"""Reasons of Events."""


class PreemptionDryRuns:
    """``queue`` returns the pending claims of the last decision, for another thread; None: none has been made yet."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        queue: Callable[[], Queue | None],
        recorder: Recorder,
        metrics: ControllerMetrics | None,
    ) -> None:
        self._client, self._queue, self._recorder, self._metrics = client, queue, recorder, metrics
        self._evictor = Evictor(client, None, RecentEvictions(client, namespace), metrics)
        self._counted: dict[str, frozenset[str]] = {}
        """By UID of a waiting pod, the victims that were counted last."""
        self.loop = Loop("looking for pods to evict", self.turn, 0.0)

    def turn(self) -> float:
        """Look once. Returns after how many seconds to look again. Raises ApiError."""
        began = time.monotonic()
        policies, queue = self._read_policies(), self._queue()
        if policies and queue is not None:
            self._look(policies, queue)
        return max(INTERVAL_SECONDS, REST_FACTOR * (time.monotonic() - began))

    def _read_policies(self) -> list[GpuPolicy]:
        """The policies of the cluster; none if one of them is not valid: it might forbid what another allows."""
        policies, is_valid = [], True
        try:
            manifests = list(read_policies(self._client))
        except ApiError as error:
            if error.status == NOT_FOUND:  # the CustomResourceDefinition is not installed
                return []
            raise
        for manifest in manifests:
            try:
                policies.append(parse_policy(manifest, "no policy counts: this one"))
            except UsageError as error:
                is_valid = False
                metadata = manifest["metadata"]
                about = _reference(metadata["name"], metadata["uid"])
                self._recorder.event(about, INVALID, str(error), "Warning", lasting=True)
        return policies if is_valid else []

    def _look(self, policies: Sequence[GpuPolicy], queue: Queue) -> None:
        enabled = [policy.spec.preemption for policy in policies if policy.spec.preemption.enabled]
        namespaces = {name for rules in enabled for name in rules.by_namespaces}
        waiting = [pod for pod in queue.pods if pod.metadata.namespace in namespaces and _lacks_devices(pod)]
        if not waiting:
            self._counted = {}
            return
        waiting.sort(key=lambda pod: (-pod.spec.priority, pod.metadata.creation_timestamp or "", pod.metadata.key))
        present = queue.feasibility
        hypothetical = queue.with_feasibility(Feasibility(present.fleet, present.matching, is_hypothetical=True))
        self._evictor.recent.refresh()
        running, chosen = read_running(self._client), GpuPolicies(policies)
        self._counted = {uid: self._counted[uid] for pod in waiting if (uid := pod.metadata.uid) in self._counted}
        for pod in waiting[:PODS_PER_TURN]:
            preview = preview_of(self._client, hypothetical, pod, running, chosen, self._evictor)
            if preview.preemption is not None and not preview.unexamined:
                self._tell(preview, running, chosen)

    def _tell(self, preview: Preview, running: RunningPods, policies: GpuPolicies) -> None:
        """Say on the policies of the victims that these would be evicted."""
        pod, preemption = preview.pod, preview.preemption
        assert preemption is not None  # noqa: S101 - for mypy
        names = frozenset(name for unit in preemption.victims.units for name in unit.pods)
        victims = (running.pods[Key(*name.split("/"))] for name in names)
        decided_by = (policies.of_pod(victim.metadata.namespace, running.classes(victim)) for victim in victims)
        references = {
            _reference(policy.metadata.name, policy.metadata.uid) for policy in decided_by if policy is not None
        }
        cost = preemption.victims.cost
        more = f" and {len(names) - SHOWN_PODS} more" if len(names) > SHOWN_PODS else ""
        shown = ", ".join(sorted(names)[:SHOWN_PODS])
        message = (
            f"for pod {pod.metadata.key} of priority {pod.spec.priority} these would be evicted "
            f"on node {preemption.node}: {shown}{more}, of priority {cost.priority} at most; "
            f"{cost.gpu_hours:g} GPU hours would be lost (mode DryRun)"
        )
        for reference in references:
            self._recorder.event(reference, WOULD_EVICT, message, series=pod.metadata.uid, lasting=True)
        if self._counted.get(pod.metadata.uid) != names:
            self._counted[pod.metadata.uid] = names
            for _ in names:
                self._evictor.count(Trigger.PREEMPTION, Outcome.DRY_RUN)


def _reference(name: str, uid: str) -> Reference:
    return Reference("GpuPolicy", name, uid=uid, api_version=API_VERSION)


def _lacks_devices(pod: Pod) -> bool:
    """Whether the scheduler has refused the pod for want of devices."""
    return any(condition.lacks_devices for condition in pod.status.conditions)
