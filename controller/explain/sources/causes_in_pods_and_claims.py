"""Pods that are not placed for a reason that no free device changes (pure).

No scheduler tries them, a claim of theirs is missing or being deleted, no class provides what they request, or all of
their claims are allocated already.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from controller.demand.node_eligibility import Excluded, exclusion, selects
from controller.demand.pending_claims import PendingClaim, Queue, claim_for, classes_by_resource
from controller.explain.reason import ClaimReason, ReasonCode
from controller.explain.situation import Situation
from controller.explain.sources.no_free_device_sentences import only_elsewhere
from controller.explain.sources.scheduler_reports import (
    SchedulerActivity,
    age_of,
    no_report,
    refusal,
    report_of,
    reported,
)
from controller.explain.sources.selected_gpus import listed
from driver.clock import Clock
from driver.kube.types import Claim, ClaimSpec, DeviceClaim, Key, Metadata, Node, Pod, PodResourceClaim

T = TypeVar("T")

GRACE_SECONDS = 1.0
"""Time that the watch of claims may be later than that of pods, and that the scheduler has to bind a pod."""

CREATION_SECONDS = 10.0
"""Time that kube-controller-manager has to create a claim from a template that exists, or may exist."""

FORGET_SECONDS = 60.0
"""Time after which an answer that was not looked up again is forgotten."""

LOOKUP_INTERVAL_SECONDS = 2.0
"""Minimum time between two look-ups of the same thing."""

LOOKUP_PAUSE_FACTOR = 20.0
"""That minimum is at least this many times the duration of the last look-up."""

MAX_LOOKUPS, MAX_LOOKUPS_ONCE = 8, 200
"""Look-ups in one decision, which pods wait for; and of a command, which has no later decision."""

MAX_GATED = 100
"""Pods with scheduling gates that get a reason: a queue may keep thousands of them."""


CHART_RESOURCE = re.compile(r"nvidia\.com/(?:gpu|gpu\.shared|mig-(?P<profile>.+))")
"""The extended resources that the chart's classes can have (values: extendedResourceNames)."""


EXCEEDED = re.compile(
    r"exceeded quota: (?P<quota>[^,]+), requested: (?P<requested>.*?), used: (?P<used>.*?), limited: (?P<limited>.*)"
)
AMOUNT = re.compile(r"([^,=\s]+)=([^,\s]+)")
"""The API server's refusal of an object over quota, and a resource with its amount in it."""

OF_CLASS = ".deviceclass.resource.k8s.io/devices"
"""The end of a resource in quotas that counts the devices of a class."""


class PodReason(NamedTuple):
    """The reason of a pod, ``grace`` seconds after its creation; ``permanent`` as for ``ClaimReason``."""

    code: ReasonCode
    sentence: str
    grace: float = 0.0
    permanent: bool = True


class LookedUp:
    """Answers of look-ups by key: looked up again after a while, and forgotten when they are no longer needed."""

    def __init__(self, clock: Clock, most: int, interval: float = LOOKUP_INTERVAL_SECONDS) -> None:
        """``most``: look-ups between two calls of ``begin``; ``interval``: seconds until one is repeated, or more."""
        self._clock, self._most, self._interval = clock, most, interval
        self._answers: dict[Hashable, tuple[float, Any]] = {}
        """When something is to be looked up again, and the last answer."""
        self._left = 0

    def begin(self) -> None:
        """Forget old answers, and allow more look-ups."""
        now, self._left = self._clock.monotonic(), self._most
        self._answers = {key: answer for key, answer in self._answers.items() if now - answer[0] < FORGET_SECONDS}

    def get(self, key: Hashable, look_up: Callable[[], T]) -> T | None:
        """The answer; None if there is none yet."""
        began = self._clock.monotonic()
        due, answer = self._answers.get(key, (-math.inf, None))
        if began >= due and self._left:
            self._left -= 1
            answer, ended = look_up(), self._clock.monotonic()
            # The more there are, the later each is looked up again: the first ones would leave nothing to the others.
            interval = self._interval * max(1.0, 2 * len(self._answers) / self._most)
            self._answers[key] = (ended + max(interval, LOOKUP_PAUSE_FACTOR * (ended - began)), answer)
        known: T | None = answer
        return known


