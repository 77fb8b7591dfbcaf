"""Everything that is known of why a claim is pending: the reason, what is available, who holds it, what would help."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from controller.demand.node_eligibility import Excluded
from controller.demand.pending_claims import PendingClaim
from controller.eviction.failed_starts import FailedStart
from controller.explain.events import ALLOCATED, NO_POD, NOT_USED
from controller.explain.helpful_changes import HelpfulChange, changes_that_admit, changes_that_help
from controller.explain.reason import OF_THE_POD, ClaimReason
from controller.explain.sources.causes_in_pods_and_claims import AllocatedPods
from controller.explain.sources.scheduler_reports import report_of
from controller.explain.sources.selected_gpus import Availability, SelectedGpu, listed
from controller.report.cluster_view import ClusterView
from controller.report.unprepared_claims import STAYS, next_step, sentence
from driver.kube.types import Claim, Key, Pod, Result
from driver.model.shared_memory import MEMORY_CAPACITY

NOT_PREPARED = "NotPrepared"
"""Allocated, but its node has not prepared it yet."""

NOT_RELEASED = "NotReleased"
"""Its pod has ended, and its node can not release it."""

MAX_OUTCOMES = 20
"""Unprepared claims of which the controller's Event is looked up."""

TERMINATING = "Terminating"
OTHER_DRIVERS = "OtherDrivers"


class ProductCount(msgspec.Struct, frozen=True):
    """Of the GPUs of one product that a request selects: how many could provide a device now, and what keeps others."""

    product: str
    gpus: int
    free: int
    held: int
    closed: Mapping[str, int]


class RequestCount(msgspec.Struct, frozen=True, rename="camel"):
    """What a request asks for, and the GPUs that have it by product."""

    name: str
    device_class: str
    needs: str
    products: tuple[ProductCount, ...]


@dataclass(frozen=True)
class Explanation:
    """Why ``claim`` (``namespace/name``) is pending. ``pods`` are its pending pods, bound ones only if it is allocated.

    ``claim`` is empty if the reason is one of the pod itself. ``code`` is a ReasonCode, or ALLOCATED, NOT_PREPARED,
    NOT_RELEASED, NOT_USED (no pending pod uses the claim), TERMINATING or OTHER_DRIVERS. ``start`` is what the node of
    an allocated claim reports that can not prepare it. ``permanent``: the reason does not pass when other claims end.
    ``holders`` are the claims that hold devices which it could have; ``reports`` what the scheduler says of each pod.
    ``moves``: what moves of other claims would do, if some are known that help.
    ``is_detailed``: requests, holders and changes were looked for.
    """

    claim: str
    pods: tuple[Pod, ...]
    code: str
    message: str
    permanent: bool = False
    requests: tuple[RequestCount, ...] = ()
    holders: tuple[str, ...] = ()
    changes: tuple[HelpfulChange, ...] = ()
    reports: tuple[tuple[str, str], ...] = ()
    is_detailed: bool = True
    start: FailedStart | None = None
    moves: str = ""

    @property
    def is_pending(self) -> bool:
        return self.code not in {ALLOCATED, NOT_USED}


