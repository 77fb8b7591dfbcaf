"""The values of CEL, their equality and order, and the work limit of an evaluation.

``None``, ``bool``, ``int`` (64 bits), ``float`` (CEL's double), ``str`` and ``bytes`` are Python's own; a list is a
tuple. Other types have a class here or in the module of their functions. Source: the CEL language definition.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Value = Any

INT_MIN, INT_MAX, UINT_MAX = -(2**63), 2**63 - 1, 2**64 - 1

MAX_DIGITS = 400
"""Maximum digits of a number; Python's own ``int`` raises ValueError from 4,300 on."""


def whole_number(text: str) -> int:
    """The value of decimal digits with an optional sign; a value too large for every type beyond MAX_DIGITS."""
    digits = text.lstrip("+-").lstrip("0") or "0"
    value = int(digits) if len(digits) <= MAX_DIGITS else 10**MAX_DIGITS
    return -value if text.startswith("-") else value


class EvaluationError(Exception):
    """Evaluation has no result, for the reason in the message. Callers get it as CelError or as a verdict."""


MAX_WORK = 1_000_000
"""Units of work of one evaluation: about one function call, round of a loop or member of a list each.

Kubernetes refuses selectors with a higher estimate when they are written, so that selectors in a cluster stay below.
"""


class WorkLimitError(Exception):
    """The evaluation takes more than MAX_WORK units. No operator of CEL recovers from it."""


class _Work(threading.local):
    left = MAX_WORK


_work = _Work()


def start_work() -> None:
    """Give the current thread MAX_WORK units for the evaluation that begins."""
    _work.left = MAX_WORK


CHARACTERS_PER_UNIT = 16
LONG_KEY = 1000
"""Characters of a key from which its lookup counts as work."""


def spend(units: int) -> None:
    """Count work of the current evaluation. Raises WorkLimitError beyond MAX_WORK units."""
    _work.left -= units
    if _work.left < 0:
        raise WorkLimitError(f"it takes more than {MAX_WORK} steps")


class Uint(int):
    """An unsigned integer of 64 bits."""

    __slots__ = ()


class Opaque:
    """A value that can be compared only with values of its own class."""

    __slots__ = ()
    type_name = ""

    def identical(self, other: Any) -> bool:
        """Whether both, of the same class, are equal in CEL."""
        return bool(self == other)


@dataclass(frozen=True)
class Optional:
    """A value that may be absent."""

    content: Value = None
    present: bool = True


NO_CONTENT = Optional(present=False)


@dataclass(frozen=True)
class TypeValue:
    """A type as a value, such as ``int`` in ``type(1) == int``."""

    name: str


class Map:
    """A map of CEL: 1 and 1u are the same key, which 1.0 finds too; 1 and true are not."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Iterable[tuple[Value, Value]] = (), *, unique: bool = False) -> None:
        """Build a map. ``unique`` raises EvaluationError for a repeated key; else its last value counts."""
        self._entries: dict[Hashable, tuple[Value, Value]] = {}
        for key, value in entries:
            plain = _plain_key(key)
            if unique and plain in self._entries:
                raise EvaluationError(f"insert failed: key {shown(key)} already exists")
            self._entries[plain] = (key, value)

    def find(self, key: Value) -> tuple[Value] | None:
        """The value in a tuple of one, or None if there is no such key. Raises EvaluationError for invalid keys."""
        if type(key) is str and len(key) > LONG_KEY:
            spend(len(key) // CHARACTERS_PER_UNIT)
        entry = self._entries.get(_plain_key(key))
        if entry is None and type(key) is float and key.is_integer():
            entry = self._entries.get(int(key))
        return None if entry is None else (entry[1],)

    def has(self, key: Value) -> bool:
        """Whether the key is among the keys of an iteration."""
        return Map.find(self, key) is not None

    def items(self) -> Iterator[tuple[Value, Value]]:
        return iter(self._entries.values())

    def __iter__(self) -> Iterator[Value]:
        return (key for key, _ in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)


class DomainMap(Map):
    """``device.attributes`` or ``device.capacity``: a missing domain reads as an empty map."""

    __slots__ = ()

    def find(self, key: Value) -> tuple[Value]:
        return super().find(key) or (EMPTY_MAP,)


EMPTY_MAP = Map()


def string_map(entries: Mapping[str, Value], kind: type[Map] = Map) -> Map:
    """A map with these string keys, built without checking each."""
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
}


def type_name(value: Value) -> str:
    return PLAIN_NAMES.get(type(value)) or str(value.type_name)


def shown(value: Value) -> str:
    """A value quoted for an error message: only the beginning of a string, and of a container only its type.

    The text of a list that contains another one twice, and so on, doubles with each level.
    """
    if type(value) in SIZED_VALUES:
        return repr(value[:MAX_SHOWN])
    return str(value) if value is None or type(value) in PLAIN_NUMBERS else type_name(value)


MAX_SHOWN = 100
PLAIN_NUMBERS = (bool, int, Uint, float)


def no_overload(function: str, *values: Value) -> EvaluationError:
    return EvaluationError(f"no such overload: {function}({', '.join(map(type_name, values))})")


def equal(one: Value, other: Value) -> bool:
    """CEL's ``==``. Numbers compare across types; values of other different types differ.

    Raises EvaluationError if the left value is Opaque (such as a quantity) and the right one has another type.
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
        spend(len(one))
        return type(other) is tuple and len(one) == len(other) and all(map(not_different, one, other))
    if isinstance(one, Map):
        return isinstance(other, Map) and _equal_maps(one, other)
    if kind is not type(other):
        return False
    if kind in SIZED_VALUES and one is not other and len(one) == len(other):
        spend(len(one) // CHARACTERS_PER_UNIT)
    return bool(one == other)


def differs(one: Value, other: Value) -> bool:
    """CEL's ``!=``: true also if ``==`` is an error, as in cel-go."""
    return not same(one, other)


SIZED_VALUES = (str, bytes)
NUMERIC = {int, Uint, float}


def not_different(one: Value, other: Value) -> bool:
    """Like ``equal``, for members of lists and maps: values that can't be compared count as equal."""
    return same(one, other, otherwise=True)


def same(one: Value, other: Value, *, otherwise: bool = False) -> bool:
    """Like ``equal``, for searches: values that can't be compared count as different, or as ``otherwise`` says."""
    try:
        return equal(one, other)
    except EvaluationError:
        return otherwise


def _equal_optionals(one: Optional, other: Value) -> bool:
    if type(other) is not Optional or one.present != other.present:
        return False
    return not one.present or equal(one.content, other.content)


def _equal_maps(one: Map, other: Map) -> bool:
    if len(one) != len(other):
        return False
    spend(len(one))
    partners = ((value, other.find(key)) for key, value in one.items())
    return all(partner is not None and not_different(value, *partner) for value, partner in partners)


def compare_numbers(one: Value, other: Value) -> int | None:
    """-1, 0 or 1; None if one of them is not a number (NaN)."""
    if type(one) is float or type(other) is float:
        if math.isnan(one) or math.isnan(other):
            return None
        one, other = float(one), float(other)
    return int(one > other) - int(one < other)


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
    return int(one > other) - int(one < other)


ORDERED = frozenset({bool, str, bytes})
"""Types with an order. Strings are ordered by code points: the order of their bytes, which Go compares, is the same."""