class UnplacedPods:
    """Finds pods that are not placed for a reason that no free device changes, after a grace period."""

    def __init__(self, clock: Clock, *, watching: bool = True) -> None:
        """``watching``: False if ``reasons`` is called once only."""
        self._clock = clock
        self._watching = watching
        self._looked_up = LookedUp(clock, MAX_LOOKUPS if watching else MAX_LOOKUPS_ONCE)
        self._allocated_since: Mapping[str, float] = {}
        """By UID, the pods all claims of which are allocated."""
        self.next_s: float | None = None
        """Seconds until another pod is due."""

    def reasons(self, situation: Situation) -> dict[str, ClaimReason]:
        """By key: the reason of each unallocated claim of these pods, or of the pod if it has no such claim."""
        queue, now = situation.queue, self._clock.monotonic()
        self._looked_up.begin()
        of_pods: dict[Key, tuple[Pod, PodReason]] = {}
        times: list[float] = []
        allocated: dict[str, float] = {}
        allocated_pods = AllocatedPods(queue, self._clock)
        for pod in _waiting(queue, MAX_GATED if self._watching else None):
            reason = self._not_tried(pod, situation)
            due_in = 0.0 if reason is None else reason.grace - age_of(pod, self._clock)
            if reason is None and allocated_pods.has(pod):
                since = self._allocated_since.get(pod.metadata.uid, now if self._watching else -math.inf)
                allocated[pod.metadata.uid], due_in = since, since + GRACE_SECONDS - now
                reason = allocated_pods.reason(pod) if due_in <= 0 else None
            if due_in > 0:
                times.append(min(due_in, LOOKUP_INTERVAL_SECONDS))
            elif reason is not None:
                of_pods[pod.metadata.key] = (pod, reason)
        self._allocated_since = allocated
        self.next_s = min(times, default=None)
        return {reason.pending.key: reason for reason in _by_claim(of_pods, queue)}

    def _not_tried(self, pod: Pod, situation: Situation) -> PodReason | None:
        """Why the scheduler does not try ``pod``; None if it does."""
        if pod.spec.scheduling_gates:
            gates = listed([gate.get("name", "") for gate in pod.spec.scheduling_gates])
            sentence = (
                f"has the scheduling gate {gates}: the scheduler does not try it until the gate is removed, by what "
                "has set it, such as a queue (Kueue: kubectl get workloads)"
            )
            return PodReason(ReasonCode.GATED, sentence)
        if (missing := self._missing(pod, situation)) is not None:
            return missing
        if pod.spec.node_name and situation.queue.of_pod(pod):
            node = pod.spec.node_name
            sentence = (
                f"has spec.nodeName {node}: no scheduler handles such a pod, and only a scheduler allocates claims; "
                f"create it again with the nodeSelector kubernetes.io/hostname: {node} instead"
            )
            return PodReason(ReasonCode.NODE_NAME, sentence)
        report = report_of(pod)
        if report is not None and (over := _over_quota(pod, report.message, situation.queue)) is not None:
            return over
        return None if pod.spec.node_name else _not_mapped(pod, situation.queue)

    def _missing(self, pod: Pod, situation: Situation) -> PodReason | None:
        """Why the scheduler does not try a pod one of whose claims is missing or being deleted."""
        created = {status.name: status.resource_claim_name for status in pod.status.resource_claim_statuses}
        for reference in pod.spec.resource_claims:
            name = reference.resource_claim_name or created.get(reference.name)
            if name is None and reference.name not in created:
                return self._not_created(pod, reference, situation)
            claim = None if name is None else situation.queue.cluster.claims.find(Key(pod.metadata.namespace, name))
            if name is not None and claim is None:
                sentence = f"refers to the ResourceClaim {name}, which does not exist in its namespace"
                return PodReason(ReasonCode.NO_SUCH_CLAIM, sentence, GRACE_SECONDS)
            if claim is not None and claim.metadata.deletion_timestamp and not pod.spec.node_name:
                finalizers = f"(kubectl get resourceclaim {name} -n {pod.metadata.namespace} -o yaml: finalizers)"
                sentence = (
                    f"refers to the ResourceClaim {name}, which is being deleted since "
                    f"{claim.metadata.deletion_timestamp} {finalizers}: the scheduler does not try the pod before the "
                    "claim has gone and has been created anew"
                )
                return PodReason(ReasonCode.NO_SUCH_CLAIM, sentence)
        return None

    def _not_created(self, pod: Pod, claim: PodResourceClaim, situation: Situation) -> PodReason:
        lookups = situation.lookups
        template, namespace = claim.resource_claim_template_name or "", pod.metadata.namespace
        key, find = Key(namespace, template), self._looked_up.get
        is_young = self._watching and age_of(pod, self._clock) < GRACE_SECONDS
        exists = None if is_young else find(("template", key), lambda: lookups.template_exists(key))
        if exists is False:
            sentence = f"refers to the ResourceClaimTemplate {template}, which does not exist in its namespace"
            return PodReason(ReasonCode.NO_SUCH_CLAIM, sentence, GRACE_SECONDS)
        failure = find(("failure", pod.metadata.key), lambda: lookups.creation_failure(pod)) if exists else None
        if failure and (over := _over_quota(pod, failure, situation.queue)) is not None:
            return over
        if failure:
            sentence = (
                f"lacks its claim {claim.name}, which kube-controller-manager can not create from the "
                f"ResourceClaimTemplate {template}: {refusal(failure)}"
            )
            return PodReason(ReasonCode.NO_SUCH_CLAIM, sentence, GRACE_SECONDS)
        events = f"kubectl describe pod {pod.metadata.name} -n {namespace}"
        doubt = "a quota or a policy may refuse it, or" if exists else "does the template exist, and"
        question = "kube-controller-manager may not run" if exists else "does kube-controller-manager run?"
        sentence = (
            f"lacks its claim {claim.name}, which has not been created from the ResourceClaimTemplate {template}: "
            f"{doubt} {question} ({events})"
        )
        return PodReason(ReasonCode.NO_SUCH_CLAIM, sentence, GRACE_SECONDS if is_young else CREATION_SECONDS)


