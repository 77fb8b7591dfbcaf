"""What Tessera's devices have: names, types and values, and how each is written in a selector.

All of it is the driver's own: what it publishes, and what its simulator knows of NVIDIA's products.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from deviceclasses.cel.comparisons import Comparison
from deviceclasses.cel.values import type_name
from deviceclasses.findings import Severity
from driver.config.names import meant, nearest
from driver.hardware.discovery import ARCHITECTURES
from driver.hardware.simulator.products import facts
from driver.model.device import DeviceKind
from driver.model.gpu import MigMode
from driver.slices.attributes import FACTS, NO_PROFILE, STANDARD

EVERY_FACT = [fact for facts_of_kind in FACTS.values() for fact in facts_of_kind]
ATTRIBUTES = frozenset(fact.name for fact in EVERY_FACT if "/" not in fact.name)
IN_STANDARD = frozenset(fact.name.removeprefix(STANDARD) for fact in EVERY_FACT if fact.name.startswith(STANDARD))
"""The attributes in Kubernetes' domain."""
STANDARD_DOMAIN = STANDARD.removesuffix("/")
CAPACITIES = frozenset({"memory", "multiprocessors"})
TYPES = {fact.name: fact.kind for fact in EVERY_FACT}
"""What an attribute's values are, by its name as published."""


def names_of(kind: DeviceKind) -> frozenset[str]:
    """The attributes, without their domain, and capacities that such a device may have."""
    names = {fact.name.removeprefix(STANDARD) for fact in FACTS[kind]}
    return frozenset(names if kind is DeviceKind.SHARE else names | CAPACITIES)


FITS = {"string": {"string"}, "int": {"int", "uint", "double"}, "bool": {"bool"}, "version": set[str]()}
"""The literals that such a value can be compared with."""
FEW = 10
"""As many values are told all."""


@dataclass(frozen=True, slots=True)
class Values:
    """All values that a string attribute can have; those that new hardware brings are only not known yet."""

    accepted: tuple[str, ...]
    growing: bool = False

    @property
    def severity(self) -> Severity:
        return Severity.WARNING if self.growing else Severity.ERROR

    def strange(self, name: str, value: str) -> str:
        """The message about a value that is none of them."""
        told = "" if len(self.accepted) > FEW else f"; accepted: {', '.join(self.accepted)}"
        return f"no {'known GPU' if self.growing else 'device'} has this {name}{told}{meant(value, self.accepted)}"


@cache
def values() -> Mapping[str, Values]:
    """By attribute."""
    profiles = {each["name"] for product in facts("mig_geometry")["products"] for each in product.get("profiles", [])}
    return {
        "type": Values(tuple(DeviceKind)),
        "migMode": Values(tuple(MigMode)),
        "profile": Values((NO_PROFILE, *sorted(profiles)), growing=True),
        "architecture": Values((*ARCHITECTURES.values(), "Unknown"), growing=True),
    }


def unpublished(section: str, name: str, domain: str) -> str:
    """The message about a name in our domain that no device has; ``section``: "attributes" or "capacity"."""
    name = name.removeprefix(STANDARD)
    if name in IN_STANDARD:
        return f"{name} is in Kubernetes' domain: {_written(name, domain)}"
    if name in CAPACITIES | ATTRIBUTES:
        return f"{name} is {'a capacity' if name in CAPACITIES else 'an attribute'}: {_written(name, domain)}"
    hint = meant(name, ATTRIBUTES if section == "attributes" else CAPACITIES)
    if not hint and (close := nearest(name, IN_STANDARD | CAPACITIES | ATTRIBUTES)):
        hint = f"; did you mean {_written(close, domain)}?"
    return f"Tessera publishes no such name in {domain} (docs/attributes.md has them all){hint}"


def _written(name: str, domain: str) -> str:
    """How a selector reads it."""
    section = "capacity" if name in CAPACITIES else "attributes"
    return f'device.{section}["{STANDARD_DOMAIN if name in IN_STANDARD else domain}"].{name}'


def unlike(name: str, found: Comparison) -> str | None:
    """What to write instead of a literal that no value of this attribute could be compared with; None: it can."""
    kind = TYPES[name]
    if found.value is None or type_name(found.value) in FITS[kind]:
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
    """Three numbers without leading zeros, as versions are published."""
    numbers = [str(int(each)) for each in re.findall(r"\d+", written)[:3]] or ["550"]
    return ".".join([*numbers, "0", "0"][:3])
