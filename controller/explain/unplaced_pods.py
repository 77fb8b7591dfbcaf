"""Pods that are not placed for a reason that no free device changes (pure).

No scheduler tries them, a claim of theirs is missing or being deleted, or all of their claims are allocated already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import NamedTuple, TypeVar

from controller.demand.eligibility import Excluded, exclusion, selects
from controller.demand.pending_claims import PendingClaim, Queue, claim_for, classes_by_resource
from controller.demand.requirements import RequirementsReader
from controller.explain.availability import listed
from controller.explain.reason import ClaimReason, ReasonCode
from controller.explain.scheduler_reports import SchedulerActivity, age_of, no_report, report_of, reported
from controller.explain.sentences import only_elsewhere
from driver.kube.clock import Clock
from driver.kube.types import Claim, ClaimSpec, DeviceClaim, Key, Metadata, Pod, PodResourceClaim

T = TypeVar("T")

GRACE_SECONDS = 1.0
"""Time that the watch of claims may be later than that of pods, and that the scheduler has to bind a pod."""

CREATION_SECONDS = 10.0
"""Time that kube-controller-manager has to create a claim from a template that exists."""

FORGET_SECONDS = 60.0

LOOKUP_INTERVAL_SECONDS, MAX_LOOKUPS = 2.0, 8
"""Time until something is looked up again, and how much is looked up in one decision, which pods wait for."""

MAX_GATED = 100
"""Pods with scheduling gates that get a reason: a queue may keep thousands of them."""


class Found(NamedTuple):
    """The reason of a pod, ``grace`` seconds after its creation."""

    code: ReasonCode
    sentence: str
    grace: float = 0.0


class UnplacedPods:
    """Finds such pods, once they have been so for a moment."""

    def __init__(
        self,
        clock: Clock,
        template_exists: Callable[[Key], bool | None] = lambda _: None,
        creation_failure: Callable[[Pod], str | None] = lambda _: None,
        *,
        watching: bool = True,
    ) -> None:
        """``template_exists``: whether there is such a ResourceClaimTemplate, None if that is unknown.

        ``creation_failure``: what kube-controller-manager reports on a pod whose claim it can not create.
        ``watching``: False if ``reasons`` is called once only.
        """
        self._clock = clock
        self._template_exists = template_exists
        self._watching = watching
        self._creation_failure = creation_failure
        self._templates: dict[Key, tuple[float, bool | None]] = {}
        """When a template was looked up, and whether it exists."""
        self._failures: dict[Key, tuple[float, str | None]] = {}
        """When the report on a pod was read, and what it says."""
        self._lookups = 0
        self._allocated_since: Mapping[str, float] = {}
        """By UID, the pods all claims of which are allocated."""
        self.next_s: float | None = None
        """Seconds until another pod is due."""

    def reasons(self, queue: Queue) -> list[ClaimReason]:
        """One reason for each of these pods, or for its claims that are not allocated."""
        now, self._lookups = self._clock.monotonic(), 0
        found: dict[Key, tuple[Pod, Found]] = {}
        times: list[float] = []
        allocated: dict[str, float] = {}
        placement = Placement(queue, self._clock)
        for pod in _waiting(queue, MAX_GATED if self._watching else None):
            reason = self._not_tried(pod, queue)
            left = 0.0 if reason is None else reason.grace - age_of(pod, self._clock)
            if reason is None and placement.is_allocated(pod):
                since = self._allocated_since.get(pod.metadata.uid, now if self._watching else -math.inf)
                allocated[pod.metadata.uid], left = since, since + GRACE_SECONDS - now
                reason = placement.reason(pod) if left <= 0 else None
            if left > 0:
                times.append(min(left, LOOKUP_INTERVAL_SECONDS))
            elif reason is not None:
                found[pod.metadata.key] = (pod, reason)
        self._allocated_since = allocated
        for known in (self._templates, self._failures):
            for key in [key for key, (at, _) in known.items() if now - at >= FORGET_SECONDS]:
                del known[key]
        self.next_s = min(times, default=None)
        return list(_by_claim(found, queue))

    def _not_tried(self, pod: Pod, queue: Queue) -> Found | None:
        """Why the scheduler does not try ``pod``; None if it does."""
        if pod.spec.scheduling_gates:
            gates = listed([each.get("name", "") for each in pod.spec.scheduling_gates])
            sentence = (
                f"has the scheduling gate {gates}: the scheduler does not try it until the gate is removed, by what "
                "has set it, such as a queue (Kueue: kubectl get workloads)"
            )
            return Found(ReasonCode.GATED, sentence)
        if (missing := self._missing(pod, queue)) is not None:
            return missing
        if pod.spec.node_name and queue.of_pod(pod):
            node = pod.spec.node_name
            sentence = (
                f"has spec.nodeName {node}: no scheduler handles such a pod, and only a scheduler allocates claims; "
                f"create it again with the nodeSelector kubernetes.io/hostname: {node} instead"
            )
            return Found(ReasonCode.NODE_NAME, sentence)
        return None

    def _missing(self, pod: Pod, queue: Queue) -> Found | None:
        created = {each.name: each.resource_claim_name for each in pod.status.resource_claim_statuses}
        for each in pod.spec.resource_claims:
            name = each.resource_claim_name or created.get(each.name)
            if name is None and each.name not in created:
                return self._not_created(pod, each)
            claim = None if name is None else queue.cluster.claims.find(Key(pod.metadata.namespace, name))
            if name is not None and claim is None:
                sentence = f"refers to the ResourceClaim {name}, which does not exist in its namespace"
                return Found(ReasonCode.NO_SUCH_CLAIM, sentence, GRACE_SECONDS)
            if claim is not None and claim.metadata.deletion_timestamp and not pod.spec.node_name:
                finalizers = f"(kubectl get resourceclaim {name} -n {pod.metadata.namespace} -o yaml: finalizers)"
                sentence = (
                    f"refers to the ResourceClaim {name}, which is being deleted since "
                    f"{claim.metadata.deletion_timestamp} {finalizers}: the scheduler does not try the pod before the "
                    "claim has gone and has been created anew"
                )
                return Found(ReasonCode.NO_SUCH_CLAIM, sentence)
        return None

    def _not_created(self, pod: Pod, claim: PodResourceClaim) -> Found:
        template, namespace = claim.resource_claim_template_name or "", pod.metadata.namespace
        is_young = self._watching and age_of(pod, self._clock) < GRACE_SECONDS
        exists = None if is_young else self._known(self._templates, Key(namespace, template), self._template_exists)
        if exists is False:
            sentence = f"refers to the ResourceClaimTemplate {template}, which does not exist in its namespace"
            return Found(ReasonCode.NO_SUCH_CLAIM, sentence, GRACE_SECONDS)
        failure = (
            self._known(self._failures, pod.metadata.key, lambda _: self._creation_failure(pod)) if exists else None
        )
        if failure:
            sentence = (
                f"lacks its claim {claim.name}, which kube-controller-manager can not create from the "
                f"ResourceClaimTemplate {template}: {failure}"
            )
            return Found(ReasonCode.NO_SUCH_CLAIM, sentence, GRACE_SECONDS)
        events = f"kubectl describe pod {pod.metadata.name} -n {namespace}"
        doubt = "a quota or a policy may refuse it, or" if exists else "does the template exist, and"
        question = "kube-controller-manager may not run" if exists else "does kube-controller-manager run?"
        sentence = (
            f"lacks its claim {claim.name}, which has not been created from the ResourceClaimTemplate {template}: "
            f"{doubt} {question} ({events})"
        )
        return Found(ReasonCode.NO_SUCH_CLAIM, sentence, CREATION_SECONDS if exists else GRACE_SECONDS)

    def _known(self, known: dict[Key, tuple[float, T]], key: Key, look_up: Callable[[Key], T]) -> T | None:
        """What is ``known`` of ``key``, looked up again now and then."""
        now = self._clock.monotonic()
        at, value = known.get(key, (-math.inf, None))
        if now - at >= LOOKUP_INTERVAL_SECONDS and self._lookups < MAX_LOOKUPS:
            self._lookups += 1
            known[key] = (now, look_up(key))
            return known[key][1]
        return value


def _waiting(queue: Queue, most_gated: int | None) -> Iterator[Pod]:
    """The pods that are not running, and not being deleted."""
    gated = []
    for pod in queue.cluster.pods:
        if pod.status.phase == "Pending" and not pod.metadata.deletion_timestamp:
            if pod.spec.scheduling_gates:
                gated.append(pod)
            else:
                yield pod
    if gated:
        yield from islice(_ours(gated, queue), most_gated)


def _ours(gated: Iterable[Pod], queue: Queue) -> Iterator[Pod]:
    """Pods that are not in the queue and may request devices of this driver, as far as their claims exist."""
    by_resource = classes_by_resource(queue.cluster.classes)
    reader = RequirementsReader(queue.feasibility.matching, queue.cluster.classes, queue.feasibility.fleet)
    for pod in gated:
        claims = [queue.cluster.claims.find(key) for key in pod.claims]
        lacks = len(pod.spec.resource_claims) > len(claims)
        extended = claim_for(pod, by_resource)
        if lacks or any(each is not None and reader.of(each) != () for each in (*claims, extended)):
            yield pod


def _by_claim(found: Mapping[Key, tuple[Pod, Found]], queue: Queue) -> Iterator[ClaimReason]:
    """The reasons of the pods' claims that wait for nothing else, or of the pods themselves."""
    queued = {each.key for each in queue.pending}
    for pod, (code, sentence, _) in found.values():
        pending = queue.of_pod(pod)
        if pending and code is not ReasonCode.NO_SUCH_CLAIM and not any(map(queue.requirements, pending)):
            continue  # all of its claims are for devices of other drivers
        subjects = [*filter(queue.requirements, pending), *_claims_of_gated(pod, queue, queued)]
        waiting = [each for each in subjects if all(user.metadata.key in found for user in each.pods)]
        for each in waiting:
            yield ClaimReason(each, code, f"pod {pod.metadata.name} {sentence}", permanent=True)
        if not waiting:
            metadata = Metadata(name=pod.metadata.name, namespace=pod.metadata.namespace)
            itself = PendingClaim(Claim(metadata, ClaimSpec(DeviceClaim(()))), (pod,), not_created=True)
            yield ClaimReason(itself, code, f"it {sentence}", permanent=True)