def _over_quota(pod: Pod, message: str, queue: Queue) -> PodReason | None:
    """The reason of a pod whose claim a ResourceQuota refuses, according to the API server's ``message``."""
    match = EXCEEDED.search(message)
    if match is None:
        return None
    more, used, limits = (dict(AMOUNT.findall(match[name])) for name in ("requested", "used", "limited"))
    amounts = [f"{used.get(name, '?')} of {limits.get(name, '?')} {name} used" for name in used]
    by_resource = classes_by_resource(queue.cluster.classes)
    named = (name.removesuffix(OF_CLASS).removeprefix("requests.") for name in used)
    classes = {by_resource.get(name, name) for name in named}
    holders = queue.cluster.claims.requesting(pod.metadata.namespace, classes)
    by = f", by {'claim' if len(holders) == 1 else 'claims'} {listed(holders)}" if holders else ""
    sentence = f"gets no claim, because that would exceed the ResourceQuota {match['quota']}: {', '.join(amounts)}{by}"
    never = any(_number(amount) > _number(limits.get(name)) for name, amount in more.items())
    return PodReason(ReasonCode.OVER_QUOTA, sentence, GRACE_SECONDS, permanent=never)


def _number(amount: str | None) -> float:
    """A number of devices or objects; infinite if it is not one."""
    return int(amount) if amount is not None and amount.isdecimal() else math.inf


def _not_mapped(pod: Pod, queue: Queue) -> PodReason | None:
    """Why ``pod`` waits that requests a resource which neither a class nor a device plugin provides."""
    lacking = {name for name in pod.spec.resource_names if CHART_RESOURCE.fullmatch(name)}
    if lacking:
        lacking -= classes_by_resource(queue.cluster.classes).keys()
        lacking -= {name for node in queue.cluster.nodes for name in node.status.allocatable}
    if not lacking:
        return None
    classes = ",".join(sorted(map(_chart_class, lacking)))
    sentence = (
        f"requests {', '.join(sorted(lacking))}, which no node has and which is the extendedResourceName of no "
        f"DeviceClass: helm upgrade --reuse-values --set 'extendedResourceNames={{{classes}}}', or give the pod a "
        "claim (docs/workloads.md)"
    )
    return PodReason(ReasonCode.NOT_MAPPED, sentence, GRACE_SECONDS)


def _chart_class(resource: str) -> str:
    """The class of the chart that can have this extended resource."""
    match = CHART_RESOURCE.fullmatch(resource)
    if match is None or match["profile"] is None:
        return "gpu-dev" if resource.endswith(".shared") else "gpu-training"
    return f"gpu-inference-{match['profile'].replace('.', '-')}"


def _waiting(queue: Queue, most_gated: int | None) -> Iterator[Pod]:
    """The pods that are not running, and not being deleted."""
    gated = []
    for pod in queue.cluster.pods:
        if pod.status.phase != "Pending" or pod.metadata.deletion_timestamp:
            continue
        if pod.spec.scheduling_gates:
            gated.append(pod)
        else:
            yield pod
    if gated:
        yield from islice(_ours(gated, queue), most_gated)


def _ours(gated: Iterable[Pod], queue: Queue) -> Iterator[Pod]:
    """Pods that are not in the queue and may request devices of this driver: by those of their claims that exist."""
    by_resource = classes_by_resource(queue.cluster.classes)
    for pod in gated:
        claims = [queue.cluster.claims.find(key) for key in pod.claims]
        lacks = len(pod.spec.resource_claims) > len(claims)
        extended = claim_for(pod, by_resource)
        candidates = filter(None, (*claims, extended))
        if lacks or any(queue.reader.read(claim).requirements != () for claim in candidates):
            yield pod


