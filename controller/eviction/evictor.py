"""The one way in which pods are evicted, whatever the trigger: what protects a pod, and the request.

Rules that hold for each trigger are here; a trigger says which pods can not go on and why. Pods, claims and owners are
read again directly before an eviction, which has the pod's UID as its precondition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import msgspec

from controller.demand.node_eligibility import selects_labels
from controller.eviction.recent_evictions import FAILED_TO_START, MOVED, EvictionCause, RecentEvictions
from driver.config.flag_values import SUBDOMAIN
from driver.errors import CONFLICT, NOT_FOUND, SERVER_ERROR, ApiError
from driver.kube.client import KubeClient
from driver.kube.events import Recorder
from driver.kube.get_and_list import find_pod, read_all, read_object
from driver.kube.types import Claim, Key, LabelSelector, Metadata, OwnerReference, Pod, Reference

if TYPE_CHECKING:
    from controller.metrics import ControllerMetrics

MOST_OF_OWNER = 2
"""Most pods of one owner that are evicted within an hour; more evictions would only repeat what did not help. Pods that
can only go together count as one."""

PASS_SECONDS = 1.0
"""Time after which a pass of a trigger leaves what is due to the next one: decisions wait meanwhile."""


class Trigger(StrEnum):
    """Why pods are evicted; also values of a metric label."""

    OVERLAP = "overlap"
    FAILED_START = FAILED_TO_START
    PREEMPTION = "preemption"
    RECLAIM = "reclaim"
    REPACK = MOVED


class Outcome(StrEnum):
    """What became of a pod that should be evicted; also values of a metric label."""

    EVICTED = "evicted"
    PROTECTED = "protected"
    REFUSED = "refused"
    DRY_RUN = "dry-run"


class ProtectionRule(StrEnum):
    """What protects a pod from eviction. A disruption budget may admit the eviction soon; the others last."""

    ADMIN_ACCESS = "AdminAccess"
    NO_CONTROLLER = "NoController"
    BOUND_TO_NODE = "BoundToNode"
    OWNER_LIMIT = "OwnerLimit"
    JOB_RETRIES = "JobRetries"
    DISRUPTION_BUDGET = "DisruptionBudget"


class Protection(NamedTuple):
    """The rule that protects a pod, and the reason for people."""

    rule: ProtectionRule
    reason: str


ADMIN_ACCESS = Protection(ProtectionRule.ADMIN_ACCESS, "it has adminAccess")
"""Why the pods of such a claim are not evicted."""


class FailurePattern(msgspec.Struct, frozen=True):
    type: str = ""
    status: str = "True"


ENDED_BY_SIGNAL = (143, 137)
"""Exit codes of programs that SIGTERM ends, or SIGKILL after the grace period."""


class ExitCodes(msgspec.Struct, frozen=True):
    operator: str = ""
    values: tuple[int, ...] | None = None


class FailureRule(msgspec.Struct, frozen=True, rename="camel"):
    """None: an empty list, as the API server may write it."""

    action: str = ""
    on_pod_conditions: tuple[FailurePattern, ...] | None = None
    on_exit_codes: ExitCodes | None = None

    def concerns(self, code: int) -> bool:
        """Whether it is for this exit code."""
        codes = self.on_exit_codes
        return codes is not None and (code in (codes.values or ())) == (codes.operator == "In")


class FailurePolicy(msgspec.Struct, frozen=True):
    rules: tuple[FailureRule, ...] | None = None


class JobSpec(msgspec.Struct, frozen=True, rename="camel"):
    parallelism: int | None = 1
    completions: int | None = None
    completion_mode: str = "NonIndexed"
    backoff_limit: int = 6
    backoff_limit_per_index: int | None = None
    pod_failure_policy: FailurePolicy = FailurePolicy()


class JobStatus(msgspec.Struct, frozen=True):
    succeeded: int = 0
    failed: int = 0
    terminating: int = 0


class Job(msgspec.Struct, frozen=True):
    """``batch/v1`` Job."""

    metadata: Metadata
    spec: JobSpec
    status: JobStatus = JobStatus()

    @property
    def is_gang(self) -> bool:
        """Whether all of its pods run at once, each with an index: they then work together."""
        spec = self.spec
        return spec.completion_mode == "Indexed" and spec.parallelism == spec.completions and spec.completions != 1

    @property
    def unfinished(self) -> int:
        """How many of a gang's pods have not succeeded."""
        return (self.spec.completions or 0) - self.status.succeeded

    @property
    def ignores_evictions(self) -> bool | None:
        """Whether its policy does not count evictions; None: no rule is about them.

        A rule for the exit codes of programs that a signal ends may come first, and fail the Job.
        """
        eviction = FailurePattern("DisruptionTarget")
        for rule in self.spec.pod_failure_policy.rules or ():
            if eviction in (rule.on_pod_conditions or ()):
                return rule.action == "Ignore"
            if rule.action.startswith("Fail") and any(map(rule.concerns, ENDED_BY_SIGNAL)):
                return False
        return None

    def goes_on(self, evictions: int) -> bool:
        """Whether the Job goes on after so many evictions: its policy ignores them, or retries are left."""
        if self.ignores_evictions is not None:
            return self.ignores_evictions
        failures = self.status.failed + self.status.terminating + evictions
        return self.spec.backoff_limit_per_index is None and failures <= self.spec.backoff_limit