def _claims_of_gated(pod: Pod, queue: Queue, queued: Collection[str]) -> Iterator[PendingClaim]:
    """The claims of a gated pod that are not allocated, without those that other pods have ``queued``."""
    if pod.spec.scheduling_gates:
        claims = (queue.cluster.claims.find(key) for key in pod.claims if str(key) not in queued)
        yield from (PendingClaim(each, (pod,)) for each in claims if each is not None and not each.status.allocation)


class Placement:
    """Why pods all claims of which are allocated are not placed."""

    def __init__(self, queue: Queue, clock: Clock) -> None:
        self._queue = queue
        self._clock = clock
        self._nodes = {node.metadata.name: node for node in queue.cluster.nodes}

    @cached_property
    def _activity(self) -> SchedulerActivity:
        return SchedulerActivity(self._queue)

    def is_allocated(self, pod: Pod) -> bool:
        """Whether it has no node although all of its claims are allocated, with a device of ours among them."""
        if pod.spec.node_name or self._queue.of_pod(pod):
            return False
        claims = [self._queue.cluster.claims.find(key) for key in pod.claims]
        results = (result for each in claims if each is not None for result in each.results)
        driver = self._queue.feasibility.matching.driver
        return all(each is not None and each.status.allocation for each in claims) and any(
            result.driver == driver for result in results
        )

    def reason(self, pod: Pod) -> Found | None:
        places = {key.name: self._places(key) for key in pod.claims}
        where = " and ".join(f"{name} on {listed(sorted(nodes)) or 'no node'}" for name, nodes in places.items())
        holds = f"can only use its allocated {'claim' if len(places) == 1 else 'claims'} {where}"
        common = self._common(pod)
        if not common:
            way_out = "no node has all of them; a claim is allocated anew once no pod uses it"
            if not all(places.values()):
                way_out = "the node of its device does not exist any more: delete that claim, or the pods that use it"
            return Found(ReasonCode.NOT_TOGETHER, f"{holds}: {way_out}")
        if excluded := self.excluded(pod):
            what = f"has the claim {' and '.join(places)}, which is allocated"
            reason = only_elsewhere(what, sorted(common), excluded, common)
            return Found(reason.code, reason.sentence)
        report = report_of(pod)
        if report is None and not self._activity.is_absent(pod, self._clock):
            return None
        cause = no_report(pod) if report is None else reported(pod, report)
        return Found(ReasonCode.NOT_PLACED, f"{holds}, and is not placed there: {cause}")

    def excluded(self, pod: Pod) -> Mapping[str, Excluded]:
        """The nodes on which all of its claims are available, if it can run on none of them, and why."""
        found = {name: exclusion(pod.spec, self._nodes[name]) for name in self._common(pod)}
        return {name: each for name, each in found.items() if each is not None} if None not in found.values() else {}

    def _common(self, pod: Pod) -> frozenset[str]:
        places = [self._places(key) for key in pod.claims]
        return frozenset.intersection(*places) if places else frozenset()

    def _places(self, claim: Key) -> frozenset[str]:
        """The nodes on which the devices of an allocated claim can be used."""
        allocation = self._queue.cluster.claims.allocation(claim)
        selector = None if allocation is None else allocation.node_selector
        found = (name for name, node in self._nodes.items() if selector is None or selects(selector, node))
        return frozenset(found)
