"""The requirements of claims: their requests with compiled selectors, for each combination of alternatives (pure).

It also finds the kinds of devices that all claims and templates of the cluster ask for, pending or not: a larger
profile is offered before a claim waits for it only if one of them asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product, repeat
from typing import Literal, NamedTuple

from controller.cluster.claim_index import ClusterState, WrittenSpec
from controller.cluster.fleet import Fleet
from controller.demand.selected_devices import Selector, Selectors
from driver.config.suggestions import meant
from driver.errors import CelError
from driver.kube.types import (
    MAX_DEVICES,
    Claim,
    ClaimSpec,
    DeviceClass,
    DeviceConstraint,
    DeviceSelector,
    ExactDeviceRequest,
    Metadata,
    Quantity,
    Request,
    Toleration,
)
from driver.model.offer import SHARED, OfferKind
from driver.model.shared_memory import MEMORY_CAPACITY

MAX_COMBINATIONS = 64
"""Combinations of a claim's alternatives that are considered, in the scheduler's order."""

MAX_SPECS = 512
"""Maximum distinct specs of claims, and of templates, whose kinds are considered: tenants may write any number."""

SHOWN_CLASSES = 6
"""DeviceClasses that a message names."""


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """``count`` of the devices that ``selector`` selects on a node; None: all of them.

    A claim may ask for up to 2^63 devices. ``count`` is at most one more than a claim can have, which no search can
    satisfy and any loop can afford; ``excess`` is how many more were written, for messages.
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
    excess: int = 0

    @property
    def written_count(self) -> int:
        """The number of devices in the claim; 0 for all devices."""
        return (self.count or 0) + self.excess


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


class ReadClaim(NamedTuple):
    """``requirements``: for each combination of alternatives, in the scheduler's order; none for other drivers.

    ``requests_for_all``: the requests for all devices of a node, which match held devices, too. ``monitoring``: the
    requests with adminAccess, for monitor devices.
    """

    requirements: tuple[ClaimRequirements, ...] | RefusedRequest
    requests_for_all: tuple[DeviceRequest, ...]
    monitoring: tuple[DeviceRequest, ...]


class RequirementsReader:
    """Reads claims with the present DeviceClasses.

    Requests for other drivers' devices are left out: they read no attribute of this driver and select none of the
    fleet. Requests with adminAccess get monitor devices, which are always free: they are not among the requirements.
    """

    def __init__(self, selectors: Selectors, classes: Iterable[DeviceClass], fleet: Fleet) -> None:
        self._selectors = selectors
        self._classes: Mapping[str, DeviceClass] = {
            device_class.metadata.name: device_class for device_class in classes
        }
        self._fleet = fleet

    def read(self, claim: Claim) -> ReadClaim:
        """What ``claim`` requires. Its first request that can't be evaluated makes it refused."""
        devices, refused = claim.spec.devices, list[RefusedRequest]()
        choices: list[list[tuple[str, str, DeviceRequest | None]]] = []
        requests_for_all: list[DeviceRequest] = []
        monitoring: list[DeviceRequest] = []
        for request in devices.requests:
            alternatives = []
            for alternative in request.alternatives:
                selector = self._selector(request, alternative, claim.metadata.namespace)
                required = None
                if isinstance(selector, RefusedRequest):
                    refused.append(selector)
                elif selector is not None:
                    written, class_name = alternative.count, alternative.device_class_name
                    count = None if alternative.takes_all else min(written, MAX_DEVICES + 1)
                    request_read = DeviceRequest(
                        request.name_of(alternative),
                        selector,
                        count,
                        class_name,
                        frozenset(_texts(self._classes[class_name].spec.selectors)),
                        alternative.tolerations,
                        excess=0 if count is None else written - count,
                    )
                    if alternative.admin_access:
                        monitoring.append(request_read)
                    else:
                        required = request_read
                        requests_for_all += [request_read] if alternative.takes_all else []
                alternatives.append((request.name, request.name_of(alternative), required))
            choices.append(alternatives)
        if refused:
            return ReadClaim(refused[0], (), ())
        combinations = islice(product(*choices), MAX_COMBINATIONS)
        joint = (_requirements(chosen, devices.constraints) for chosen in combinations)
        requirements = tuple(requirements for requirements in joint if requirements.requests)
        return ReadClaim(requirements, tuple(requests_for_all), tuple(monitoring))

    def selector_of(self, alternative: ExactDeviceRequest, namespace: str) -> Selector | None:
        """What a request of a claim in ``namespace`` selects; None: nothing of ours, or it can't be evaluated."""
        selector = self._selector(Request(""), alternative, namespace)
        return selector if isinstance(selector, Selector) else None

    def selector_of_any(
        self, alternative: ExactDeviceRequest, namespace: str, driver: str
    ) -> Selector | CelError | None:
        """What a request of a claim in ``namespace`` selects of ``driver``; None: its class does not exist."""
        device_class = self._classes.get(alternative.device_class_name)
        if device_class is None:
            return None
        amounts = {} if alternative.capacity is None else alternative.capacity.requests
        conditions = tuple(_capacity_conditions(driver, amounts)) if amounts else ()
        charged_namespace = namespace if alternative.selectors or conditions else ""
        expressions = tuple(_texts((*device_class.spec.selectors, *alternative.selectors)))
        return self._selectors.selector(expressions, conditions, amounts.get(MEMORY_CAPACITY), charged_namespace)

    def _selector(
        self, request: Request, alternative: ExactDeviceRequest, namespace: str
    ) -> Selector | RefusedRequest | None:
        """None for requests for other drivers' devices."""
        class_name, name = alternative.device_class_name, request.name_of(alternative)
        selector = self.selector_of_any(alternative, namespace, self._selectors.driver)
        if selector is None:
            sentence = f"request {name}: there is no DeviceClass {class_name!r}"
            names = sorted(self._classes, key=lambda name: (len(name), name))
            more = f" and {len(names) - SHOWN_CLASSES} more" if len(names) > SHOWN_CLASSES else ""
            there = f"; there are {', '.join(names[:SHOWN_CLASSES])}{more}" if names else "; the cluster has none"
            return RefusedRequest("NoSuchClass", sentence + (meant(class_name, self._classes) or there))
        if isinstance(selector, CelError):
            texts = _texts((*self._classes[class_name].spec.selectors, *alternative.selectors))
            may_be_about_us = any(self._selectors.driver in text for text in texts)
            return _refused(name, selector) if may_be_about_us else None
        if not selector.reads_our_attributes and not any(matches for matches, _ in selector.among(self._fleet)):
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


