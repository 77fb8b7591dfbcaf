"""Operators, ``size``, and conversions between types such as ``int("5")``.

``&&`` and ``||`` are the compiler's own; indexes are in ``lists_and_optionals``.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from decimal import Decimal

from deviceclasses.cel.library.registry import function, method
from deviceclasses.cel.types import (
    BOOL,
    BYTES,
    COMPARABLE,
    DOUBLE,
    DYN,
    INT,
    NUMBERS,
    STRING,
    UINT,
    Type,
    list_of,
    map_of,
    param,
    type_of_type,
)
from deviceclasses.cel.values import (
    INT_MAX,
    INT_MIN,
    UINT_MAX,
    EvaluationError,
    TypeValue,
    Uint,
    Value,
    compare,
    differs,
    equal,
    same,
    type_name,
    whole_number,
)

A, B = param("A"), param("B")


def checked_int(value: int) -> int:
    """``value`` if it fits into a signed 64-bit integer. Raises EvaluationError otherwise."""
    if INT_MIN <= value <= INT_MAX:
        return value
    raise EvaluationError("integer overflow")


def checked_uint(value: int) -> Uint:
    """``value`` if it fits into an unsigned 64-bit integer. Raises EvaluationError otherwise."""
    if 0 <= value <= UINT_MAX:
        return Uint(value)
    raise EvaluationError("unsigned integer overflow")


def _quotient(one: int, other: int) -> int:
    """The quotient rounded towards zero, as in Go."""
    if other == 0:
        raise EvaluationError("division by zero")
    quotient = abs(one) // abs(other)
    return quotient if (one < 0) == (other < 0) else -quotient


def _remainder(one: int, other: int) -> int:
    """The remainder with the sign of ``one``, as in Go."""
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


ARITHMETIC: dict[str, Callable[..., Value]] = {"_+_": operator.add, "_-_": operator.sub, "_*_": operator.mul}
INTEGER_ARITHMETIC = {**ARITHMETIC, "_/_": _quotient, "_%_": _remainder}
DOUBLE_ARITHMETIC = {**ARITHMETIC, "_/_": _double_quotient}


def _unsigned(body: Callable[[int, int], int]) -> Callable[[int, int], Uint]:
    return lambda one, other: checked_uint(body(int(one), int(other)))


def _signed(body: Callable[[int, int], int]) -> Callable[[int, int], int]:
    return lambda one, other: checked_int(body(one, other))


for _name, _body in INTEGER_ARITHMETIC.items():
    function(_name, [INT, INT], INT, _signed(_body))
    function(_name, [UINT, UINT], UINT, _unsigned(_body))
for _name, _real in DOUBLE_ARITHMETIC.items():
    function(_name, [DOUBLE, DOUBLE], DOUBLE, _real)
for _kind in (STRING, BYTES, list_of(A)):
    function("_+_", [_kind, _kind], _kind, operator.add)

function("-_", [INT], INT, lambda value: checked_int(-value))
function("-_", [DOUBLE], DOUBLE, operator.neg)
function("!_", [BOOL], BOOL, operator.not_)

ORDER: dict[str, Callable[[int], bool]] = {
    "_<_": lambda order: order < 0,
    "_<=_": lambda order: order <= 0,
    "_>_": lambda order: order > 0,
    "_>=_": lambda order: order >= 0,
}
ORDERED_PAIRS: list[tuple[Type, Type]] = [
    *((one, other) for one in NUMBERS for other in NUMBERS),
    *((kind, kind) for kind in COMPARABLE if kind not in NUMBERS),
]


def _ordered(wanted: Callable[[int], bool]) -> Callable[[Value, Value], bool]:
    return lambda one, other: wanted(compare(one, other))


for _name, _wanted in ORDER.items():
    for _one, _other in ORDERED_PAIRS:
        function(_name, [_one, _other], BOOL, _ordered(_wanted))


function("_==_", [A, A], BOOL, equal)
function("_!=_", [A, A], BOOL, differs)
# The compiler evaluates only one of both values.
function("_?_:_", [BOOL, A, A], A, lambda condition, yes, no: yes if condition else no)


function("@in", [A, list_of(A)], BOOL, lambda wanted, members: any(same(wanted, member) for member in members))
function("@in", [A, map_of(A, B)], BOOL, lambda key, entries: entries.has(key))


for _kind in (STRING, BYTES, list_of(A), map_of(A, B)):
    function("size", [_kind], INT, len)
    method("size", [_kind], INT, len)

CONVERSIONS = frozenset(["bool", "bytes", "double", "dyn", "int", "string", "type", "uint"])
INTEGER_TEXT = re.compile(r"[+-]?[0-9]+")
UNSIGNED_TEXT = re.compile(r"[0-9]+")
DOUBLE_TEXT = re.compile(r"[+-]?(([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|inf(inity)?|nan)", re.IGNORECASE)
PLAIN_BELOW = 6
"""Doubles from this power of ten on are written with an exponent."""
TRUE_TEXT = re.compile("1|t|T|true|TRUE|True")
BOOL_TEXT = re.compile(f"{TRUE_TEXT.pattern}|0|f|F|false|FALSE|False")


def _declare_from_text(kind: Type, syntax: re.Pattern[str], hint: str, convert: Callable[[str], Value | None]) -> None:
    """Declare the conversion from strings; ``convert`` returns None for a text that it does not accept."""

    def converted(text: str) -> Value:
        value = convert(text) if syntax.fullmatch(text) else None
        if value is None:
            conversion = f"type conversion error from 'string' to '{kind.name}'"
            raise EvaluationError(f"{conversion}: {text!r}; accepted: {hint}")
        return value

    function(kind.name, [STRING], kind, converted)


def _double(text: str) -> float | None:
    value = float(text)
    return None if math.isinf(value) and "inf" not in text.lower() else value


def _double_to_int(value: float) -> int:
    if not -(2.0**63) < value < 2.0**63:
        raise EvaluationError("integer overflow")
    return int(value)


def _double_to_uint(value: float) -> Uint:
    if not 0 <= value < 2.0**64:
        raise EvaluationError("unsigned integer overflow")
    return Uint(value)


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise EvaluationError("invalid UTF-8 in bytes, cannot convert to string") from None


def double_text(value: float) -> str:
    """The shortest digits that give the same double, written as Go's %g does."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    exact = Decimal(repr(value)).normalize()
    sign, digits, _ = exact.as_tuple()
    text = "".join(map(str, digits))
    power = exact.adjusted()
    last = power - len(text) + 1
    if value == 0 or -4 <= power < PLAIN_BELOW:
        return f"{value:.{max(0, -last)}f}"
    broken = f".{text[1:]}" if len(text) > 1 else ""
    return f"{'-' * sign}{text[0]}{broken}e{'-' if power < 0 else '+'}{abs(power):02d}"