class BudgetSpec(msgspec.Struct, frozen=True, rename="camel"):
    selector: LabelSelector | None = None
    unhealthy_pod_eviction_policy: str = "IfHealthyBudget"


class BudgetStatus(msgspec.Struct, frozen=True, rename="camel"):
    observed_generation: int = 0
    current_healthy: int = 0
    desired_healthy: int = 0
    disruptions_allowed: int = 1 << 31


class BudgetMetadata(msgspec.Struct, frozen=True):
    name: str
    generation: int = 0


class DisruptionBudget(msgspec.Struct, frozen=True):
    """``policy/v1`` PodDisruptionBudget. The API server does not apply it to Pending pods, so that we do."""

    metadata: BudgetMetadata
    spec: BudgetSpec = BudgetSpec()
    status: BudgetStatus = BudgetStatus()

    def selects(self, pod: Pod) -> bool:
        return self.spec.selector is not None and selects_labels(self.spec.selector, pod.metadata.labels)

    def protects(self, pods: Iterable[Pod]) -> bool:
        """Whether it forbids to evict all of ``pods`` (KEP-3017): it must have a healthy pod to spare for each that is
        Ready."""
        selected = [pod for pod in pods if self.selects(pod)]
        ready = sum(map(_is_ready, selected))
        if ready == 0 and self.spec.unhealthy_pod_eviction_policy == "AlwaysAllow":
            return False
        is_counted = self.status.observed_generation >= self.metadata.generation
        spare = self.status.current_healthy - self.status.desired_healthy
        spare = min(spare, self.status.disruptions_allowed)  # less, if the last ones were not counted yet
        return bool(selected) and (not is_counted or spare < ready)


def _is_ready(pod: Pod) -> bool:
    return any(condition.type == "Ready" and condition.status == "True" for condition in pod.status.conditions)


JOB = msgspec.json.Decoder(Job)


