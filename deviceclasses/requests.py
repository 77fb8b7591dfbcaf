"""The requests and constraints of a claim as people wrote them: nothing in here trusts the shape of what it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """A request, or one alternative of it, whose ``name`` is then ``base/alternative``."""

    base: str
    name: str
    path: str
    raw: Mapping[str, Any]

    @property
    def class_name(self) -> str:
        return text(self.raw, "deviceClassName")

    @property
    def several(self) -> str | None:
        """The field that asks for more than one device, if any does."""
        if self.raw.get("allocationMode") == "All":
            return "allocationMode"
        count = self.raw.get("count")
        return "count" if isinstance(count, int) and count > 1 else None


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the devices of ``requests`` (none: of all) have in common, or, if ``distinct``, do not."""

    path: str
    attribute: str
    distinct: bool
    requests: frozenset[str]

    def covers(self, request: Request) -> bool:
        return not self.requests or bool(self.requests & {request.base, request.name})


def requests_of(devices: Mapping[str, Any], path: str) -> Iterator[Request]:
    """Every request, those with alternatives as their alternatives; ``path`` is where ``devices`` stands."""
    for index, raw in entries(devices, "requests"):
        name, place = text(raw, "name"), f"{path}.requests[{index}]"
        alternatives = list(entries(raw, "firstAvailable"))
        for position, alternative in alternatives:
            full = f"{name}/{text(alternative, 'name')}"
            yield Request(name, full, f"{place}.firstAvailable[{position}]", alternative)
        exactly = raw.get("exactly")
        if isinstance(exactly, Mapping):
            yield Request(name, name, f"{place}.exactly", exactly)
        elif not alternatives:
            # v1beta1 had the fields of ``exactly`` in the request itself.
            yield Request(name, name, place, raw)


def constraints_of(devices: Mapping[str, Any], path: str) -> Iterator[Constraint]:
    for index, raw in entries(devices, "constraints"):
        requests = frozenset(str(name) for name in request_names(raw))
        for field in ("matchAttribute", "distinctAttribute"):
            if attribute := text(raw, field):
                place = f"{path}.constraints[{index}].{field}"
                yield Constraint(place, attribute, field == "distinctAttribute", requests)


def entries(owner: Mapping[str, Any], field: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a list, with their index; nothing where there is no list."""
    found = owner.get(field)
    for index, entry in enumerate(found if isinstance(found, list) else []):
        if isinstance(entry, Mapping):
            yield index, entry


def request_names(entry: Mapping[str, Any]) -> list[object]:
    """What a constraint or config entry has under ``requests``."""
    named = entry.get("requests")
    return named if isinstance(named, list) else []


def text(owner: Mapping[str, Any], field: str) -> str:
    """A string field; empty where there is none."""
    found = owner.get(field)
    return found if isinstance(found, str) else ""


def selectors_of(owner: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """Path and text of each CEL selector of a class or request."""
    for index, entry in entries(owner, "selectors"):
        cel = entry.get("cel")
        if isinstance(cel, Mapping) and (expression := text(cel, "expression")):
            yield f"{path}.selectors[{index}].cel.expression", expression


def parameters_of(owner: Mapping[str, Any], driver: str) -> Iterator[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    """The entries for ``driver``: place in ``config``, entry, its ``opaque``."""
    for index, entry in entries(owner, "config"):
        opaque = entry.get("opaque")
        if isinstance(opaque, Mapping) and opaque.get("driver") == driver:
            yield index, entry, opaque