class Explainer:
    """Explains claims of one view of the cluster."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._queue = view.queue
        self._reasoning = view.reasoning

    @cached_property
    def _users(self) -> Mapping[Key, list[Pod]]:
        """The pending pods of each claim."""
        users = defaultdict[Key, list[Pod]](list)
        for pod in self._view.snapshot.cluster.pods:
            for key in pod.claims:
                users[key].append(pod)
        return users

    def pending(self, in_detail: Callable[[], bool] = lambda: True) -> Iterator[Explanation]:
        """All pending claims, and pods that lack a claim.

        ``in_detail`` is called for each claim: False leaves out what takes long, requests, holders and changes.
        """
        for pending in self._queue.pending:
            if in_detail():
                yield self.of_pending(pending)
            else:
                yield replace(self._brief(pending, self._view.reasons.get(pending.key)), is_detailed=False)
        yield from map(self._of_reason, self._reasons_without_claim())

    def unprepared(self, *, in_detail: bool = True) -> Iterator[Explanation]:
        """The allocated claims that their nodes can not prepare; ``in_detail``: look up what the controller did."""
        for place, key in enumerate(self._view.failed_starts):
            if (claim := self._view.snapshot.cluster.claims.find(key)) is not None:
                yield self._allocated(claim, in_detail=in_detail and place < MAX_OUTCOMES)

    def unreleased(self) -> Iterator[Explanation]:
        """The claims that their nodes can not release."""
        claims = map(self._view.snapshot.cluster.claims.find, self._view.failed_releases)
        return (self._allocated(claim) for claim in claims if claim is not None)

    def of_pod(self, pod: Pod) -> list[Explanation]:
        def has_pod(pending: PendingClaim) -> bool:
            return any(user.metadata.key == pod.metadata.key for user in pending.pods)

        claims = filter(None, (self._view.snapshot.cluster.claims.find(key) for key in pod.claims))
        return [
            *(self._of_reason(reason) for reason in self._reasons_without_claim() if has_pod(reason.pending)),
            *(self._of_claim_of_pod(claim, pod) for claim in self._queue.pending if has_pod(claim)),
            *(self._allocated(claim) for claim in claims if claim.status.allocation),
        ]

    def _reasons_without_claim(self) -> list[ClaimReason]:
        """The reasons of what is not in the queue, such as pods that lack a claim."""
        keys = {claim.key for claim in self._queue.pending}
        return [reason for key, reason in self._view.reasons.items() if key not in keys]

    def _of_claim_of_pod(self, pending: PendingClaim, pod: Pod) -> Explanation:
        """Why ``pending`` is pending; for one of several pods, the reason of its own if it has one."""
        explanation, alone = self.of_pending(pending), replace(pending, pods=(pod,))
        reason_of_claim = self._view.reasons.get(pending.key)
        reason = dict(reason_of_claim.of_pods).get(pod.metadata.key) if reason_of_claim is not None else None
        if reason is None:
            return explanation
        changes = tuple(changes_that_help(self._reasoning.for_claim(alone), alone))
        explanation_of_pod = replace(explanation, pods=(pod,), reports=_reports((pod,)), changes=changes)
        return replace(explanation_of_pod, code=reason.code.value, message=reason.sentence, permanent=True)

    def of_claim(self, claim: Claim) -> Explanation:
        if claim.status.allocation is not None:
            return self._allocated(claim)
        pending = next(
            (pending for pending in self._queue.pending if pending.claim.metadata.key == claim.metadata.key), None
        )
        if pending is not None:
            return self.of_pending(pending)
        if (reason := self._view.reasons.get(str(claim.metadata.key))) is not None:
            return self._of_reason(reason)
        if claim.metadata.deletion_timestamp:
            message = f"it is being deleted since {claim.metadata.deletion_timestamp}: it is not allocated any more"
            return Explanation(str(claim.metadata.key), (), TERMINATING, message, permanent=True)
        return Explanation(str(claim.metadata.key), (), NOT_USED, NO_POD)

    def of_pending(self, pending: PendingClaim) -> Explanation:
        reason = self._view.reasons.get(pending.key)
        if reason is not None and reason.code in OF_THE_POD:
            return self._of_reason(reason)
        reasoning = self._reasoning.for_claim(pending)
        available = [reasoning.availability(request, pending) for request in self._queue.requests(pending)]
        return replace(
            self._brief(pending, reason),
            requests=tuple(self._counts(pending, available)),
            holders=reasoning.holders(pending),
            changes=tuple(changes_that_help(reasoning, pending)),
        )

    def _brief(self, pending: PendingClaim, reason: ClaimReason | None) -> Explanation:
        """The explanation without what takes long; no ``reason``: the claim is for devices of other drivers."""
        if reason is not None:
            code, message = reason.code.value, reason.text
        else:
            classes = " and ".join(sorted({*pending.claim.class_names}))
            message = (
                f"class {classes} with the claim's selectors selects no device of the driver {self._view.driver}: "
                "it requests devices of other drivers only"
            )
            code = OTHER_DRIVERS
        return Explanation(
            claim="" if pending.not_created else str(pending.claim.metadata.key),
            pods=pending.pods,
            code=code,
            message=message,
            permanent=reason is not None and reason.permanent,
            reports=_reports(pending.pods),
            moves=reason.moves if reason is not None else "",
        )

    def _of_reason(self, reason: ClaimReason) -> Explanation:
        """The explanation of a reason that devices do not change."""
        pending, by_exclusion = reason.pending, dict[Excluded, list[str]]()
        if reason.code not in OF_THE_POD:
            for node, excluded in AllocatedPods(self._queue, self._view.clock).excluded(pending.pods[0]).items():
                by_exclusion.setdefault(excluded, []).append(node)
        return replace(self._brief(pending, reason), changes=tuple(changes_that_admit(by_exclusion)))

    def _counts(self, pending: PendingClaim, available: Sequence[Availability]) -> Iterator[RequestCount]:
        classes = {
            request.name_of(alternative): alternative.device_class_name
            for request in pending.claim.spec.devices.requests
            for alternative in request.alternatives
        }
        for availability in available:
            name = availability.request.name
            yield RequestCount(name, classes.get(name, ""), availability.needs, tuple(_products(availability)))

    def _allocated(self, claim: Claim, *, in_detail: bool = True) -> Explanation:
        key = claim.metadata.key
        users = self._users.get(key, [])
        starting = tuple(pod for pod in users if pod.spec.node_name)
        others = [str(pod.metadata.key) for pod in users if not pod.spec.node_name]
        more = f"; not placed: pod {listed(others)} (tessera why pod/{others[0]})" if others else ""
        allocated = allocated_claim(claim, starting)
        message = f"{allocated.message}{more}"
        if (release := self._view.failed_releases.get(key)) is not None:
            return replace(allocated, code=NOT_RELEASED, message=f"{message}; {release}; {STAYS}")
        start, reads = self._view.failed_starts.get(key), self._view.reads
        if start is None:
            return replace(allocated, message=message)
        outcome = reads.eviction_outcome(start) if in_detail and reads is not None else None
        if outcome is not None:
            message = f"{message}; since {start.unprepared.since}: {outcome}"
        else:
            evictions = (None, None) if reads is None else (reads.evicts_after, reads.controller_silent())
            then = next_step(start, claim, starting, self._view.snapshot, *evictions)
            message = f"{message}; {sentence(start)}; {then}"
        return replace(allocated, code=NOT_PREPARED, message=message, start=start)


def allocated_claim(claim: Claim, pods: tuple[Pod, ...]) -> Explanation:
    """That ``claim`` is allocated, and what; ``pods``: those that start with it."""
    devices = ", ".join(f"{_part(result)}{result.device} of pool {result.pool}" for result in claim.results)
    return Explanation(str(claim.metadata.key), pods, ALLOCATED, f"it is allocated: {devices}")


def _part(result: Result) -> str:
    """What it has of a shared device; empty if it has the device alone."""
    memory = (result.consumed_capacity or {}).get(MEMORY_CAPACITY)
    return f"memory {memory} of " if result.share_id and memory else ""


def _products(available: Availability) -> Iterator[ProductCount]:
    by_product: dict[str, list[SelectedGpu]] = {}
    for gpu in available.selected.gpus:
        by_product.setdefault(gpu.entry.gpu.product_name, []).append(gpu)
    for product, gpus in sorted(by_product.items()):
        free = sum(gpu.now > 0 for gpu in gpus if gpu.blocked_by is None)
        closed = Counter(gpu.blocked_by.value for gpu in gpus if gpu.blocked_by is not None)
        yield ProductCount(product, len(gpus), free, len(gpus) - free - closed.total(), dict(closed))


def _reports(pods: Sequence[Pod]) -> tuple[tuple[str, str], ...]:
    return tuple((pod.metadata.name, report.message) for pod in pods if (report := report_of(pod)) is not None)


def key_of(name: str, namespace: str) -> Key:
    """``NAMESPACE/NAME`` or ``NAME`` in ``namespace``."""
    first, slash, rest = name.partition("/")
    return Key(first, rest) if slash else Key(namespace, name)
