"""What is wrong with CEL selectors: they don't compile, read what nobody publishes, or fail on some device.

One error on one device that the scheduler looks at stops the whole pod, so each selector is held against a device of
each kind of ours, and one of another driver. Values there are made up; which names a device has is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from deviceclasses.cel import CelDevice, Program, from_slice_device
from deviceclasses.comparing import comparison_issues
from deviceclasses.documents import misspelt
from deviceclasses.findings import Issue, Severity
from deviceclasses.passing import compared, compiled, may_select, sound
from deviceclasses.published import (
    ATTRIBUTES,
    CAPACITIES,
    IN_STANDARD,
    STANDARD_DOMAIN,
    TYPES,
    names_of,
    unpublished,
    values,
)
from deviceclasses.requests import selectors_of
from driver.config.names import meant
from driver.config.schema import shown
from driver.errors import CelError
from driver.model.device import DeviceKind
from driver.slices.attributes import FACTS, NO_PROFILE, STANDARD

MADE_UP = {"string": "", "int": 0, "bool": False, "version": "0.0.0"}
ANY_PROFILE = "1g.10gb"
MISSING = "no such key: "
SURE = (MISSING, "no such overload")
"""Errors that come of names and types, whatever the values are."""

KINDS = {DeviceKind.FULL: "a full GPU", DeviceKind.PARTITION: "a partition", DeviceKind.SHARE: "a share"}


def selector_issues(owner: Mapping[str, Any], path: str, driver: str, before: Iterable[str] = ()) -> Iterator[Issue]:
    """The issues of ``owner``'s selectors; ``before`` are those of its class, which are asked first."""
    earlier = list(before)
    for place, expression in selectors_of(owner, path):
        program = compiled(expression)
        if isinstance(program, CelError):
            yield _refused(place, program, expression)
            continue
        wrong = [*_wrong_names(place, program, driver), *comparison_issues(place, expression, driver)]
        yield from wrong or _failures(place, program, earlier, driver)
        earlier.append(expression)


def selects_nothing(expressions: tuple[str, ...], path: str, driver: str) -> Iterator[Issue]:
    """Selectors, sound by themselves, that are about our devices and let none of them pass."""
    ours = any(
        driver in {domain for _, domain, _ in each.mentions.reads} | compared([each]) for each in sound(expressions)
    )
    if ours and not may_select(expressions, driver):
        message = "selects none of Tessera's devices: none has the type and profile that it asks for"
        yield Issue(f"{path}.selectors", "", message, Severity.WARNING)


def _wrong_names(place: str, program: Program, driver: str) -> Iterator[Issue]:
    for section, domain, name in program.mentions.reads:
        if domain == driver and name not in (ATTRIBUTES if section == "attributes" else CAPACITIES):
            yield Issue(place, shown(name), unpublished(section, name, domain))
        elif close := misspelt(domain, [driver, STANDARD_DOMAIN]):
            message = f"is almost a domain of Tessera's devices; did you mean {close}?"
            yield Issue(place, shown(domain), message, Severity.WARNING)
        elif domain == STANDARD_DOMAIN and misspelt(name, list(IN_STANDARD)):
            message = f"Tessera publishes no such name in {domain}{meant(name, IN_STANDARD)}"
            yield Issue(place, shown(name), message, Severity.WARNING)


def _failures(place: str, program: Program, before: Iterable[str], driver: str) -> Iterator[Issue]:
    earlier = sound(before)
    profiles = compared([program, *earlier]) & {*values()["profile"].accepted} - {NO_PROFILE}
    for name, device in _samples(driver, profiles or frozenset({ANY_PROFILE})):
        verdict = program.verdict(device)
        if (
            isinstance(verdict, str)
            and verdict.startswith(SURE)
            and all(each.verdict(device) is True for each in earlier)
        ):
            message = (
                f"fails on {name}, which stops the pod's scheduling: {verdict}; {_remedy(program, verdict, driver)}"
            )
            yield Issue(place, shown(program.expression), message)
            return


def _remedy(program: Program, verdict: str, driver: str) -> str:
    """What to write instead."""
    if not verdict.startswith(MISSING):
        full = {driver: "", STANDARD_DOMAIN: STANDARD}
        read = [
            (name, TYPES.get(f"{full[domain]}{name}")) for _, domain, name in program.mentions.reads if domain in full
        ]
        told = ", ".join(f"{name} is a {kind}" for name, kind in read if kind)
        return f"{told or 'each has one type'} (docs/attributes.md)"
    key = verdict.removeprefix(MISSING)
    having = [kind for kind in DeviceKind if key in names_of(kind)]
    kinds = " || ".join(f'.type == "{kind}"' for kind in having) if len(having) < len(DeviceKind) else ".type"
    kinds = f"({kinds})" if len(having) == len(DeviceKind) - 1 else kinds or ".type"
    return f'ask for device.driver == "{driver}" and {kinds} first, with &&'


def _refused(place: str, error: CelError, expression: str) -> Issue:
    """The value shown is the expression from where it is wrong."""
    if error.position is None:
        return Issue(place, shown(expression), str(error))
    return Issue(place, shown(expression[error.position :]), f"at character {error.position + 1}: {error}")


@cache
def _samples(driver: str, profiles: frozenset[str]) -> list[tuple[str, CelDevice]]:
    """A device of each kind, and partition of each profile, with every name it can have; one of some other driver."""
    alike = [
        (DeviceKind.FULL, NO_PROFILE),
        *((DeviceKind.PARTITION, each) for each in sorted(profiles)),
        (DeviceKind.SHARE, NO_PROFILE),
    ]
    ours = [(KINDS[kind], from_slice_device(driver, _published(kind, profile))) for kind, profile in alike]
    return [*ours, ("a device of another driver", CelDevice("another-driver.example.com"))]


def _published(kind: DeviceKind, profile: str) -> dict[str, Any]:
    attributes: dict[str, dict[str, Any]] = {fact.name: {fact.kind: MADE_UP[fact.kind]} for fact in FACTS[kind]}
    attributes["type"] = {"string": kind.value}
    attributes["profile"] = {"string": profile}
    capacity = {name: {"value": "1Gi"} for name in CAPACITIES & names_of(kind)}
    return {"name": kind.value, "attributes": attributes, "capacity": capacity}
