"""Kubernetes quantities ("40Gi", "1500m") and the functions on them.

Source: Kubernetes' resource.Quantity, verified with the real scheduler. A quantity is exact. It is stored as a whole
number times a power of ten while that fits 64 bits, and only then can be an integer: 1000m and 1.5Gi are not.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from deviceclasses.cel.library.registry import declare_order, function, method, succeeds
from deviceclasses.cel.types import BOOL, DOUBLE, INT, QUANTITY, STRING
from deviceclasses.cel.values import INT_MAX, INT_MIN, MAX_DIGITS, EvaluationError, Opaque, whole_number

QUANTITY_SYNTAX = re.compile(r"([+-]?)(\d*)(?:\.(\d*))?((?:[eEinumkKMGTP]*)(?:[+-]?\d*))", re.ASCII)
BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
EXPONENT = re.compile(r"[eE][+-]?\d+", re.ASCII)
DIGITS_TEXT = 18
"""Maximum digits of a number that is stored as a whole number and a power of ten."""
BINARY_DIGITS = 15
NANO = -9
"""The smallest power of ten: values are rounded to it, away from zero."""
MAX_EXPONENT = 400
"""Maximum exponent; numbers with larger ones are useless and slow to compute with."""


@dataclass(frozen=True, eq=False)
class Quantity(Opaque):
    """``value`` is exact; ``scale`` is the power of ten of its representation, or None if it has no such one.

    ``derived`` quantities are results of ``add`` or ``sub``; Kubernetes accepts them only on the left of ``==``.
    """

    value: Fraction
    scale: int | None
    derived: bool = False

    type_name = QUANTITY.name

    def identical(self, other: Any) -> bool:
        if other.derived:
            raise EvaluationError("no such overload: a sum or difference of quantities on the right side of ==")
        return bool(self.value == other.value)

    @property
    def whole(self) -> int | None:
        """The value as an integer, or None if Kubernetes does not treat it as one."""
        if self.scale is None or self.scale < 0 or self.value.denominator != 1:
            return None
        return self.value.numerator if INT_MIN <= self.value.numerator <= INT_MAX else None

    def plus(self, other: Quantity, sign: int = 1) -> Quantity:
        total = self.value + sign * other.value
        return Quantity(total, _common_scale(self, other, total), derived=True)

    def __str__(self) -> str:
        return f"quantity {_double(self.value):g}"


def _common_scale(one: Quantity, other: Quantity, total: Fraction) -> int | None:
    if one.scale is None or other.scale is None:
        return None
    if other.value == 0:
        return one.scale
    if one.value == 0:
        return other.scale
    scale = min(one.scale, other.scale)
    amounts = (amount / _ten(scale) for amount in (one.value, other.value, total))
    return scale if all(INT_MIN <= amount <= INT_MAX for amount in amounts) else None


def _ten(exponent: int) -> Fraction:
    return Fraction(10) ** exponent


@lru_cache(maxsize=4096)
def parse_quantity(text: str) -> Quantity:
    """Parse a quantity. Raises EvaluationError with the accepted syntax."""
    match = QUANTITY_SYNTAX.fullmatch(text)
    if match is None or not text:
        raise EvaluationError(f"{text!r} is not a quantity: digits and a suffix such as m, k, Ki, Gi or e3 make one")
    sign, digits, fraction, suffix = match[1], match[2].lstrip("0") or "0", match[3] or "", match[4]
    if len(digits) + len(fraction) > MAX_DIGITS:
        raise EvaluationError(
            f"{text[:20]!r}... has more than {MAX_DIGITS} digits, which Tessera does not compute with"
        )
    number = Fraction(int(digits + fraction), 10 ** len(fraction)) * (-1 if sign == "-" else 1)
    if suffix in BINARY:
        scaled = _binary(number, len(digits), BINARY[suffix], broken=bool(fraction))
        return _with_digits(text, match, scaled)
    if suffix not in DECIMAL and not EXPONENT.fullmatch(suffix):
        raise EvaluationError(f"{text!r} has no known suffix: {' '.join([*DECIMAL, *BINARY, 'e3'])} are")
    exponent = DECIMAL[suffix] if suffix in DECIMAL else whole_number(suffix[1:])
    if abs(exponent) > MAX_EXPONENT:
        raise EvaluationError(f"{text!r} has an exponent beyond {MAX_EXPONENT}, which Tessera does not compute with")
    value, scale = number * _ten(exponent), exponent - len(fraction)
    is_stored = len(digits) + len(fraction) <= DIGITS_TEXT and scale >= NANO
    return _with_digits(text, match, Quantity(value, scale) if is_stored else Quantity(_rounded(value), None))


def _with_digits(text: str, match: re.Match[str], found: Quantity) -> Quantity:
    """Refuse a suffix without digits, which Kubernetes accepts as 0 only within 64 bits."""
    if found.scale is None and not (match[2] or match[3]):
        raise EvaluationError(f"{text!r} is not a quantity: it has no digits")
    return found


def _binary(number: Fraction, digits: int, exponent: int, *, broken: bool) -> Quantity:
    value = number * 2**exponent
    if not broken and BINARY_DIGITS - digits - exponent * 3 // 10 - 1 >= 0:
        return Quantity(value, 0)
    value = _rounded(value)
    return Quantity(max(-Fraction(INT_MAX), min(value, Fraction(INT_MAX))), None)


def _rounded(value: Fraction) -> Fraction:
    nanos = value * 10**9
    if nanos.denominator == 1:
        return value
    away = -(-abs(nanos.numerator) // nanos.denominator)
    return Fraction(away if value > 0 else -away, 10**9)


def _as_float(quantity: Quantity) -> float:
    """The value as a double, computed from the stored digits as Kubernetes does."""
    if quantity.scale is None or quantity.scale == 0:
        return _double(quantity.value)
    return _double(quantity.value / _ten(quantity.scale)) * 10.0**quantity.scale


def _double(value: Fraction) -> float:
    """The nearest double; infinity beyond the largest one, as in Go."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _as_integer(quantity: Quantity) -> int:
    whole = quantity.whole
    if whole is None:
        raise EvaluationError("cannot convert value to integer")
    return whole


def _of_int(number: int) -> Quantity:
    return Quantity(Fraction(number), 0)


function("quantity", [STRING], QUANTITY, parse_quantity)
function("isQuantity", [STRING], BOOL, succeeds(parse_quantity))
function("sign", [QUANTITY], INT, lambda one: (one.value > 0) - (one.value < 0))
declare_order(QUANTITY, lambda one: one.value)
method("asApproximateFloat", [QUANTITY], DOUBLE, _as_float)
method("asInteger", [QUANTITY], INT, _as_integer)
method("isInteger", [QUANTITY], BOOL, lambda one: one.whole is not None)
method("add", [QUANTITY, QUANTITY], QUANTITY, lambda one, other: one.plus(other))
method("add", [QUANTITY, INT], QUANTITY, lambda one, number: one.plus(_of_int(number)))
method("sub", [QUANTITY, QUANTITY], QUANTITY, lambda one, other: one.plus(other, -1))
method("sub", [QUANTITY, INT], QUANTITY, lambda one, number: one.plus(_of_int(number), -1))