def _capacity_conditions(driver: str, amounts: Mapping[str, Quantity]) -> Iterator[str]:
    """Requested capacities as CEL conditions.

    The scheduler compares a requested name with that in the slice as written (1.37.1). This driver's capacities have no
    domain, so the condition for a name with a domain is always false.
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


class AskedKinds(NamedTuple):
    """``kinds``: the smallest that each request selects. ``choices``: all of them, for requests that select several.

    ``gib``: the most memory of a shared device that a request asks for; 0: none asks for any.
    """

    kinds: frozenset[OfferKind] = frozenset()
    choices: frozenset[frozenset[OfferKind]] = frozenset()
    gib: int = 0


NOTHING_ASKED = AskedKinds()


SmallestFirst = Callable[[Selector], Sequence[tuple[OfferKind, frozenset[int] | None, int]]]
"""Returns what a selector selects in the whole cluster, the smallest first: kinds, starts of their placements, and what
a claim would have of a shared device."""


@dataclass
class AskedKindsMemory:
    """The kinds that claims and templates ask for, remembered while the hardware is the same.

    ``of_spec``: the kinds that one spec asks for, by identity of the spec.
    """

    classes: tuple[DeviceClass, ...] = ()
    written: tuple[object, ...] | None = None
    of_spec: dict[int, tuple[ClaimSpec, AskedKinds]] = field(default_factory=dict)
    asked: AskedKinds = NOTHING_ASKED

    def update(self, cluster: ClusterState, reader: RequirementsReader, smallest_first: SmallestFirst) -> AskedKinds:
        """The kinds that all claims, allocated or not, and all templates ask for, in every alternative of a request."""
        if self.classes != cluster.classes:
            self.classes, self.written, self.of_spec = cluster.classes, None, {}
        written = (cluster.claims.specs, cluster.templates)
        if self.written != written:
            before, self.of_spec, self.written = self.of_spec, {}, written
            of_templates = (WrittenSpec(at.metadata.namespace, at.spec.spec) for at in cluster.templates[:MAX_SPECS])
            for namespace, spec in (*of_templates, *cluster.claims.specs[:MAX_SPECS]):
                remembered = before.get(id(spec))
                asked = _asked_by(spec, namespace, reader, smallest_first) if remembered is None else remembered[1]
                self.of_spec[id(spec)] = spec, asked
            by_spec = [asked for _, asked in self.of_spec.values()]
            self.asked = AskedKinds(
                frozenset[OfferKind]().union(*(asked.kinds for asked in by_spec)),
                frozenset[frozenset[OfferKind]]().union(*(asked.choices for asked in by_spec)),
                max((asked.gib for asked in by_spec), default=0),
            )
        return self.asked


def _asked_by(spec: ClaimSpec, namespace: str, reader: RequirementsReader, smallest_first: SmallestFirst) -> AskedKinds:
    kinds, choices, gib = set[OfferKind](), set[frozenset[OfferKind]](), 0
    requirements = reader.read(Claim(Metadata("", namespace), spec)).requirements
    combinations = () if isinstance(requirements, RefusedRequest) else requirements
    requests = (request for combination in combinations for request in combination.requests)
    for selector in {request.selector for request in requests if request.count is not None}:
        selected = smallest_first(selector)
        kinds |= {kind for kind, *_ in selected[:1]}
        gib = max([gib, *(part for *_, part in selected[:1])])
        exclusive = frozenset(kind for kind, *_ in selected if kind != SHARED)
        if len(exclusive) > 1:
            choices.add(exclusive)
    return AskedKinds(frozenset(kinds), frozenset(choices), gib)
