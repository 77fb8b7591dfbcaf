"""The attributes and capacities of Tessera's devices: names, types, values, and how selectors read them.

Source: the attributes that the driver publishes, and the products that its simulator knows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from deviceclasses.cel.referenced_attributes import Comparison
from deviceclasses.cel.values import type_name
from deviceclasses.lint.findings import Severity
from driver.config.suggestions import meant, nearest
from driver.hardware.gpu_properties import ARCHITECTURES
from driver.model.device import MONITOR_TYPE
from driver.model.gpu import MigMode
from driver.model.offer import DeviceKind
from driver.model.shared_memory import CLIENTS_CAPACITY, COMPUTE_CAPACITY, MEMORY_CAPACITY, SHARING_FIELD, MemoryLimit
from driver.simulator.products import facts
from driver.slices.attributes import FACTS, MONITOR_NAMES, NO_PROFILE, STANDARD

EVERY_FACT = [fact for facts_of_kind in FACTS.values() for fact in facts_of_kind]
ATTRIBUTES = frozenset(fact.name for fact in EVERY_FACT if "/" not in fact.name)
IN_STANDARD = frozenset(fact.name.removeprefix(STANDARD) for fact in EVERY_FACT if fact.name.startswith(STANDARD))
STANDARD_DOMAIN = STANDARD.removesuffix("/")
OF_SHARED = {
    DeviceKind.SHARED: frozenset({MEMORY_CAPACITY, CLIENTS_CAPACITY}),
    DeviceKind.SHARED_PARTITION: frozenset({COMPUTE_CAPACITY}),
}
"""The capacities of devices that several claims can have at once."""
OF_OTHERS = frozenset({MEMORY_CAPACITY, "multiprocessors"})
CAPACITIES = OF_OTHERS.union(*OF_SHARED.values())
TYPE_OF = {fact.name: fact.kind for fact in EVERY_FACT}
"""The type of each attribute, by its published name."""


def names_of(device_type: str) -> frozenset[str]:
    """The names, without domain, of the attributes and capacities that a device of this type can have."""
    names = MONITOR_NAMES if device_type == MONITOR_TYPE else {fact.name for fact in FACTS[DeviceKind(device_type)]}
    return capacities_of(device_type) | {name.removeprefix(STANDARD) for name in names}


def capacities_of(device_type: str) -> frozenset[str]:
    """The names of the capacities that a device of this type can have."""
    if device_type in {MONITOR_TYPE, DeviceKind.SHARE}:
        return frozenset()
    return OF_SHARED[DeviceKind(device_type)] if device_type in OF_SHARED else OF_OTHERS


SAMPLE_VALUES = {"string": "", "int": 0, "bool": False, "version": "0.0.0"}


def published_sample(device_type: str, profile: str) -> dict[str, Any]:
    """A device as in a slice, with every name that it can have and made-up values."""
    names = names_of(device_type)
    attributes: dict[str, dict[str, Any]] = {
        name: {kind: SAMPLE_VALUES[kind]} for name, kind in TYPE_OF.items() if name.removeprefix(STANDARD) in names
    }
    attributes["type"] = {"string": str(device_type)}
    attributes["profile"] = {"string": profile}
    capacity = {name: {"value": "1Gi"} for name in CAPACITIES & names}
    sharing = {SHARING_FIELD: True} if device_type in OF_SHARED else {}
    return {"name": str(device_type), "attributes": attributes, "capacity": capacity, **sharing}


COMPARABLE_LITERALS = {"string": {"string"}, "int": {"int", "uint", "double"}, "bool": {"bool"}, "version": set[str]()}
"""The types of literals that an attribute of each type can be compared with."""
MAX_LISTED_VALUES = 10


@dataclass(frozen=True, slots=True)
class Values:
    """The values of a string attribute. New hardware can add values to a ``growing`` attribute."""

    accepted: tuple[str, ...]
    growing: bool = False

    @property
    def severity(self) -> Severity:
        return Severity.WARNING if self.growing else Severity.ERROR

    def unknown_value(self, name: str, value: str) -> str:
        listed = "" if len(self.accepted) > MAX_LISTED_VALUES else f"; accepted: {', '.join(self.accepted)}"
        return f"no {'known GPU' if self.growing else 'device'} has this {name}{listed}{meant(value, self.accepted)}"


@cache
def values() -> Mapping[str, Values]:
    products = facts("mig_geometry")["products"]
    profiles = {profile["name"] for product in products for profile in product.get("profiles", [])}
    return {
        "type": Values((*DeviceKind, MONITOR_TYPE)),
        "migMode": Values(tuple(MigMode)),
        "memoryLimit": Values(tuple(MemoryLimit)),
        "profile": Values((NO_PROFILE, *sorted(profiles)), growing=True),
        "architecture": Values((*ARCHITECTURES.values(), "Unknown"), growing=True),
    }


def unknown_name(section: str, name: str, domain: str) -> str:
    """The message about a name in Tessera's domain that no device has; ``section``: "attributes" or "capacity"."""
    name = name.removeprefix(STANDARD)
    if name in IN_STANDARD:
        return f"{name} is in Kubernetes' domain: {_written(name, domain)}"
    if name in CAPACITIES | ATTRIBUTES:
        return f"{name} is {'a capacity' if name in CAPACITIES else 'an attribute'}: {_written(name, domain)}"
    hint = meant(name, ATTRIBUTES if section == "attributes" else CAPACITIES)
    if not hint and (close := nearest(name, IN_STANDARD | CAPACITIES | ATTRIBUTES)):
        hint = f"; did you mean {_written(close, domain)}?"
    return f"Tessera publishes no such name in {domain} (docs/attributes.md has them all){hint}"


