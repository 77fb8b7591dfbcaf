"""What a claim asks for, with its selectors compiled and its alternatives spelled out (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice, product
from typing import NamedTuple

from controller.matching import Matching, Selector
from controller.objects import Claim, Constraint, DeviceClass, DeviceRequest, DeviceSelector, Request
from driver.config.names import meant
from driver.errors import CelError

COMBINATIONS = 64
"""How many combinations of a claim's alternatives are looked at, the scheduler's first ones."""

RESULTS = 32
"""Devices that one claim can be allocated (``resource.k8s.io/v1``)."""


@dataclass(frozen=True, slots=True)
class Ask:
    """``count`` devices of those that ``selector`` selects on a node; None: all of them."""

    request: str
    selector: Selector
    count: int | None


class Rule(NamedTuple):
    """The devices of ``asks``, by position, have the same value of an attribute, or if ``distinct`` different ones."""

    attribute: str
    distinct: bool
    asks: frozenset[int]


class Wish(NamedTuple):
    """Devices of one node that are allocated together."""

    asks: tuple[Ask, ...]
    rules: tuple[Rule, ...] = ()

    @property
    def too_many(self) -> bool:
        return sum(ask.count or 0 for ask in self.asks) > RESULTS


class RefusalCode(StrEnum):
    NO_SUCH_CLASS = "NoSuchClass"
    SELECTOR_REFUSED = "SelectorRefused"


class Refusal(NamedTuple):
    """Why a request can't be held against devices at all."""

    code: RefusalCode
    sentence: str


IsOurs = Callable[[Selector], bool]
"""Whether a selector selects any of our devices."""


class Wishes:
    """Reads claims with the classes there are.

    A request for another driver's devices is left out: it says nothing of our attributes and selects none of our
    devices (``selects_ours``). So is one with adminAccess, as far as it can be read.
    """

    def __init__(self, matching: Matching, classes: Iterable[DeviceClass], selects_ours: IsOurs) -> None:
        self._matching = matching
        self._classes: Mapping[str, DeviceClass] = {each.metadata.name: each for each in classes}
        self._selects_ours = selects_ours

    def of(self, claim: Claim) -> tuple[Wish, ...] | Refusal:
        """One wish for each combination of alternatives, in the scheduler's order; none for other drivers' claims."""
        devices = claim.spec.devices
        choices: list[list[tuple[str, str, Ask | None]]] = []
        for request in devices.requests:
            asks = []
            for alternative in request.alternatives:
                ask = self._ask(request, alternative)
                if isinstance(ask, Refusal):
                    return ask
                asks.append((request.name, f"{request.name}/{alternative.name}", ask))
            choices.append(asks)
        wishes = (_wish(chosen, devices.constraints) for chosen in islice(product(*choices), COMBINATIONS))
        return tuple(wish for wish in wishes if wish.asks)

    def _ask(self, request: Request, wanted: DeviceRequest) -> Ask | Refusal | None:
        """None where it is none of our business."""
        device_class = self._classes.get(wanted.device_class_name)
        if device_class is None:
            sentence = f"request {request.name}: there is no DeviceClass {wanted.device_class_name!r}"
            return Refusal(RefusalCode.NO_SUCH_CLASS, sentence + meant(wanted.device_class_name, self._classes))
        expressions = (*texts(device_class.spec.selectors), *texts(wanted.selectors))
        amounts = wanted.capacity.requests if wanted.capacity is not None else {}
        selector = self._matching.selector((*expressions, *capacity_conditions(self._matching.driver, amounts)))
        ours = self._matching.is_about_us(expressions)
        if isinstance(selector, CelError):
            return _refused(request, selector) if ours else None
        if not ours and not self._selects_ours(selector):
            return None
        if wanted.admin_access:  # it takes nothing from anybody: devices that others hold would do
            return None
        return Ask(request.name, selector, None if wanted.takes_all else wanted.count)


def joined(wishes: Sequence[Wish]) -> Wish:
    """Several claims' wishes as one: a pod's claims are met on one node."""
    asks: list[Ask] = []
    rules: list[Rule] = []
    for wish in wishes:
        shift = len(asks)
        rules += [rule._replace(asks=frozenset(shift + each for each in rule.asks)) for rule in wish.rules]
        asks += wish.asks
    return Wish(tuple(asks), tuple(rules))


def texts(selectors: Iterable[DeviceSelector]) -> Iterator[str]:
    """The CEL expressions of a class or request."""
    return (each.cel.expression for each in selectors if each.cel is not None)


def capacity_conditions(driver: str, amounts: Mapping[str, str | int]) -> Iterator[str]:
    """A request for capacity as CEL: devices that have that much, of each.

    The scheduler compares names as the slices spell them (1.37.1), and ours are without a domain.
    """
    for name, amount in sorted(amounts.items()):
        there = f'"{name}" in device.capacity["{driver}"]'
        enough = f'device.capacity["{driver}"]["{name}"].compareTo(quantity("{amount}")) >= 0'
        yield f"{there} && {enough}" if "/" not in name else "false"


def _wish(chosen: Sequence[tuple[str, str, Ask | None]], constraints: Iterable[Constraint]) -> Wish:
    ours = [(names, ask) for *names, ask in chosen if ask is not None]
    rules = []
    for each in constraints:
        covered = frozenset(
            index for index, (names, _) in enumerate(ours) if not each.requests or set(names) & set(each.requests)
        )
        for attribute, distinct in ((each.match_attribute, False), (each.distinct_attribute, True)):
            if attribute and covered:
                rules.append(Rule(attribute, distinct, covered))
    return Wish(tuple(ask for _, ask in ours), tuple(rules))


def _refused(request: Request, error: CelError) -> Refusal:
    where = "" if error.position is None else f"at character {error.position + 1}: "
    sentence = f"request {request.name}: the selector {error.expression!r} can't be evaluated: {where}{error}"
    return Refusal(RefusalCode.SELECTOR_REFUSED, sentence)
