"""The values that CEL works with, their equality and their order.

``None``, ``bool``, ``int`` (64 bits), ``float`` (CEL's double), ``str`` and ``bytes`` are Python's own; a list is a
tuple. What else there is has a class here or in the module of its functions. Source: the CEL language definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Value = Any
"""Any value of CEL: its type is known to the checker, or not before evaluation."""

INT_MIN, INT_MAX, UINT_MAX = -(2**63), 2**63 - 1, 2**64 - 1


class EvaluationError(Exception):
    """There is no answer; never leaves this package but as a CelRuntimeError."""


class Uint(int):
    """An unsigned integer of 64 bits."""

    __slots__ = ()


class Opaque:
    """A value that equals only values of its own class, and has no answer for others.

    ``identical`` says whether two of a class are the same value.
    """

    __slots__ = ()
    type_name = ""

    def identical(self, other: Any) -> bool:
        raise NotImplementedError


@dataclass(frozen=True)
class Optional:
    """A value that may be absent: ``present`` tells."""

    present: bool
    content: Value = None


NONE = Optional(present=False)


@dataclass(frozen=True)
class TypeValue:
    """A type as a value, such as ``int`` in ``type(1) == int``."""

    name: str


@dataclass(frozen=True)
class Duration:
    nanoseconds: int


@dataclass(frozen=True)
class Timestamp:
    """Nanoseconds since 1970; ``offset`` in seconds is that of the zone it was written in."""

    nanoseconds: int
    offset: int = field(default=0, compare=False)


class Map:
    """A map of CEL: 1 and 1u are the same key, which 1.0 finds too; 1 and true are not."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Iterable[tuple[Value, Value]] = (), *, unique: bool = False) -> None:
        """``unique``: a key that comes twice is an EvaluationError, rather than the last one winning."""
        self._entries: dict[Hashable, tuple[Value, Value]] = {}
        for key, value in entries:
            plain = _plain_key(key)
            if unique and plain in self._entries:
                raise EvaluationError(f"insert failed: key {shown(key)} already exists")
            self._entries[plain] = (key, value)

    def find(self, key: Value) -> tuple[Value] | None:
        """The value in a tuple, or None where there is no such key; raises EvaluationError for what can be no key."""
        entry = self._entries.get(_plain_key(key))
        if entry is None and type(key) is float and key.is_integer():
            entry = self._entries.get(int(key))
        return None if entry is None else (entry[1],)

    def has(self, key: Value) -> bool:
        """Whether the key is among those that are iterated over."""
        return Map.find(self, key) is not None

    def items(self) -> Iterator[tuple[Value, Value]]:
        return iter(self._entries.values())

    def __iter__(self) -> Iterator[Value]:
        return (key for key, _ in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)


class DomainMap(Map):
    """``device.attributes`` or ``device.capacity``: a domain without any entry is found, as an empty map."""

    __slots__ = ()

    def find(self, key: Value) -> tuple[Value]:
        return super().find(key) or (EMPTY_MAP,)


EMPTY_MAP = Map()


def string_map(entries: Mapping[str, Value], kind: type[Map] = Map) -> Map:
    """A map with those keys, made without looking at each."""
    made = kind()
    made._entries = {key: (key, value) for key, value in entries.items()}  # noqa: SLF001 - its own class
    return made


def _plain_key(key: Value) -> Hashable:
    kind = type(key)
    if kind is str or kind is int:
        return key  # type: ignore[no-any-return]
    if kind is Uint:
        return int(key)
    if kind is bool or kind is float or key is None:
        return (kind, key)
    raise EvaluationError(f"unsupported key type: {type_name(key)}")


PLAIN_NAMES: dict[type, str] = {
    type(None): "null_type",
    bool: "bool",
    int: "int",
    Uint: "uint",
    float: "double",
    str: "string",
    bytes: "bytes",
    tuple: "list",
    Map: "map",
    DomainMap: "map",
    Optional: "optional_type",
    TypeValue: "type",
    Duration: "google.protobuf.Duration",
    Timestamp: "google.protobuf.Timestamp",
}


def type_name(value: Value) -> str:
    """The name of a value's type, as the checker calls it."""
    return PLAIN_NAMES.get(type(value)) or str(value.type_name)


def shown(value: Value) -> str:
    """A value as an error message quotes it."""
    return repr(value) if isinstance(value, str) else str(value)


def no_overload(function: str, *values: Value) -> EvaluationError:
    """What a function raises that is not made for such values."""
    return EvaluationError(f"no such overload: {function}({', '.join(map(type_name, values))})")


def equal(one: Value, other: Value) -> bool:
    """CEL's ``==``. Numbers compare across types; values of other different types differ.

    Raises EvaluationError where the left value can be compared with its own type only (a quantity, say).
    """
    if one is None or other is None:
        return one is other
    kind = type(one)
    if kind in NUMERIC:
        return type(other) in NUMERIC and compare_numbers(one, other) == 0
    if isinstance(one, Opaque):
        if type(one) is not type(other):
            raise no_overload("_==_", one, other)
        return one.identical(other)
    if kind is Optional:
        return _equal_optionals(one, other)
    if kind is tuple:
        return type(other) is tuple and len(one) == len(other) and all(map(not_different, one, other))
    if isinstance(one, Map):
        return isinstance(other, Map) and _equal_maps(one, other)
    return kind is type(other) and bool(one == other)


NUMERIC = {int, Uint, float}


def not_different(one: Value, other: Value) -> bool:
    """Like ``equal``, for members: what can't be compared does not count as a difference."""
    try:
        return equal(one, other)
    except EvaluationError:
        return True


def same(one: Value, other: Value) -> bool:
    """Like ``equal``, for searches: what can't be compared is not what is searched for."""
    try:
        return equal(one, other)
    except EvaluationError:
        return False


def _equal_optionals(one: Optional, other: Value) -> bool:
    if type(other) is not Optional or one.present != other.present:
        return False
    return not one.present or equal(one.content, other.content)


def _equal_maps(one: Map, other: Map) -> bool:
    if len(one) != len(other):
        return False
    for key, value in one.items():
        found = other.find(key)
        if found is None or not not_different(value, found[0]):
            return False
    return True


def compare_numbers(one: Value, other: Value) -> int | None:
    """-1, 0 or 1; None where one of them is not a number (NaN)."""
    if type(one) is float or type(other) is float:
        if math.isnan(one) or math.isnan(other):
            return None
        one, other = _as_double(one), _as_double(other)
    return int(one > other) - int(one < other)


def _as_double(number: Value) -> Value:
    """An integer next to a double counts as the double that is nearest to it."""
    return number if math.isinf(number) else float(number)


def compare(one: Value, other: Value) -> int:
    """-1, 0 or 1; raises EvaluationError for values without an order."""
    kind = type(one)
    if kind in NUMERIC and type(other) in NUMERIC:
        order = compare_numbers(one, other)
        if order is None:
            raise EvaluationError("NaN values cannot be ordered")
        return order
    if kind is not type(other) or kind not in ORDERED:
        raise no_overload("compare", one, other)
    measure = ORDERED[kind]
    left, right = measure(one), measure(other)
    return int(left > right) - int(left < right)


ORDERED: dict[type, Callable[[Value], Value]] = {
    bool: lambda value: value,
    # By bytes, as Go compares them: the same order as that of code points.
    str: lambda value: value,
    bytes: lambda value: value,
    Duration: lambda value: value.nanoseconds,
    Timestamp: lambda value: value.nanoseconds,
}
