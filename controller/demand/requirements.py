"""The requirements of claims: their requests with compiled selectors, for each combination of alternatives (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product, repeat
from typing import Literal, NamedTuple

from controller.cluster.fleet import Fleet
from controller.demand.selected_devices import Selector, Selectors
from driver.config.suggestions import meant
from driver.errors import CelError
from driver.kube.types import (
    Claim,
    DeviceClass,
    DeviceConstraint,
    DeviceSelector,
    ExactDeviceRequest,
    Request,
    Toleration,
)

MAX_COMBINATIONS = 64
"""Combinations of a claim's alternatives that are considered, in the scheduler's order."""

MAX_DEVICES = 32
"""Devices that one claim can be allocated (``resource.k8s.io/v1``); the search for devices refuses more."""

SHOWN_CLASSES = 6
"""DeviceClasses that a message names."""


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """``count`` of the devices that ``selector`` selects on a node; None: all of them.

    ``name`` is ``REQUEST/ALTERNATIVE`` for one of several alternatives, as the scheduler writes it.
    """

    name: str
    selector: Selector
    count: int | None
    device_class: str = ""
    class_selectors: frozenset[str] = frozenset()
    """The expressions that the class adds to those of the request."""
    tolerations: tuple[Toleration, ...] = ()
    """Of taints of devices."""


class AttributeConstraint(NamedTuple):
    """Devices of ``requests``, by position, share the value of an attribute; if ``distinct``, all values differ."""

    attribute: str
    distinct: bool
    requests: frozenset[int]


class ClaimRequirements(NamedTuple):
    """Devices that are allocated together on one node.

    ``claims``: for each request the index of its claim within the pod; empty if all requests are of one claim.
    """

    requests: tuple[DeviceRequest, ...]
    constraints: tuple[AttributeConstraint, ...] = ()
    claims: tuple[int, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """For each claim the number of its devices, without those of requests for all devices."""
        counts = dict.fromkeys(self.claims or (0,), 0)
        for claim, request in zip(self.claims or repeat(0), self.requests, strict=False):
            counts[claim] += request.count or 0
        return tuple(counts.values())


class RefusedRequest(NamedTuple):
    """The reason why a request can't be evaluated."""

    code: Literal["NoSuchClass", "SelectorRefused"]
    sentence: str


class RequirementsReader:
    """Reads claims with the present DeviceClasses.

    Requests for other drivers' devices are left out: they read no attribute of this driver and select
    none of the fleet. So are requests with adminAccess that can be read: ``matching_held`` returns them.
    """

    def __init__(self, selectors: Selectors, classes: Iterable[DeviceClass], fleet: Fleet) -> None:
        self._selectors = selectors
        self._classes: Mapping[str, DeviceClass] = {
            device_class.metadata.name: device_class for device_class in classes
        }
        self._fleet = fleet

    def of(self, claim: Claim) -> tuple[ClaimRequirements, ...] | RefusedRequest:
        """The requirements for each combination of alternatives, in the scheduler's order; none for other drivers."""
        devices = claim.spec.devices
        choices: list[list[tuple[str, str, DeviceRequest | None]]] = []
        for request in devices.requests:
            alternatives = []
            for alternative in request.alternatives:
                selector = self._selector(request, alternative, claim.metadata.namespace)
                if isinstance(selector, RefusedRequest):
                    return selector
                read = None
                if selector is not None and not alternative.admin_access:  # which needs no free device
                    read = self._request(request, alternative, selector)
                alternatives.append((request.name, request.name_of(alternative), read))
            choices.append(alternatives)
        combinations = islice(product(*choices), MAX_COMBINATIONS)
        joint = (_requirements(chosen, devices.constraints) for chosen in combinations)
        return tuple(requirements for requirements in joint if requirements.requests)

    def matching_held(self, claim: Claim) -> Iterator[DeviceRequest]:
        """The requests that match held devices, too: with adminAccess, or for all devices of a node."""
        for request in claim.spec.devices.requests:
            for wanted in request.alternatives:
                if wanted.admin_access or wanted.takes_all:
                    read = self._selector(request, wanted, claim.metadata.namespace)
                    if isinstance(read, Selector):
                        yield self._request(request, wanted, read)

    def selector_of(self, wanted: ExactDeviceRequest, namespace: str) -> Selector | None:
        """What a request of a claim in ``namespace`` selects; None if that is nothing of ours."""
        selector = self._selector(Request(""), wanted, namespace)
        return selector if isinstance(selector, Selector) else None

    def _request(self, request: Request, wanted: ExactDeviceRequest, selector: Selector) -> DeviceRequest:
        name, count = request.name_of(wanted), None if wanted.takes_all else wanted.count
        of_class = frozenset(_texts(self._classes[wanted.device_class_name].spec.selectors))
        return DeviceRequest(name, selector, count, wanted.device_class_name, of_class, wanted.tolerations)

    def _selector(
        self, request: Request, wanted: ExactDeviceRequest, namespace: str
    ) -> Selector | RefusedRequest | None:
        """None for requests for other drivers' devices."""
        device_class = self._classes.get(wanted.device_class_name)
        if device_class is None:
            sentence = f"request {request.name_of(wanted)}: there is no DeviceClass {wanted.device_class_name!r}"
            names = sorted(self._classes, key=lambda name: (len(name), name))
            more = f" and {len(names) - SHOWN_CLASSES} more" if len(names) > SHOWN_CLASSES else ""
            there = f"; there are {', '.join(names[:SHOWN_CLASSES])}{more}" if names else "; the cluster has none"
            return RefusedRequest("NoSuchClass", sentence + (meant(wanted.device_class_name, self._classes) or there))
        expressions = (*_texts(device_class.spec.selectors), *_texts(wanted.selectors))
        amounts = None if wanted.capacity is None else wanted.capacity.requests
        conditions = tuple(_capacity_conditions(self._selectors.driver, amounts)) if amounts else ()
        payer = namespace if wanted.selectors or conditions else ""
        selector = self._selectors.selector(expressions, conditions, payer)
        if isinstance(selector, CelError):
            may_be_about_us = any(self._selectors.driver in text for text in expressions)
            return _refused(request.name_of(wanted), selector) if may_be_about_us else None
        if not selector.is_about_us and not any(matches for matches, _ in selector.among(self._fleet)):
            return None
        return selector


