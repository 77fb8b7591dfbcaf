"""The one way in which pods are evicted, whatever the trigger: what protects a pod, and the request.

Rules that hold for each trigger are here; a trigger says which pods can not go on and why. Pods, claims and owners are
read again directly before an eviction, which has the pod's UID as its precondition.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from driver.config.shared_flags import SUBDOMAIN
from driver.errors import NOT_FOUND, ApiError
from driver.kube.client import KubeClient
from driver.kube.events import Recorder
from driver.kube.reads import read_all, read_object
from driver.kube.types import Claim, OwnerReference, Pod, Reference

if TYPE_CHECKING:
    from controller.metrics import ControllerMetrics

OWNER_SECONDS, MOST_OF_OWNER = 3600.0, 2
"""Most pods of one owner that are evicted within this time; more evictions would only repeat what did not help."""

ADMIN_ACCESS = "it has adminAccess"
"""Why the pods of such a claim are not evicted."""

POD = msgspec.json.Decoder(Pod)


class Trigger(StrEnum):
    """Why pods are evicted; also values of a metric label."""

    OVERLAP = "overlap"
    FAILED_START = "failed-start"


class Outcome(StrEnum):
    """What became of a pod that should be evicted; also values of a metric label."""

    EVICTED = "evicted"
    PROTECTED = "protected"
    REFUSED = "refused"


class FailurePattern(msgspec.Struct, frozen=True):
    type: str = ""
    status: str = "True"


class FailureRule(msgspec.Struct, frozen=True, rename="camel"):
    action: str = ""
    on_pod_conditions: tuple[FailurePattern, ...] = ()


class FailurePolicy(msgspec.Struct, frozen=True):
    rules: tuple[FailureRule, ...] = ()


class JobSpec(msgspec.Struct, frozen=True, rename="camel"):
    backoff_limit: int = 6
    backoff_limit_per_index: int | None = None
    pod_failure_policy: FailurePolicy = FailurePolicy()


class JobStatus(msgspec.Struct, frozen=True):
    failed: int = 0


class Job(msgspec.Struct, frozen=True):
    """``batch/v1`` Job."""

    spec: JobSpec
    status: JobStatus = JobStatus()

    @property
    def forgives_eviction(self) -> bool:
        """Whether the Job goes on after an eviction: its policy ignores it, or retries are left."""
        for rule in self.spec.pod_failure_policy.rules:
            if any(pattern.type == "DisruptionTarget" for pattern in rule.on_pod_conditions):
                return rule.action == "Ignore"
        return self.spec.backoff_limit_per_index is None and self.status.failed < self.spec.backoff_limit


class Requirement(msgspec.Struct, frozen=True):
    key: str
    operator: str
    values: tuple[str, ...] = ()


class LabelSelector(msgspec.Struct, frozen=True, rename="camel"):
    match_labels: dict[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()

    def selects(self, labels: dict[str, str]) -> bool:
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            _meets(labels, requirement) for requirement in self.match_expressions
        )


class BudgetSpec(msgspec.Struct, frozen=True, rename="camel"):
    selector: LabelSelector | None = None
    unhealthy_pod_eviction_policy: str = "IfHealthyBudget"


class BudgetStatus(msgspec.Struct, frozen=True, rename="camel"):
    current_healthy: int = 0
    desired_healthy: int = 0


class BudgetMetadata(msgspec.Struct, frozen=True):
    name: str


class DisruptionBudget(msgspec.Struct, frozen=True):
    """``policy/v1`` PodDisruptionBudget. The API server does not apply it to Pending pods, so that we do."""

    metadata: BudgetMetadata
    spec: BudgetSpec = BudgetSpec()
    status: BudgetStatus = BudgetStatus()

    def protects(self, pod: Pod) -> bool:
        """Whether it forbids to evict ``pod``, which is not healthy (KEP-3017)."""
        if self.spec.selector is None or not self.spec.selector.selects(pod.metadata.labels):
            return False
        always = self.spec.unhealthy_pod_eviction_policy == "AlwaysAllow"
        return not always and self.status.current_healthy < self.status.desired_healthy


JOB = msgspec.json.Decoder(Job)


class Evictor:
    """For one thread."""

    def __init__(
        self,
        client: KubeClient,
        recorder: Recorder,
        metrics: ControllerMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._recorder, self._metrics, self._clock = client, recorder, metrics, clock
        self._evicted_at: dict[str, list[float]] = defaultdict(list)

    def consumers(self, claim: Claim) -> list[Pod]:
        """The pods for which ``claim`` is reserved, as they are now; those that are gone are left out."""
        pods = []
        for consumer in claim.status.reserved_for:
            # A name that no pod can have is left out: it could lead elsewhere.
            if consumer.resource == "pods" and SUBDOMAIN.fullmatch(consumer.name):
                try:
                    pods.append(read_object(self._client, _path(claim.metadata.namespace, consumer.name), POD))
                except ApiError as error:
                    if error.status != NOT_FOUND:
                        raise
        return pods

    def protection(self, pod: Pod) -> str | None:
        """Why ``pod`` must not be evicted, or None. Raises ApiError: what can not be read protects, too."""
        owner, protected = owner_of(pod), own_protection(pod)
        if owner is None or protected is not None:
            return protected
        if (limit := self.owner_limit(owner)) is not None:
            return limit
        namespace = pod.metadata.namespace
        if owner.kind == "Job":
            job = read_object(self._client, f"/apis/batch/v1/namespaces/{namespace}/jobs/{owner.name}", JOB)
            if not job.forgives_eviction:
                return f"Job {owner.name} would count it as a failure and has no retries left (podFailurePolicy)"
        budgets = read_all(
            self._client, f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets", DisruptionBudget
        )
        protecting = sorted(budget.metadata.name for budget in budgets if budget.protects(pod))
        return f"PodDisruptionBudget {protecting[0]} forbids it" if protecting else None

    def evict(self, pod: Pod, trigger: Trigger) -> None:
        """Evict ``pod``. Raises ApiError."""
        metadata = pod.metadata
        about = {"name": metadata.name, "namespace": metadata.namespace}
        options = {"preconditions": {"uid": metadata.uid}}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": about, "deleteOptions": options}
        try:
            self._client.create(f"{_path(metadata.namespace, metadata.name)}/eviction", body)
        except ApiError:
            self.count(trigger, Outcome.REFUSED)
            raise
        self.count(trigger, Outcome.EVICTED)
        if (owner := owner_of(pod)) is not None:
            self._evicted_at[owner.uid].append(self._clock())

    def owner_limit(self, owner: OwnerReference) -> str | None:
        """Why no more pods of ``owner`` are evicted at present, or None."""
        since = self._clock() - OWNER_SECONDS
        recent = {uid: [at for at in times if at >= since] for uid, times in self._evicted_at.items()}
        self._evicted_at = defaultdict(list, {uid: times for uid, times in recent.items() if times})
        if len(self._evicted_at.get(owner.uid, ())) < MOST_OF_OWNER:
            return None
        return f"{owner.kind} {owner.name} lost {MOST_OF_OWNER} pods within an hour in this way, and it did not help"

    def count(self, trigger: Trigger, outcome: Outcome) -> None:
        if self._metrics is not None:
            self._metrics.eviction(trigger, outcome)

    def tell(self, about: Iterable[Reference], reason: str, message: str) -> None:
        """Record a warning on each of ``about``."""
        for reference in about:
            self._recorder.event(reference, reason, message, "Warning")


def own_protection(pod: Pod) -> str | None:
    """Why a pod of this kind is never evicted, or None."""
    owner = owner_of(pod)
    if owner is None:
        return "it has no controller that would replace it, so it must be deleted"
    if owner.kind in ("DaemonSet", "Node"):
        return f"a pod of a {'DaemonSet' if owner.kind == 'DaemonSet' else 'static manifest'} would come back here"
    return None


def owner_of(pod: Pod) -> OwnerReference | None:
    """The controller, such as a Job or a ReplicaSet, that creates another pod after this one."""
    return next((owner for owner in pod.metadata.owner_references if owner.controller), None)


def pod_reference(pod: Pod) -> Reference:
    return Reference("Pod", pod.metadata.name, pod.metadata.namespace, pod.metadata.uid)


def _path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def _meets(labels: dict[str, str], requirement: Requirement) -> bool:
    """An unknown operator counts as met: the budget then protects the pod."""
    value = labels.get(requirement.key)
    match requirement.operator:
        case "In":
            return value in requirement.values
        case "NotIn":
            return value not in requirement.values
        case "DoesNotExist":
            return value is None
        case "Exists":
            return value is not None
        case _:
            return True
