"""Values that may be absent."""

from __future__ import annotations

from deviceclasses.cel.library.registry import function, method
from deviceclasses.cel.types import BOOL, list_of, optional_of, param
from deviceclasses.cel.values import NONE, Duration, EvaluationError, Map, Optional, Timestamp, Value

V = param("V")
OPTIONAL = optional_of(V)


def _value(one: Optional) -> Value:
    if not one.present:
        raise EvaluationError("optional.none() dereference")
    return one.content


def _is_zero(value: Value) -> bool:
    if isinstance(value, (tuple, Map, str, bytes)):
        return len(value) == 0
    if isinstance(value, (Duration, Timestamp)):
        return value.nanoseconds == 0
    if isinstance(value, Optional):
        return not value.present or _is_zero(value.content)
    return value is None or (isinstance(value, (bool, int, float)) and not value)


def _unwrap(members: tuple[Value, ...]) -> tuple[Value, ...]:
    for each in members:
        if not isinstance(each, Optional):
            raise EvaluationError(f"value {each} is not optional")
    return tuple(each.content for each in members if each.present)


function("optional.of", [V], OPTIONAL)(lambda value: Optional(present=True, content=value))
function("optional.ofNonZeroValue", [V], OPTIONAL)(
    lambda value: NONE if _is_zero(value) else Optional(present=True, content=value)
)
function("optional.none", [], OPTIONAL)(lambda: NONE)
function("optional.unwrap", [list_of(OPTIONAL)], list_of(V))(_unwrap)
method("unwrapOpt", [list_of(OPTIONAL)], list_of(V))(_unwrap)
method("value", [OPTIONAL], V)(_value)
method("hasValue", [OPTIONAL], BOOL)(lambda one: one.present)
# The interpreter evaluates the right side of both only where the left one is absent.
method("or", [OPTIONAL, OPTIONAL], OPTIONAL)(lambda one, other: one if one.present else other)
method("orValue", [OPTIONAL, V], V)(lambda one, other: one.content if one.present else other)
method("first", [list_of(V)], OPTIONAL)(lambda members: Optional(present=True, content=members[0]) if members else NONE)
method("last", [list_of(V)], OPTIONAL)(lambda members: Optional(present=True, content=members[-1]) if members else NONE)
