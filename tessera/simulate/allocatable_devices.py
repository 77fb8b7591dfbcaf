"""The values of an allocation: devices of ResourceSlices, quantities as numbers, and errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import msgspec

from deviceclasses.cel.engine import CelDevice, from_slice_device
from deviceclasses.cel.library.quantity import BINARY, parse_quantity
from driver.errors import RecoverableError
from driver.kube.slice_types import Counter, DetailedDevice, DetailedSliceSpec, Quantity

Number = Fraction | int
"""The exact value of a quantity; whole numbers are int, with which Python computes faster."""

Quantities = dict[str, Number]

Counters = dict[tuple[str, str], Number]


class DeviceId(NamedTuple):
    driver: str
    pool: str
    device: str


@dataclass(frozen=True, eq=False)
class AllocatableDevice:
    """A device that may be allocated, with its slice. The same object for the whole search."""

    id: DeviceId
    entry: DetailedDevice
    spec: DetailedSliceSpec

    @cached_property
    def cel(self) -> CelDevice:
        """The device as selectors read it. Raises CelError for a value that the API server would not store."""
        return from_slice_device(self.id.driver, msgspec.to_builtins(self.entry))

    @cached_property
    def consumption(self) -> Counters:
        """What it takes of the counters of its pool."""
        return counters_of((consumed.counter_set, consumed.counters) for consumed in self.entry.consumes_counters)

    def attribute(self, name: str) -> tuple[str, Any] | None:
        """The type and value of the attribute with this full name; None if it has no such attribute."""
        return self.entry.attribute(self.id.driver, name)


def counters_of(sets: Iterable[tuple[str, Mapping[str, Counter]]]) -> Counters:
    """The counters of several sets, each with its name."""
    return {(name, key): number(counter.value) for name, counters in sets for key, counter in counters.items()}


@lru_cache(4096)
def number(written: Quantity) -> Number:
    """The exact value of a quantity that the API server stores."""
    value = parse_quantity(str(written)).value
    return value.numerator if value.denominator == 1 else value


def written(amount: Number) -> str:
    """A quantity as the API server would write it: in thousandths or smaller if need be, in binary units if exact."""
    for scale, suffix in ((1, ""), (10**3, "m"), (10**6, "u")):
        if (whole := amount * scale).denominator == 1:
            return _shortened(whole.numerator) if scale == 1 else f"{whole.numerator}{suffix}"
    return f"{-(-amount.numerator * 10**9 // amount.denominator)}n"


def _shortened(amount: int) -> str:
    for suffix, bits in reversed(BINARY.items()):
        if amount and amount % (1 << bits) == 0:
            return f"{amount >> bits}{suffix}"
    return str(amount)


class FailureKind(StrEnum):
    """Why there is no answer. All but ``INVALID_POOLS`` stop the scheduling of the pod, on all nodes."""

    SELECTOR = "selector"
    TOO_MANY_DEVICES = "too many devices"
    INCOMPLETE_POOL = "incomplete pool"
    INVALID_POOL = "invalid pool"
    INVALID_POOLS = "invalid pools"
    CONSTRAINT = "constraint"
    CAPACITY = "capacity"
    NODE_SELECTOR = "node selector"
    UNKNOWN_KIND = "unknown kind"
    TOO_LONG = "too long"


class AllocationError(RecoverableError):
    """The scheduler fails at these claims; another node helps only for ``INVALID_POOLS``."""

    def __init__(self, failure: FailureKind, message: str) -> None:
        super().__init__(message)
        self.failure = failure