def _by_claim(of_pods: Mapping[Key, tuple[Pod, PodReason]], queue: Queue) -> Iterator[ClaimReason]:
    """The reasons of the pods' claims that wait for nothing else, or of the pods themselves."""
    queued = {pending.key for pending in queue.pending}
    for pod, (code, sentence, _, permanent) in of_pods.values():
        pending_claims = queue.of_pod(pod)
        if pending_claims and code is not ReasonCode.NO_SUCH_CLAIM and not any(map(queue.requirements, pending_claims)):
            continue  # all of its claims are for devices of other drivers
        # Of a gated pod also the claims that are not allocated and that no other pod has queued.
        keys = [key for key in pod.claims if str(key) not in queued] if pod.spec.scheduling_gates else []
        claims = filter(None, map(queue.cluster.claims.find, keys))
        of_gated = (PendingClaim(claim, (pod,)) for claim in claims if not claim.status.allocation)
        subjects = [*filter(queue.requirements, pending_claims), *of_gated]
        waiting = [claim for claim in subjects if all(user.metadata.key in of_pods for user in claim.pods)]
        for claim in waiting:
            yield ClaimReason(claim, code, f"pod {pod.metadata.name} {sentence}", permanent)
        if not waiting:
            metadata = Metadata(name=pod.metadata.name, namespace=pod.metadata.namespace)
            itself = PendingClaim(Claim(metadata, ClaimSpec(DeviceClaim(()))), (pod,), not_created=True)
            yield ClaimReason(itself, code, f"it {sentence}", permanent)


@dataclass(frozen=True)
class AllocatedPods:
    """Why pods all claims of which are allocated are not placed."""

    queue: Queue
    clock: Clock

    @cached_property
    def _nodes(self) -> Mapping[str, Node]:
        return {node.metadata.name: node for node in self.queue.cluster.nodes}

    @cached_property
    def _activity(self) -> SchedulerActivity:
        return SchedulerActivity(self.queue, self.clock)

    def has(self, pod: Pod) -> bool:
        """Whether it has no node although all of its claims are allocated, with a device of ours among them."""
        if pod.spec.node_name or self.queue.of_pod(pod):
            return False
        driver = self.queue.feasibility.matching.driver
        claims = [self.queue.cluster.claims.find(key) for key in pod.claims]
        allocated = [claim for claim in claims if claim is not None and claim.status.allocation]
        has_ours = any(result.driver == driver for claim in allocated for result in claim.results)
        return has_ours and len(allocated) == len(claims)

    def reason(self, pod: Pod) -> PodReason | None:
        """Why ``pod`` is not placed; None if the scheduler may only need a moment."""
        nodes_by_claim = {key.name: self._nodes_of(key) for key in pod.claims}
        where = " and ".join(
            f"{claim} on {listed(sorted(nodes)) or 'no node'}" for claim, nodes in nodes_by_claim.items()
        )
        holds = f"can only use its allocated {'claim' if len(nodes_by_claim) == 1 else 'claims'} {where}"
        common = self._common_nodes(pod)
        if not common:
            way_out = "no node has all of them; a claim is allocated anew once no pod uses it"
            if not all(nodes_by_claim.values()):
                way_out = "the node of its device does not exist any more: delete that claim, or the pods that use it"
            return PodReason(ReasonCode.NOT_TOGETHER, f"{holds}: {way_out}")
        if excluded := self.excluded(pod):
            what = f"has the claim {' and '.join(nodes_by_claim)}, which is allocated"
            reason = only_elsewhere(what, sorted(common), excluded, common)
            return PodReason(reason.code, reason.sentence)
        report = report_of(pod)
        if report is None and not self._activity.is_absent(pod):
            return None
        cause = no_report(pod) if report is None else reported(pod, report)
        return PodReason(ReasonCode.NOT_PLACED, f"{holds}, and is not placed there: {cause}")

    def excluded(self, pod: Pod) -> Mapping[str, Excluded]:
        """The nodes on which all of its claims are available, if it can run on none of them, and why."""
        excluded = {}
        for name in self._common_nodes(pod):
            why = exclusion(pod.spec, self._nodes[name])
            if why is None:
                return {}
            excluded[name] = why
        return excluded

    def _common_nodes(self, pod: Pod) -> frozenset[str]:
        """The nodes on which all of its claims are available."""
        sets = [self._nodes_of(key) for key in pod.claims]
        return frozenset.intersection(*sets) if sets else frozenset()

    def _nodes_of(self, claim: Key) -> frozenset[str]:
        """The nodes on which the devices of an allocated claim can be used."""
        allocation = self.queue.cluster.claims.allocation(claim)
        selector = None if allocation is None else allocation.node_selector
        return frozenset(name for name, node in self._nodes.items() if selector is None or selects(selector, node))
