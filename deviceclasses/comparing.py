"""What is wrong with the values that a selector compares with: they are of another type, or no device has them."""

from __future__ import annotations

from collections.abc import Iterator

from deviceclasses.cel.comparisons import Comparison, comparisons_of
from deviceclasses.documents import misspelt
from deviceclasses.findings import Issue, Severity
from deviceclasses.published import STANDARD_DOMAIN, TYPES, unlike, values
from driver.config.schema import shown
from driver.slices.attributes import STANDARD


def comparison_issues(place: str, expression: str, driver: str) -> Iterator[Issue]:
    """The issues of an expression that compiles."""
    for found in comparisons_of(expression):
        if found.value in found.otherwise:
            continue
        if found.path == ("driver",) and isinstance(found.value, str):
            yield from _driver(place, found.value, driver)
        name = _attribute(found, driver)
        if name is not None:
            yield from _value(place, name, found)


def _attribute(found: Comparison, driver: str) -> str | None:
    """Its name as published, where it is one of ours."""
    if len(found.path) != 3 or found.path[0] != "attributes":
        return None
    _, domain, name = found.path
    full = {driver: name, STANDARD_DOMAIN: f"{STANDARD}{name}"}.get(domain)
    return full if full in TYPES else None


def _driver(place: str, value: str, driver: str) -> Iterator[Issue]:
    if misspelt(value, [driver]):
        message = f"is almost the driver's name; did you mean {driver}?"
        yield Issue(place, shown(value), message, Severity.WARNING)


def _value(place: str, name: str, found: Comparison) -> Iterator[Issue]:
    if (instead := unlike(name, found)) is not None:
        yield Issue(place, shown(found.value), instead)
        return
    known = values().get(name)
    if known is not None and isinstance(found.value, str) and found.value not in known.accepted:
        yield Issue(place, shown(found.value), known.strange(name, found.value), known.severity)
