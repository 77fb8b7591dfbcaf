"""Devices as values of CEL, made from ResourceSlices.

Source: Kubernetes' DeviceAttribute and DeviceCapacity. A name without a domain belongs to the driver's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from deviceclasses.cel.library.quantity import parse_quantity
from deviceclasses.cel.library.semver import parse_semver
from deviceclasses.cel.values import DomainMap, EvaluationError, Map, Value, string_map
from driver.errors import CelError

Domains = Mapping[str, Mapping[str, Value]]
"""Values by domain and name."""
NOTHING: Mapping[str, Value] = {}
KINDS: dict[str, Callable[[Any], Value]] = {
    "string": str,
    "int": int,
    "bool": bool,
    "version": parse_semver,
    "strings": tuple,
    "ints": tuple,
    "bools": tuple,
    "versions": lambda values: tuple(map(parse_semver, values)),
}
"""The kinds of attributes in a ResourceSlice, and their conversion to values of CEL."""


@dataclass(frozen=True, eq=False)
class CelDevice:
    """``attributes`` hold str, int, bool, versions or tuples of them, ``capacity`` quantities."""

    driver: str
    attributes: Domains = field(default_factory=dict)
    capacity: Domains = field(default_factory=dict)
    allow_multiple_allocations: bool = False

    @cached_property
    def value(self) -> Map:
        """The value of the variable ``device``."""
        return string_map(
            {
                "driver": self.driver,
                "allowMultipleAllocations": self.allow_multiple_allocations,
                "attributes": _domain_map(self.attributes),
                "capacity": _domain_map(self.capacity),
            }
        )

    def read(self, section: str, domain: str, name: str) -> Hashable:
        """The value of one attribute or capacity, None if missing; equal only for values that are equal in CEL."""
        found = (self.attributes if section == "attributes" else self.capacity).get(domain, NOTHING).get(name)
        return (bool, found) if type(found) is bool else found


def _domain_map(domains: Domains) -> Map:
    return string_map({domain: string_map(values) for domain, values in domains.items()}, DomainMap)


def from_slice_device(driver: str, device: Mapping[str, Any]) -> CelDevice:
    """The device of one entry in ``spec.devices``. Raises CelError for a value that Kubernetes would not store."""
    try:
        return CelDevice(
            driver=driver,
            attributes=_by_domain(driver, device.get("attributes") or {}, _attribute),
            capacity=_by_domain(driver, device.get("capacity") or {}, lambda entry: parse_quantity(entry["value"])),
            allow_multiple_allocations=bool(device.get("allowMultipleAllocations")),
        )
    except (EvaluationError, KeyError) as error:
        raise CelError(f"device {device.get('name', '')}: {error}") from None


def _attribute(entry: Mapping[str, Any]) -> Value:
    for kind, convert in KINDS.items():
        if kind in entry:
            return convert(entry[kind])
    raise EvaluationError(f"an attribute has one of {', '.join(KINDS)}, not {', '.join(entry) or 'nothing'}")


def _by_domain(driver: str, entries: Mapping[str, Any], value: Callable[[Any], Value]) -> Domains:
    found: dict[str, dict[str, Value]] = {}
    for qualified, entry in entries.items():
        domain, slash, name = qualified.partition("/")
        if slash:
            found.setdefault(domain, {})[name] = value(entry)
        else:
            found.setdefault(driver, {})[qualified] = value(entry)
    return found
