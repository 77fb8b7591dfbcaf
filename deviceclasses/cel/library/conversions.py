"""Conversions between types: ``int("5")``, ``string(true)``, ``type(x)``, ``dyn(x)``."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from deviceclasses.cel.library.operators import checked_int, checked_uint
from deviceclasses.cel.library.registry import function
from deviceclasses.cel.library.times import duration_text, parse_duration, parse_timestamp, timestamp_of, timestamp_text
from deviceclasses.cel.types import (
    BOOL,
    BYTES,
    DOUBLE,
    DURATION,
    DYN,
    INT,
    STRING,
    TIMESTAMP,
    UINT,
    Type,
    param,
    type_of_type,
)
from deviceclasses.cel.values import EvaluationError, TypeValue, Uint, Value, type_name

A = param("A")
CONVERSIONS = frozenset(["bool", "bytes", "double", "duration", "dyn", "int", "string", "timestamp", "type", "uint"])
WHOLE = re.compile(r"[+-]?[0-9]+")
UNSIGNED = re.compile(r"[0-9]+")
REAL = re.compile(r"[+-]?(([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|inf(inity)?|nan)", re.IGNORECASE)
PLAIN_BELOW = 6
"""The power of ten from which on a double is written with an exponent."""
TRUE, FALSE = ("1", "t", "T", "true", "TRUE", "True"), ("0", "f", "F", "false", "FALSE", "False")


def _wrong(text: str, wanted: str) -> EvaluationError:
    return EvaluationError(f"type conversion error from 'string' to '{wanted}': {text!r}")


def _bool(text: str) -> bool:
    if text not in TRUE and text not in FALSE:
        raise _wrong(text, "bool")
    return text in TRUE


def _int(text: str) -> int:
    if not WHOLE.fullmatch(text):
        raise _wrong(text, "int")
    return checked_int(int(text))


def _uint(text: str) -> Uint:
    if not UNSIGNED.fullmatch(text):
        raise _wrong(text, "uint")
    return checked_uint(int(text))


def _double(text: str) -> float:
    if not REAL.fullmatch(text):
        raise _wrong(text, "double")
    value = float(text)
    if math.isinf(value) and "inf" not in text.lower():
        raise _wrong(text, "double")
    return value


def _double_to_int(value: float) -> int:
    if math.isnan(value) or math.isinf(value) or not -(2.0**63) < value < 2.0**63:
        raise EvaluationError("integer overflow")
    return int(value)


def _double_to_uint(value: float) -> Uint:
    if math.isnan(value) or math.isinf(value) or not 0 <= value < 2.0**64:
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


def _type(value: Value) -> TypeValue:
    return TypeValue(type_name(value))


def _same(value: Value) -> Value:
    return value


def _text_of_bool(value: bool) -> str:
    return "true" if value else "false"


SAME: list[tuple[str, Type]] = [
    ("bool", BOOL),
    ("bytes", BYTES),
    ("double", DOUBLE),
    ("duration", DURATION),
    ("int", INT),
    ("string", STRING),
    ("timestamp", TIMESTAMP),
    ("uint", UINT),
]
for _name, _kind in SAME:
    function(_name, [_kind], _kind)(_same)
function("dyn", [A], DYN)(_same)
function("type", [A], type_of_type(A))(_type)
function("bool", [STRING], BOOL)(_bool)
function("bytes", [STRING], BYTES)(lambda text: text.encode())
function("double", [INT], DOUBLE)(float)
function("double", [UINT], DOUBLE)(float)
function("double", [STRING], DOUBLE)(_double)
function("int", [DOUBLE], INT)(_double_to_int)
function("int", [UINT], INT)(lambda value: checked_int(int(value)))
function("int", [STRING], INT)(_int)
function("int", [DURATION], INT)(lambda value: value.nanoseconds)
function("int", [TIMESTAMP], INT)(lambda value: value.nanoseconds // 10**9)
function("uint", [DOUBLE], UINT)(_double_to_uint)
function("uint", [INT], UINT)(checked_uint)
function("uint", [STRING], UINT)(_uint)
function("string", [BOOL], STRING)(_text_of_bool)
function("string", [BYTES], STRING)(_decoded)
function("string", [DOUBLE], STRING)(double_text)
function("string", [INT], STRING)(str)
function("string", [UINT], STRING)(lambda value: str(int(value)))
function("string", [DURATION], STRING)(duration_text)
function("string", [TIMESTAMP], STRING)(timestamp_text)
function("duration", [STRING], DURATION)(parse_duration)
function("timestamp", [STRING], TIMESTAMP)(parse_timestamp)
function("timestamp", [INT], TIMESTAMP)(timestamp_of)