def joined(claims: Sequence[ClaimRequirements]) -> ClaimRequirements:
    """The requirements of several claims as one: those of a pod are allocated on one node."""
    if len(claims) == 1:
        return claims[0]
    requests: list[DeviceRequest] = []
    constraints: list[AttributeConstraint] = []
    numbers: list[int] = []
    for number, claim in enumerate(claims):
        shift = len(requests)
        constraints += [
            constraint._replace(requests=frozenset(shift + index for index in constraint.requests))
            for constraint in claim.constraints
        ]
        requests += claim.requests
        numbers += [number] * len(claim.requests)
    return ClaimRequirements(tuple(requests), tuple(constraints), tuple(numbers))


def _texts(selectors: Iterable[DeviceSelector]) -> Iterator[str]:
    return (selector.cel.expression for selector in selectors if selector.cel is not None)


def _capacity_conditions(driver: str, amounts: Mapping[str, str | int]) -> Iterator[str]:
    """Requested capacities as CEL conditions.

    The scheduler compares names as the slices spell them (1.37.1). Ours have no domain: no device has a capacity whose
    name has one.
    """
    for name, amount in sorted(amounts.items()):
        there = f'"{name}" in device.capacity["{driver}"]'
        enough = f'device.capacity["{driver}"]["{name}"].compareTo(quantity("{amount}")) >= 0'
        yield f"{there} && {enough}" if "/" not in name else there


def _requirements(
    chosen: Sequence[tuple[str, str, DeviceRequest | None]], constraints: Iterable[DeviceConstraint]
) -> ClaimRequirements:
    ours = [(names, request) for *names, request in chosen if request is not None]
    covering = []
    for constraint in constraints:
        named = set(constraint.requests)
        covered = frozenset(index for index, (names, _) in enumerate(ours) if not named or named & set(names))
        for attribute, distinct in ((constraint.match_attribute, False), (constraint.distinct_attribute, True)):
            if attribute and covered:
                covering.append(AttributeConstraint(attribute, distinct, covered))
    return ClaimRequirements(tuple(request for _, request in ours), tuple(covering))


def _refused(request: str, error: CelError) -> RefusedRequest:
    where = "" if error.position is None else f"at character {error.position + 1}: "
    sentence = f"request {request}: the selector {error.expression!r} can't be evaluated: {where}{error}"
    return RefusedRequest("SelectorRefused", sentence)
