"""Partial evaluation: which kinds of Tessera's devices selectors may accept, by type and profile alone, and which
shared devices, by what limits the memory of claims.

All other attributes are unknown, so an expression that depends on one has no verdict and may accept the device. Only
"false" excludes a kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from typing import NoReturn

from deviceclasses.cel.engine import CelDevice, Program, try_compile
from deviceclasses.cel.referenced_attributes import comparisons_of
from deviceclasses.cel.values import EvaluationError, Map, Value
from deviceclasses.lint.selectors.attribute_catalogue import names_of, values
from driver.model.device import MONITOR_TYPE
from driver.model.offer import OF_SEVERAL, DeviceKind, compute_instances
from driver.model.shared_memory import SHARING_FIELD, MemoryLimit
from driver.slices.attributes import NO_PROFILE

EXAMPLE_OF_SHARED = "1c.3g.40gb"
"""A profile of shared partitions."""


def compiled_programs(expressions: Iterable[str]) -> list[Program]:
    return [program for program in map(try_compile, expressions) if isinstance(program, Program)]


def compared_strings(programs: Iterable[Program]) -> frozenset[str]:
    """The string literals in comparisons, which may be profiles."""
    literals = (comparison.value for program in programs for comparison in comparisons_of(program.expression))
    return frozenset(value for value in literals if isinstance(value, str))


@cache
def may_select(expressions: tuple[str, ...], driver: str) -> frozenset[DeviceKind]:
    """The kinds of Tessera's devices that all expressions may accept. Expressions that don't compile are ignored."""
    programs = compiled_programs(expressions)
    partitions = sorted({*values()["profile"].accepted, *compared_strings(programs)} - {NO_PROFILE})
    profile = ("attributes", driver, "profile")
    if not any(program.reads_everything or profile in program.reads for program in programs):
        partitions = partitions[:1]

    def may_be(kind: DeviceKind, name: str) -> bool:
        return all(_may_accept(program.expression, driver, kind.value, name) for program in programs)

    shared = [EXAMPLE_OF_SHARED, *(name for name in compared_strings(programs) if compute_instances(name) > 1)]
    profiles = {kind: [NO_PROFILE] for kind in DeviceKind}
    profiles |= {DeviceKind.PARTITION: partitions, DeviceKind.SHARED_PARTITION: shared}
    return frozenset(kind for kind, names in profiles.items() if any(may_be(kind, name) for name in names))


def may_select_monitors(expressions: Iterable[str], driver: str) -> bool:
    """Whether all expressions may accept a monitor device, which only requests with adminAccess can have."""
    programs = compiled_programs(expressions)
    return all(_may_accept(program.expression, driver, MONITOR_TYPE, NO_PROFILE) for program in programs)


@cache
def possible_limits(expressions: tuple[str, ...], driver: str) -> frozenset[MemoryLimit]:
    """What may hold claims to their memory on a shared device that all expressions accept."""
    programs = compiled_programs(expressions)

    def may_be(limit: MemoryLimit) -> bool:
        attributes = {"type": DeviceKind.SHARED.value, "profile": NO_PROFILE, "memoryLimit": limit.value}
        device = _PartialDevice(driver, {driver: attributes})
        return all(program.evaluate(device) is not False for program in programs)

    return frozenset(filter(may_be, MemoryLimit))


@cache
def _may_accept(expression: str, driver: str, device_type: str, profile: str) -> bool:
    """Evaluated once for all claims and classes: a claim has many requests with the same selectors."""
    [program] = compiled_programs([expression])
    return program.evaluate(_partial_device(driver, device_type, profile)) is not False


@cache
def _partial_device(driver: str, device_type: str, profile: str) -> CelDevice:
    return _PartialDevice(driver, {driver: {"type": device_type, "profile": profile}})


class _PartialDevice(CelDevice):
    """A device of Tessera of which only the values of ``attributes`` and the names it can't have are known."""

    @cached_property
    def value(self) -> Map:
        attributes = self.attributes[self.driver]
        missing = ATTRIBUTES_AND_CAPACITIES - names_of(str(attributes["type"]))
        return _PartialMap(
            {
                "driver": self.driver,
                SHARING_FIELD: attributes["type"] in OF_SEVERAL,
                "attributes": _PartialMap({self.driver: _PartialMap(attributes, missing)}),
                "capacity": _PartialMap({self.driver: _PartialMap({}, missing)}),
            }
        )


ATTRIBUTES_AND_CAPACITIES = frozenset[str]().union(*map(names_of, DeviceKind))


class _PartialMap(Map):
    """A map with some known entries. Everything that depends on other entries raises EvaluationError."""

    __slots__ = ("_missing",)
    type_name = "map"

    def __init__(self, known: Mapping[str, Value], missing: frozenset[str] = frozenset()) -> None:
        super().__init__(known.items())
        self._missing = missing

    def find(self, key: Value) -> tuple[Value] | None:
        value = super().find(key)
        if value is None and key not in self._missing:
            raise EvaluationError(f"{key} is not known")
        return value

    def has(self, key: Value) -> bool:
        return self.find(key) is not None

    def _not_known(self) -> NoReturn:
        raise EvaluationError("not everything is known")

    items = __iter__ = __len__ = _not_known
