"""How much of a resource a pod requests, as the scheduler counts it (pure).

Its containers run together with the sidecars; before that, each init container runs with the sidecars that have been
started (KEP-753). ``spec.resources`` replaces what they need (KEP-2837), and the overhead of the RuntimeClass is added
(KEP-688).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

from deviceclasses.cel.library.quantity import parse_quantity
from deviceclasses.cel.values import EvaluationError
from driver.kube.types import Container, PodSpec, Quantity

SIDECAR = "Always"
"""The restartPolicy of an init container that goes on running."""


class RequestedAmount(NamedTuple):
    """A part of what a pod requests, as written; ``source`` says whose it is, "" for a container's."""

    amount: Quantity
    source: str = ""

    def __str__(self) -> str:
        return f"{self.amount} of {self.source}" if self.source else str(self.amount)


def requested(spec: PodSpec, resource: str) -> tuple[RequestedAmount, ...]:
    """The parts that such a pod needs at once, which the scheduler adds up; empty: it requests none."""
    most: tuple[RequestedAmount, ...] = ()
    sidecars: tuple[RequestedAmount, ...] = ()
    needed = of_sidecars = Fraction()  # added up on the way: tenants choose how many containers there are
    for container in spec.init_containers:
        if container.restart_policy == SIDECAR:
            part = _part(container, resource, f"sidecar {container.name}")
            sidecars, of_sidecars = sidecars + part, of_sidecars + total(part)
        else:
            part = _part(container, resource, f"init container {container.name}")
            if (amount := of_sidecars + total(part)) > needed:
                most, needed = (*part, *sidecars), amount
    running = *(part for container in spec.containers for part in _part(container, resource)), *sidecars
    most = max(running, most, key=total)
    of_pod = None if spec.resources is None else _requests(spec.resources.requests, spec.resources.limits).get(resource)
    parts = most if of_pod is None else (RequestedAmount(of_pod, "spec.resources"),)
    overhead = spec.overhead.get(resource)
    return parts if overhead is None else (*parts, RequestedAmount(overhead, "the overhead of its RuntimeClass"))


def total(parts: Iterable[RequestedAmount]) -> Fraction:
    """The sum; what is no quantity, which the API server never stores, counts as 0."""
    return sum((_value(part.amount) for part in parts), Fraction())


def _part(container: Container, resource: str, source: str = "") -> tuple[RequestedAmount, ...]:
    amount = _requests(container.resources.requests, container.resources.limits).get(resource)
    return () if amount is None else (RequestedAmount(amount, source),)


def _requests(requests: Mapping[str, Quantity], limits: Mapping[str, Quantity]) -> Mapping[str, Quantity]:
    """Requests by resource. The API server sets them from limits; objects from other sources may lack them."""
    return {**limits, **requests}


def _value(quantity: Quantity) -> Fraction:
    try:
        return max(Fraction(), Fraction(parse_quantity(str(quantity)).value))
    except EvaluationError:
        return Fraction()
