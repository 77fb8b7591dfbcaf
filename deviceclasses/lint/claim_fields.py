"""The requests and constraints of a claim, and the classes that they refer to, as the rules see them.

Nothing in here trusts the shape of what people wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from deviceclasses.lint.documents import Document, text
from deviceclasses.lint.findings import Finding, Issue
from deviceclasses.lint.selectors.selectable_kinds import may_select
from driver.config.opaque_parameters import InvalidParameters, SharedConfig, Strategy, devices_for, parse_parameters
from driver.model.offer import DeviceKind
from driver.model.shared_memory import MemoryLimit


@dataclass(frozen=True, slots=True)
class RequestFields:
    """A request, or one of its alternatives with the name ``base/alternative``."""

    base: str
    name: str
    path: str
    raw: Mapping[str, Any]

    @property
    def class_name(self) -> str:
        return text(self.raw, "deviceClassName")

    @property
    def selectors(self) -> tuple[str, ...]:
        """The CEL expressions of the request itself, without those of its class."""
        return tuple(expression for _, expression in selectors_of(self.raw, ""))

    @property
    def has_admin_access(self) -> bool:
        return self.raw.get("adminAccess") is True

    @property
    def count(self) -> int:
        """The number of devices; 1 where that is not a number."""
        count = self.raw.get("count")
        return count if isinstance(count, int) else 1


@dataclass(frozen=True, slots=True)
class ConstraintFields:
    """An attribute that is equal (or ``distinct``) on the devices of ``requests``, or of all requests if empty."""

    path: str
    attribute: str
    distinct: bool
    requests: frozenset[str]

    def covers(self, request: RequestFields) -> bool:
        return not self.requests or bool(self.requests & {request.base, request.name})


def requests_of(devices: Mapping[str, Any], path: str) -> Iterator[RequestFields]:
    """Every request, or instead its alternatives; ``path`` is that of ``devices``."""
    for index, raw in entries(devices, "requests"):
        name, place = text(raw, "name"), f"{path}.requests[{index}]"
        alternatives = list(entries(raw, "firstAvailable"))
        for position, alternative in alternatives:
            full = f"{name}/{text(alternative, 'name')}"
            yield RequestFields(name, full, f"{place}.firstAvailable[{position}]", alternative)
        exactly = raw.get("exactly")
        if isinstance(exactly, Mapping):
            yield RequestFields(name, name, f"{place}.exactly", exactly)
        elif not alternatives:
            # In v1beta1 the fields of ``exactly`` are in the request itself.
            yield RequestFields(name, name, place, raw)


def constraints_of(devices: Mapping[str, Any], path: str) -> Iterator[ConstraintFields]:
    for index, raw in entries(devices, "constraints"):
        requests = frozenset(str(name) for name in request_names(raw))
        for field in ("matchAttribute", "distinctAttribute"):
            if attribute := text(raw, field):
                place = f"{path}.constraints[{index}].{field}"
                yield ConstraintFields(place, attribute, field == "distinctAttribute", requests)


def entries(owner: Mapping[str, Any], field: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a list with their index; none if the field is not a list."""
    items = owner.get(field)
    for index, entry in enumerate(items if isinstance(items, list) else []):
        if isinstance(entry, Mapping):
            yield index, entry


def request_names(entry: Mapping[str, Any]) -> list[object]:
    """The ``requests`` of a constraint or config entry."""
    named = entry.get("requests")
    return named if isinstance(named, list) else []


