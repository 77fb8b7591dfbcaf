"""Which kinds of our devices could pass selectors, going by what all of a kind have alike: type and profile.

Whatever else a device has is not known here, so that an expression which depends on it has no answer, and anything
may pass. Only a plain "false" keeps a kind out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property

from deviceclasses.cel import CelDevice, Program, compile_selector
from deviceclasses.cel.comparisons import comparisons_of
from deviceclasses.cel.values import EvaluationError, Map, Value
from deviceclasses.published import names_of, values
from driver.errors import CelError
from driver.model.device import DeviceKind
from driver.slices.attributes import NO_PROFILE


@cache
def compiled(expression: str) -> Program | CelError:
    try:
        return compile_selector(expression)
    except CelError as error:
        return error


def sound(expressions: Iterable[str]) -> list[Program]:
    """Those that compile."""
    return [program for program in map(compiled, expressions) if isinstance(program, Program)]


def compared(programs: Iterable[Program]) -> frozenset[str]:
    """The strings that they compare anything with: names of profiles may be among them."""
    found = (each.value for program in programs for each in comparisons_of(program.expression))
    return frozenset(value for value in found if isinstance(value, str))


@cache
def may_select(expressions: tuple[str, ...], driver: str) -> frozenset[DeviceKind]:
    """The kinds of our devices that could pass all of them; broken ones let anything pass."""
    programs = sound(expressions)
    partitions = sorted({*values()["profile"].accepted, *compared(programs)} - {NO_PROFILE})
    if not any(
        each.mentions.everything or ("attributes", driver, "profile") in each.mentions.reads for each in programs
    ):
        partitions = partitions[:1]
    profiles = {kind: partitions if kind is DeviceKind.PARTITION else [NO_PROFILE] for kind in DeviceKind}
    return frozenset(
        kind
        for kind, names in profiles.items()
        if any(all(each.evaluate(_alike(driver, kind, name)) is not False for each in programs) for name in names)
    )


@cache
def _alike(driver: str, kind: DeviceKind, profile: str) -> CelDevice:
    return _PartlyKnown(driver, {driver: {"type": kind.value, "profile": profile}})


class _PartlyKnown(CelDevice):
    """A device of our driver of which only the attributes in ``attributes`` are known, and which it can't have."""

    @cached_property
    def value(self) -> Map:
        known = self.attributes[self.driver]
        missing = ATTRIBUTES_AND_CAPACITIES - names_of(DeviceKind(known["type"]))
        return _Partly(
            {
                "driver": self.driver,
                "attributes": _Partly({self.driver: _Partly(known, missing)}),
                "capacity": _Partly({self.driver: _Partly({}, missing)}),
            }
        )


ATTRIBUTES_AND_CAPACITIES = frozenset[str]().union(*map(names_of, DeviceKind))


class _Partly(Map):
    """A map of which some is known; there is no answer to what depends on the rest."""

    __slots__ = ("_missing",)
    type_name = "map"

    def __init__(self, known: Mapping[str, Value], missing: frozenset[str] = frozenset()) -> None:
        super().__init__(known.items())
        self._missing = missing

    def find(self, key: Value) -> tuple[Value] | None:
        found = super().find(key)
        if found is None and key not in self._missing:
            raise EvaluationError(f"{key} is not known")
        return found

    def has(self, key: Value) -> bool:
        return self.find(key) is not None

    def items(self) -> Iterator[tuple[Value, Value]]:
        raise EvaluationError("not everything is known")

    def __iter__(self) -> Iterator[Value]:
        raise EvaluationError("not everything is known")

    def __len__(self) -> int:
        raise EvaluationError("not everything is known")