def _same(value: Value) -> Value:
    return value


for _kind in COMPARABLE:
    function(_kind.name, [_kind], _kind, _same)
function("dyn", [A], DYN, _same)
function("type", [A], type_of_type(A), lambda value: TypeValue(type_name(value)))
function("bytes", [STRING], BYTES, lambda text: text.encode())
function("double", [INT], DOUBLE, float)
function("double", [UINT], DOUBLE, float)
function("int", [DOUBLE], INT, _double_to_int)
function("int", [UINT], INT, lambda value: checked_int(int(value)))
function("uint", [DOUBLE], UINT, _double_to_uint)
function("uint", [INT], UINT, checked_uint)
_declare_from_text(BOOL, BOOL_TEXT, "true and false", lambda text: bool(TRUE_TEXT.fullmatch(text)))
_declare_from_text(DOUBLE, DOUBLE_TEXT, "numbers such as 1.5e3", _double)
_declare_from_text(INT, INTEGER_TEXT, "digits", lambda text: checked_int(whole_number(text)))
_declare_from_text(UINT, UNSIGNED_TEXT, "digits", lambda text: checked_uint(whole_number(text)))
function("string", [BOOL], STRING, lambda value: "true" if value else "false")
function("string", [BYTES], STRING, _decoded)
function("string", [DOUBLE], STRING, double_text)
function("string", [INT], STRING, str)
function("string", [UINT], STRING, lambda value: str(int(value)))