def selectors_of(owner: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """The path and expression of each CEL selector of a class or request."""
    for index, entry in entries(owner, "selectors"):
        cel = entry.get("cel")
        if isinstance(cel, Mapping) and (expression := text(cel, "expression")):
            yield f"{path}.selectors[{index}].cel.expression", expression


def parameters_of(owner: Mapping[str, Any], driver: str) -> Iterator[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    """The ``config`` entries for ``driver``: index, entry, and its ``opaque``."""
    for index, entry in entries(owner, "config"):
        opaque = entry.get("opaque")
        if isinstance(opaque, Mapping) and opaque.get("driver") == driver:
            yield index, entry, opaque


@dataclass(frozen=True, slots=True)
class ClassFacts:
    """Facts about an existing class: its selectors, the kinds of devices it can give, and whether it is for shares.

    ``gives`` is empty if the class gives none of Tessera's devices, or is unknown. ``strategy``: how its
    parameters want a GPU shared.
    """

    selectors: tuple[str, ...]
    gives: frozenset[DeviceKind]
    shares: bool
    strategy: Strategy | None = None


UNKNOWN = ClassFacts((), frozenset(), shares=False)


@dataclass(frozen=True, slots=True)
class LintContext:
    """The driver's name, the classes by name, and whether MPS limits the memory of a shared GPU in the given slices."""

    driver: str
    classes: Mapping[str, ClassFacts]
    limits_by_mps: bool = False

    def facts(self, request: RequestFields) -> ClassFacts:
        return self.classes.get(request.class_name, UNKNOWN)


def lint_context(
    classes: Sequence[Mapping[str, Any]], driver: str, slices: Iterable[Mapping[str, Any]] = ()
) -> LintContext:
    """Build the context from the class objects, of which the last one of a name counts, and ResourceSlices."""
    specs = [settings_of(resource_slice, "spec") for resource_slice in slices]
    devices = (device for spec in specs if spec.get("driver") == driver for _, device in entries(spec, "devices"))
    limits = {text(settings_of(device, "attributes.memoryLimit"), "string") for device in devices}
    facts = {name_of(device_class): _facts(device_class, driver) for device_class in classes}
    return LintContext(driver, facts, MemoryLimit.MPS in limits)


def _facts(device_class: Mapping[str, Any], driver: str) -> ClassFacts:
    spec = settings_of(device_class, "spec")
    selectors = tuple(expression for _, expression in selectors_of(spec, ""))
    given = [opaque.get("parameters") for _, _, opaque in parameters_of(spec, driver)]
    served = [devices_for(parameters) for parameters in given]
    meant, selected = frozenset[DeviceKind]().union(*served), may_select(selectors, driver)
    # A class with parameters for one kind of device is for that kind, even if its selectors accept others.
    gives, shares = selected & meant if meant else selected, frozenset({DeviceKind.SHARE}) in served
    strategies = [strategy for strategy in map(requested_strategy, given) if strategy]
    return ClassFacts(selectors, gives, shares, strategies[-1] if strategies else None)


def requested_strategy(parameters: object) -> Strategy | None:
    """How parameters want a shared GPU shared; None: they do not say, or are for other devices."""
    with suppress(InvalidParameters):
        parsed = parse_parameters(parameters, "", DeviceKind.SHARED)
        if isinstance(parsed, SharedConfig):
            return parsed.strategy or ("MPS" if parsed.mps else None)
    return None


def settings_of(content: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The object at a dotted path; empty if there is none."""
    for field in path.split("."):
        value = content.get(field)
        content = value if isinstance(value, Mapping) else {}
    return content


def name_of(content: Mapping[str, Any]) -> str:
    metadata = settings_of(content, "metadata")
    name = text(metadata, "name") or text(metadata, "generateName") or "without a name"
    namespace = text(metadata, "namespace")
    return f"{namespace}/{name}" if namespace else name


def findings_in(
    documents: Sequence[Document], issues_of: Callable[[Mapping[str, Any]], Iterator[Issue]]
) -> Iterator[Finding]:
    """The issues of all objects, in the order of ``documents``."""
    for document in documents:
        if isinstance(document.content, Mapping):
            named = f"{text(document.content, 'kind')} {name_of(document.content)}"
            for issue in issues_of(document.content):
                where = (document.file, document.number, named)
                yield Finding(*where, issue.path, issue.value, issue.message, issue.severity)