class Evictor:
    """For one thread. Without ``recorder`` there are no Events about its evictions."""

    def __init__(
        self,
        client: KubeClient,
        recorder: Recorder | None,
        recent: RecentEvictions,
        metrics: ControllerMetrics | None = None,
    ) -> None:
        self.client, self._recorder, self._metrics = client, recorder, metrics
        self.recent = recent

    def consumers(self, claim: Claim) -> list[Pod]:
        """The pods that use ``claim``, as they are now; those that are gone are left out. Raises ApiError.

        ``recent`` is read anew, too.
        """
        self.recent.refresh()
        pods = []
        for consumer in claim.pod_consumers:
            # A name that no pod can have is left out: it could lead elsewhere.
            if SUBDOMAIN.fullmatch(consumer.name):
                pod = find_pod(self.client, Key(claim.metadata.namespace, consumer.name))
                # A later pod of the same name has nothing to do with it.
                if pod is not None and pod.metadata.uid == consumer.uid and claim.metadata.key in pod.claims:
                    pods.append(pod)
        return pods

    def protection(
        self, pods: Sequence[Pod], read: dict[str, Any] | None = None, unit_of: Mapping[str, str] | None = None
    ) -> Protection | None:
        """Why ``pods`` must not be evicted together, or None.

        ``read``: what was read before, by path; it grows. ``unit_of``: if a GpuPolicy decides over them, what those
        that can only go together have in common, by UID: for their owner they count as one.
        Raises ApiError: what can not be read protects, too.
        """
        read, namespaces = {} if read is None else read, sorted({pod.metadata.namespace for pod in pods})
        if len(namespaces) != 1:
            of_each = ([pod for pod in pods if pod.metadata.namespace == namespace] for namespace in namespaces)
            return next(filter(None, (self.protection(of_namespace, read, unit_of) for of_namespace in of_each)), None)
        for pod in pods:
            if (protected := own_protection(pod)) is not None:
                return protected
        owners = [owner for pod in pods if (owner := pod.controller) is not None]
        for owner in dict.fromkeys(owners):
            if (limit := self.owner_limit(owner, pods, unit_of)) is not None:
                return Protection(ProtectionRule.OWNER_LIMIT, limit)
            if (protected := self._job_protection(owner, pods, read, is_by_policy=unit_of is not None)) is not None:
                return protected
        path = f"/apis/policy/v1/namespaces/{namespaces[0]}/poddisruptionbudgets"
        if path not in read:
            read[path] = list(read_all(self.client, path, DisruptionBudget))
        budgets: list[DisruptionBudget] = read[path]
        protecting = sorted(budget.metadata.name for budget in budgets if budget.protects(pods))
        reason = f"PodDisruptionBudget {protecting[0]} forbids it" if protecting else None
        if any(pod.status.phase != "Pending" and sum(budget.selects(pod) for budget in budgets) > 1 for pod in pods):
            reason = "several PodDisruptionBudgets select it, and the API server evicts no such pod"
        return None if reason is None else Protection(ProtectionRule.DISRUPTION_BUDGET, reason)

    def _job_protection(
        self, owner: OwnerReference, pods: Sequence[Pod], read: dict[str, Any], *, is_by_policy: bool
    ) -> Protection | None:
        if owner.kind != "Job" or not owner.api_version.startswith("batch/"):
            return None
        path = f"/apis/batch/v1/namespaces/{pods[0].metadata.namespace}/jobs/{owner.name}"
        if path not in read:
            read[path] = read_object(self.client, path, JOB)
        job: Job = read[path]
        # The Job's controller may not have counted the last ones yet.
        if job.ignores_evictions if is_by_policy else job.goes_on(sum(self._of_owner(owner, pods))):
            return None
        retries = "" if is_by_policy else " and has no retries left"
        reason = f"Job {owner.name} would count it as a failure{retries} (podFailurePolicy)"
        return Protection(ProtectionRule.JOB_RETRIES, reason)

    def evict_all(self, pods: Iterable[Pod], trigger: Trigger | None) -> Iterator[Pod]:
        """Evict ``pods`` after the API server has agreed to each, and yield those that were. Raises ApiError."""
        evictable = [pod for pod in pods if self.evict(pod, trigger, is_rehearsal=True)]
        yield from (pod for pod in evictable if self.evict(pod, trigger))

    def evict(
        self, pod: Pod, trigger: Trigger | None, *, is_rehearsal: bool = False, **cause: Unpack[EvictionCause]
    ) -> bool:
        """Evict ``pod``, or only ask whether the API server would; False: it ends or has ended. Raises ApiError.

        ``trigger``: None if a person evicts it, which no metric counts. A GpuPolicy in ``cause`` uses its budget.
        """
        metadata = pod.metadata
        about = {"name": metadata.name, "namespace": metadata.namespace}
        options: dict[str, Any] = {"preconditions": {"uid": metadata.uid}}
        options |= {"dryRun": ["All"]} if is_rehearsal else {}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": about, "deleteOptions": options}
        if not is_rehearsal:
            owner = pod.controller
            key = _owner_key(metadata.namespace, owner) if owner is not None else ""
            self.recent.add(pod, key, trigger or "drain", **cause)
            present = find_pod(self.client, metadata.key)
            if present is None or present.metadata.uid != metadata.uid or present.metadata.deletion_timestamp:
                self.recent.discard(pod)
                return False
        try:
            self.client.create(f"/api/v1/namespaces/{metadata.namespace}/pods/{metadata.name}/eviction", body)
        except ApiError as error:
            if not is_rehearsal and error.status is not None and error.status < SERVER_ERROR:
                self.recent.discard(pod)  # otherwise it may have been evicted all the same
            if error.status in (NOT_FOUND, CONFLICT):
                return False
            self.count(trigger, Outcome.REFUSED)
            raise
        if is_rehearsal:
            return True
        self.count(trigger, Outcome.EVICTED)
        return True

    def has_lost_pods(self, pod: Pod) -> bool:
        """Whether pods of the owner of ``pod`` were evicted lately."""
        owner = pod.controller
        return owner is not None and self.recent.of_owner(_owner_key(pod.metadata.namespace, owner), ()) > 0

    def owner_limit(
        self, owner: OwnerReference, pods: Sequence[Pod], unit_of: Mapping[str, str] | None = None
    ) -> str | None:
        """Why those of ``pods`` that belong to ``owner`` are not evicted at present, or None."""
        return owner_limit(owner, *self._of_owner(owner, pods, unit_of))

    def _of_owner(
        self, owner: OwnerReference, pods: Sequence[Pod], unit_of: Mapping[str, str] | None = None
    ) -> tuple[int, int]:
        """Numbers of units of ``owner``: those that were evicted lately, and those among ``pods``."""
        uids = {pod.metadata.uid for pod in pods if (of_pod := pod.controller) is not None and of_pod.uid == owner.uid}
        lost = self.recent.of_owner(_owner_key(pods[0].metadata.namespace, owner), uids)
        return lost, len({(unit_of or {}).get(uid, uid) for uid in uids})

    def count(self, trigger: Trigger | None, outcome: Outcome) -> None:
        if self._metrics is not None and trigger is not None:
            self._metrics.eviction(trigger, outcome)

    def tell(self, about: Iterable[Reference], reason: str, message: str) -> None:
        """Record a warning on each of ``about``."""
        if self._recorder is not None:
            for reference in about:
                self._recorder.event(reference, reason, message, "Warning")


