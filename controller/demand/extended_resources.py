"""Extended resources for which DeviceClasses stand (KEP-5004), and the claims that the scheduler makes (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deviceclasses.cel.library.quantity import parse_quantity
from deviceclasses.cel.values import EvaluationError
from driver.kube.types import (
    Claim,
    ClaimSpec,
    Container,
    DeviceClaim,
    DeviceClass,
    ExactDeviceRequest,
    Metadata,
    Pod,
    Request,
)

IMPLICIT = "deviceclass.resource.kubernetes.io/"
"""The prefix of the extended resource that every class has, before its name."""

ALWAYS = "Always"
"""The restart policy of an init container that keeps running beside the others (a sidecar)."""


def classes_by_resource(classes: Iterable[DeviceClass]) -> dict[str, str]:
    """Class names by extended resource. Of several classes the newest counts, then the first by name."""
    ordered = sorted(classes, key=lambda each: each.metadata.name, reverse=True)
    ordered.sort(key=lambda each: each.metadata.creation_timestamp or "")
    explicit = {each.spec.extended_resource_name: each.metadata.name for each in ordered}
    implicit = {IMPLICIT + each.metadata.name: each.metadata.name for each in ordered}
    return implicit | {resource: name for resource, name in explicit.items() if resource}


def claim_for(pod: Pod, by_resource: Mapping[str, str]) -> Claim | None:
    """The claim that the scheduler will create for the pod's extended resources, if it requests any and has none."""
    if pod.status.extended_resource_claim_status is not None or pod.spec.node_name:
        return None
    requested = {name for each in (*pod.spec.init_containers, *pod.spec.containers) for name in _requests(each)}
    names = {name for name in requested if name in by_resource or name.startswith(IMPLICIT)}
    counts = {name: _amount(pod, name) for name in sorted(names)}
    requests = tuple(
        Request(name, ExactDeviceRequest(by_resource.get(name, name.removeprefix(IMPLICIT)), count=count))
        for name, count in counts.items()
        if count
    )
    if not requests:
        return None
    return Claim(Metadata(name=pod.metadata.name, namespace=pod.metadata.namespace), ClaimSpec(DeviceClaim(requests)))


def _requests(container: Container) -> Mapping[str, str | int]:
    """Requests by resource. The API server sets them from limits; objects from other sources may lack them."""
    return {**container.resources.limits, **container.resources.requests}


def _amount(pod: Pod, resource: str) -> int:
    """The most devices used at once: by all containers, or by one init container and the sidecars before it."""
    running = most = 0
    for container in pod.spec.init_containers:
        amount = _whole(_requests(container).get(resource, 0))
        if container.restart_policy == ALWAYS:
            running += amount
            amount = 0
        most = max(most, running + amount)
    return max(most, running + sum(_whole(_requests(each).get(resource, 0)) for each in pod.spec.containers))


def _whole(quantity: str | int) -> int:
    """A number of devices; 0 for invalid quantities, which the API server never stores."""
    try:
        return parse_quantity(str(quantity)).whole or 0
    except EvaluationError:
        return 0
