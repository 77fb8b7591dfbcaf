"""Arithmetic, order, membership and size. Equality, ``&&``, ``||`` and ``?:`` are the interpreter's own."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

from deviceclasses.cel.library.registry import function, method
from deviceclasses.cel.types import (
    BOOL,
    BYTES,
    COMPARABLE,
    DOUBLE,
    INT,
    NUMBERS,
    STRING,
    UINT,
    Type,
    list_of,
    map_of,
    param,
)
from deviceclasses.cel.values import INT_MAX, INT_MIN, UINT_MAX, EvaluationError, Map, Uint, Value, compare, same

A, B = param("A"), param("B")


def checked_int(value: int) -> int:
    """``value`` where it fits into 64 bits; raises EvaluationError otherwise."""
    if INT_MIN <= value <= INT_MAX:
        return value
    raise EvaluationError("integer overflow")


def checked_uint(value: int) -> Uint:
    """``value`` where it fits into 64 bits without a sign; raises EvaluationError otherwise."""
    if 0 <= value <= UINT_MAX:
        return Uint(value)
    raise EvaluationError("unsigned integer overflow")


def _quotient(one: int, other: int) -> int:
    """Towards zero, as Go divides."""
    if other == 0:
        raise EvaluationError("division by zero")
    found = abs(one) // abs(other)
    return found if (one < 0) == (other < 0) else -found


def _remainder(one: int, other: int) -> int:
    """With the sign of ``one``, as in Go."""
    if other == 0:
        raise EvaluationError("modulus by zero")
    checked_int(_quotient(one, other))
    return int(math.copysign(1, one)) * (abs(one) % abs(other))


def _double_quotient(one: float, other: float) -> float:
    if other != 0:
        return one / other
    if one == 0 or math.isnan(one):
        return math.nan
    return math.copysign(math.inf, one) * math.copysign(1, other)


WHOLE: dict[str, Callable[[int, int], int]] = {
    "_+_": operator.add,
    "_-_": operator.sub,
    "_*_": operator.mul,
    "_/_": _quotient,
    "_%_": _remainder,
}
BROKEN: dict[str, Callable[[float, float], float]] = {
    "_+_": operator.add,
    "_-_": operator.sub,
    "_*_": operator.mul,
    "_/_": _double_quotient,
}


def _unsigned(body: Callable[[int, int], int]) -> Callable[[int, int], Uint]:
    return lambda one, other: checked_uint(body(int(one), int(other)))


def _signed(body: Callable[[int, int], int]) -> Callable[[int, int], int]:
    return lambda one, other: checked_int(body(one, other))


for _name, _body in WHOLE.items():
    function(_name, [INT, INT], INT)(_signed(_body))
    function(_name, [UINT, UINT], UINT)(_unsigned(_body))
for _name, _real in BROKEN.items():
    function(_name, [DOUBLE, DOUBLE], DOUBLE)(_real)
for _kind in (STRING, BYTES, list_of(A)):
    function("_+_", [_kind, _kind], _kind)(operator.add)

function("-_", [INT], INT)(lambda value: checked_int(-value))
function("-_", [DOUBLE], DOUBLE)(operator.neg)
function("!_", [BOOL], BOOL)(operator.not_)

ORDER: dict[str, Callable[[int], bool]] = {
    "_<_": lambda order: order < 0,
    "_<=_": lambda order: order <= 0,
    "_>_": lambda order: order > 0,
    "_>=_": lambda order: order >= 0,
}
ORDERED_PAIRS: list[tuple[Type, Type]] = [
    *((one, other) for one in NUMBERS for other in NUMBERS),
    *((each, each) for each in COMPARABLE if each not in NUMBERS),
]


def _ordered(wanted: Callable[[int], bool]) -> Callable[[Value, Value], bool]:
    return lambda one, other: wanted(compare(one, other))


for _name, _wanted in ORDER.items():
    for _one, _other in ORDERED_PAIRS:
        function(_name, [_one, _other], BOOL)(_ordered(_wanted))


def _in_list(wanted: Value, members: tuple[Value, ...]) -> bool:
    return any(same(wanted, each) for each in members)


function("@in", [A, list_of(A)], BOOL)(_in_list)
function("@in", [A, map_of(A, B)], BOOL)(lambda key, entries: entries.has(key))


def _size(value: Map | str | bytes | tuple[Value, ...]) -> int:
    return len(value)


for _kind in (STRING, BYTES, list_of(A), map_of(A, B)):
    function("size", [_kind], INT)(_size)
    method("size", [_kind], INT)(_size)