def own_protection(pod: Pod) -> Protection | None:
    """Why a pod of this kind is never evicted, or None."""
    owner = pod.controller
    if owner is None:
        reason = "it has no controller that would replace it, so it must be deleted"
        return Protection(ProtectionRule.NO_CONTROLLER, reason)
    if owner.kind in ("DaemonSet", "Node"):
        kind = "DaemonSet" if owner.kind == "DaemonSet" else "static manifest"
        return Protection(ProtectionRule.BOUND_TO_NODE, f"a pod of a {kind} would come back here")
    return None


def owner_limit(owner: OwnerReference, lost: int, more: int) -> str | None:
    """Why ``owner``, which has lost so many pods within an hour, does not lose so many more; None: it may."""
    if lost + more <= MOST_OF_OWNER:
        return None
    return f"{owner.kind} {owner.name} loses at most {MOST_OF_OWNER} pods an hour in this way, and has lost {lost}"


def _owner_key(namespace: str, owner: OwnerReference) -> str:
    """Names ``owner`` in the record. A tenant may write any UID: in another namespace it names another owner."""
    return f"{namespace}/{owner.uid[:64]}"


def pod_reference(pod: Pod) -> Reference:
    return Reference("Pod", pod.metadata.name, pod.metadata.namespace, pod.metadata.uid)
