"""Which claims wait for devices, and for which pods (pure).

The scheduler allocates only for pods that it is about to place: a claim without such a pod wants nothing. A pod that
asks by extended resource has no claim before it is placed (KEP-5004); the one it will get is worked out here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from controller.objects import (
    Claim,
    ClaimSpec,
    Container,
    DeviceClaim,
    DeviceClass,
    DeviceRequest,
    Metadata,
    Pod,
    Request,
)
from deviceclasses.cel.library.quantity import parse_quantity
from deviceclasses.cel.values import EvaluationError
from driver.kube.objects import Key

IMPLICIT = "deviceclass.resource.kubernetes.io/"
"""Before the name of a class: an extended resource that every class has."""

ALWAYS = "Always"
"""The restart policy of an init container that goes on running beside the others."""


@dataclass(frozen=True, eq=False)
class Waiting:
    """``claim`` is not allocated; ``pods`` wait for it. ``made_up``: it exists only once the pod is placed."""

    claim: Claim
    pods: tuple[Pod, ...]
    made_up: bool = False

    @property
    def key(self) -> str:
        """``namespace/name`` of the claim, or of the pod that has none yet."""
        return self.claim.metadata.path


def waiting_claims(claims: Iterable[Claim], classes: Iterable[DeviceClass], pods: Iterable[Pod]) -> list[Waiting]:
    """Everything that waits, in the order of ``claims``, then of ``pods``."""
    queued = [pod for pod in pods if waits(pod)]
    users: dict[Key, list[Pod]] = {}
    for pod in queued:
        for key in claims_of(pod):
            users.setdefault(key, []).append(pod)
    found = [
        Waiting(claim, tuple(users[claim.metadata.key]))
        for claim in claims
        if claim.metadata.key in users and claim.status.allocation is None and not claim.metadata.deletion_timestamp
    ]
    by_resource = classes_by_resource(classes)
    made_up = ((pod, claim_for(pod, by_resource)) for pod in queued)
    return [*found, *(Waiting(claim, (pod,), made_up=True) for pod, claim in made_up if claim is not None)]


def waits(pod: Pod) -> bool:
    """Whether the scheduler is at work on it, or would be if it could be placed."""
    return pod.status.phase == "Pending" and not pod.metadata.deletion_timestamp and not pod.spec.scheduling_gates


def claims_of(pod: Pod) -> Iterator[Key]:
    """The pod's claims, as far as they have a name yet."""
    generated = {each.name: each.resource_claim_name for each in pod.status.resource_claim_statuses}
    extended = pod.status.extended_resource_claim_status
    named = [each.resource_claim_name or generated.get(each.name) for each in pod.spec.resource_claims]
    for name in (*named, extended.resource_claim_name if extended else None):
        if name:
            yield Key(pod.metadata.namespace, name)


def classes_by_resource(classes: Iterable[DeviceClass]) -> dict[str, str]:
    """Class names by extended resource. Of two with the same one the newer class has it, then the first by name."""
    ordered = sorted(classes, key=lambda each: each.metadata.name, reverse=True)
    ordered.sort(key=lambda each: each.metadata.creation_timestamp or "")
    explicit = {each.spec.extended_resource_name: each.metadata.name for each in ordered}
    implicit = {IMPLICIT + each.metadata.name: each.metadata.name for each in ordered}
    return implicit | {resource: name for resource, name in explicit.items() if resource}


def claim_for(pod: Pod, by_resource: Mapping[str, str]) -> Claim | None:
    """The claim that the scheduler will make for the pod's extended resources, if it asks for any and has none."""
    if pod.status.extended_resource_claim_status is not None or pod.spec.node_name:
        return None
    names = {name for each in _containers(pod) for name in _requests(each) if name in by_resource or _implicit(name)}
    counts = {name: _amount(pod, name) for name in sorted(names)}
    requests = tuple(
        Request(name, DeviceRequest(by_resource.get(name, name.removeprefix(IMPLICIT)), count=count))
        for name, count in counts.items()
        if count
    )
    if not requests:
        return None
    return Claim(Metadata(name=pod.metadata.name, namespace=pod.metadata.namespace), ClaimSpec(DeviceClaim(requests)))


def _implicit(name: str) -> bool:
    return name.startswith(IMPLICIT)


def _containers(pod: Pod) -> tuple[Container, ...]:
    return (*pod.spec.init_containers, *pod.spec.containers)


def _requests(container: Container) -> Mapping[str, str | int]:
    """The API server fills in requests from limits; what comes from elsewhere may lack them."""
    return {**container.resources.limits, **container.resources.requests}


def _amount(pod: Pod, resource: str) -> int:
    """Devices at once: those of all containers, or of the hungriest init container with what runs beside it."""
    beside = most = 0
    for container in pod.spec.init_containers:
        amount = _whole(_requests(container).get(resource, 0))
        if container.restart_policy == ALWAYS:
            beside += amount
            amount = 0
        most = max(most, beside + amount)
    return max(most, beside + sum(_whole(_requests(each).get(resource, 0)) for each in pod.spec.containers))


def _whole(quantity: str | int) -> int:
    """A number of devices; what is none asks for nothing, as the API server never stores it."""
    try:
        return parse_quantity(str(quantity)).whole or 0
    except EvaluationError:
        return 0