def no_attribute(name: str, domain: str) -> str:
    """The message about a constraint on a name in Tessera's domain that is no attribute."""
    if name in IN_STANDARD:
        return f"is in Kubernetes' domain: {STANDARD_DOMAIN}/{name}"
    if name in CAPACITIES:
        return "is a capacity; constraints are on attributes"
    return unknown_name("attributes", name, domain)


def why_without(attribute: str, kinds: Collection[DeviceKind], driver: str) -> str:
    """Why devices of ``kinds`` have no attribute of this full name; empty if that depends on the GPU."""
    domain, _, name = attribute.rpartition("/")
    if domain == driver and name not in ATTRIBUTES:
        return no_attribute(name, domain)
    if domain not in {driver, STANDARD_DOMAIN}:
        right = STANDARD_DOMAIN if name in IN_STANDARD else driver
        return f"Tessera's devices have {right}/{name} instead" if name in ATTRIBUTES | IN_STANDARD else ""
    having = [kind for kind in DeviceKind if name in names_of(kind)]
    types = " || ".join(f'type == "{kind}"' for kind in having)
    return f"only devices with {types} have {name}" if having and not set(having) & set(kinds) else ""


def _written(name: str, domain: str) -> str:
    """The expression by which a selector reads the name."""
    section = "capacity" if name in CAPACITIES else "attributes"
    return f'device.{section}["{STANDARD_DOMAIN if name in IN_STANDARD else domain}"].{name}'


def type_mismatch(name: str, found: Comparison) -> str | None:
    """The message about a literal of a type that the attribute can't be compared with; None if it can."""
    kind = TYPE_OF[name]
    if found.value is None or type_name(found.value) in COMPARABLE_LITERALS[kind]:
        return None
    written = str(found.value)
    name = name.removeprefix(STANDARD)
    if kind == "version":
        operator = "==" if found.operator == "in" else found.operator
        return f'{name} is a version: .compareTo(semver("{_as_version(written)}")) {operator} 0'
    if kind == "int":
        number = f", {written} without quotes" if re.fullmatch(r"-?\d+", written) else ""
        return f"{name} is a number: compare with a number{number}"
    if kind == "bool":
        return f"{name} is a bool: compare with true or false, without quotes"
    return f'{name} is a string: compare with a string, "{written}" in quotes'


def _as_version(written: str) -> str:
    """Three numbers without leading zeros, the format of published versions."""
    numbers = [str(int(digits)) for digits in re.findall(r"\d+", written)[:3]] or ["550"]
    return ".".join([*numbers, "0", "0"][:3])
