"""Functions on lists, sets made of them, and optional values; indexes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cmp_to_key, reduce
from itertools import pairwise

from deviceclasses.cel.library.operators_and_conversions import checked_int, checked_uint
from deviceclasses.cel.library.registry import function, method
from deviceclasses.cel.types import (
    BOOL,
    COMPARABLE,
    DOUBLE,
    DYN,
    INT,
    UINT,
    list_of,
    map_of,
    optional_of,
    param,
)
from deviceclasses.cel.values import (
    MAX_SHOWN,
    NO_CONTENT,
    NUMERIC,
    EvaluationError,
    Map,
    Optional,
    Uint,
    Value,
    compare,
    no_overload,
    same,
    shown,
    spend,
    type_name,
)

Values = tuple[Value, ...]
ELEMENT = param("T")
LIST = list_of(ELEMENT)
MAX_RANGE = 1_000_000
"""Maximum length of a list made by ``lists.range``."""


def _extreme(name: str, wanted: int) -> Callable[[Values], Value]:
    def find(members: Values) -> Value:
        if not members:
            raise EvaluationError(f"{name} called on empty list")
        best = members[0]
        for member in members[1:]:
            if compare(best, member) == wanted:
                best = member
        return best

    return find


def _total(zero: Value, add: Callable[[Value, Value], Value]) -> Callable[[Values], Value]:
    def total(members: Values) -> Value:
        for member in members:
            if type(member) is not type(zero):
                raise no_overload("_+_", zero, member)
        return reduce(add, members, zero)

    return total


def _index_of(members: Values, wanted: Value) -> int:
    return next((index for index, member in enumerate(members) if same(member, wanted)), -1)


def _last_index_of(members: Values, wanted: Value) -> int:
    index = _index_of(members[::-1], wanted)
    return -1 if index < 0 else len(members) - 1 - index


def _slice(members: Values, start: int, end: int) -> Values:
    if not 0 <= start <= end <= len(members):
        raise EvaluationError(f"cannot slice({start}, {end}), list is length {len(members)}")
    return members[start:end]


def _flatten(members: Values, depth: int = 1) -> Values:
    if depth < 0:
        raise EvaluationError("level must be non-negative")
    spend(len(members))
    flat: list[Value] = []
    for member in members:
        if type(member) is tuple and depth > 0:
            flat += _flatten(member, depth - 1)
        else:
            flat.append(member)
    return tuple(flat)


def sort_by(members: Values, keys: Values) -> Values:
    """``members`` in the order of their ``keys``, which must be of one type that has an order."""
    if keys and type_name(keys[0]) not in {comparable.name for comparable in COMPARABLE}:
        raise EvaluationError("list elements must be comparable")
    if any(type(key) is not type(keys[0]) for key in keys):
        raise EvaluationError("list elements must have the same type")
    spend(len(keys) * len(keys).bit_length())
    by_key = cmp_to_key(compare)
    pairs = sorted(zip(keys, members, strict=True), key=lambda pair: by_key(pair[0]))
    return tuple(member for _, member in pairs)


def _range(count: int) -> Values:
    if not 0 <= count <= MAX_RANGE:
        raise EvaluationError(f"lists.range: {count} is not from 0 to {MAX_RANGE}")
    spend(count)
    return tuple(range(count))


def _distinct(members: Values) -> Values:
    found: list[Value] = []
    for member in members:
        spend(len(found))
        if not any(same(member, other) for other in found):
            found.append(member)
    return tuple(found)


def _contains(members: Values, wanted: Values) -> bool:
    spend(len(members) * len(wanted))
    return all(any(same(searched, member) for member in members) for searched in wanted)


def _intersects(one: Values, other: Values) -> bool:
    spend(len(one) * len(other))
    return any(same(searched, member) for searched in one for member in other)


SUMS = {
    INT: _total(0, lambda one, other: checked_int(one + other)),
    UINT: _total(Uint(0), lambda one, other: checked_uint(int(one) + int(other))),
    DOUBLE: _total(0.0, lambda one, other: one + other),
}
for _kind in COMPARABLE:
    method("isSorted", [list_of(_kind)], BOOL, lambda members: all(compare(*pair) <= 0 for pair in pairwise(members)))
    method("min", [list_of(_kind)], _kind, _extreme("min", 1))
    method("max", [list_of(_kind)], _kind, _extreme("max", -1))
    method("sort", [list_of(_kind)], list_of(_kind), lambda members: sort_by(members, members))
for _kind, _sum in SUMS.items():
    method("sum", [list_of(_kind)], _kind, _sum)
method("indexOf", [LIST, ELEMENT], INT, _index_of)
method("lastIndexOf", [LIST, ELEMENT], INT, _last_index_of)
method("slice", [LIST, INT, INT], LIST, _slice)
method("flatten", [list_of(LIST)], LIST, _flatten)
method("flatten", [list_of(DYN), INT], list_of(DYN), _flatten)
method("reverse", [LIST], LIST, lambda members: members[::-1])
method("distinct", [LIST], LIST, _distinct)
function("lists.range", [INT], list_of(INT), _range)
function("sets.contains", [LIST, LIST], BOOL, _contains)
function("sets.intersects", [LIST, LIST], BOOL, _intersects)
function("sets.equivalent", [LIST, LIST], BOOL, lambda one, other: _contains(one, other) and _contains(other, one))

V = param("V")
OPTIONAL = optional_of(V)


def _value(one: Optional) -> Value:
    if not one.present:
        raise EvaluationError("optional.none() dereference")
    return one.content


def _is_zero(value: Value) -> bool:
    if isinstance(value, (tuple, Map, str, bytes)):
        return len(value) == 0
    if isinstance(value, Optional):
        return not value.present or _is_zero(value.content)
    return value is None or (isinstance(value, (bool, int, float)) and not value)


def _unwrap(members: tuple[Value, ...]) -> tuple[Value, ...]:
    for member in members:
        if not isinstance(member, Optional):
            raise EvaluationError(f"a value of type {type_name(member)} is not optional")
    return tuple(optional.content for optional in members if optional.present)


function("optional.of", [V], OPTIONAL, Optional)
function("optional.ofNonZeroValue", [V], OPTIONAL, lambda value: NO_CONTENT if _is_zero(value) else Optional(value))
function("optional.none", [], OPTIONAL, lambda: NO_CONTENT)
function("optional.unwrap", [list_of(OPTIONAL)], list_of(V), _unwrap)
method("unwrapOpt", [list_of(OPTIONAL)], list_of(V), _unwrap)
method("value", [OPTIONAL], V, _value)
method("hasValue", [OPTIONAL], BOOL, lambda one: one.present)
# The compiler evaluates the right side of both only where the left one is absent.
method("or", [OPTIONAL, OPTIONAL], OPTIONAL, lambda one, other: one if one.present else other)
method("orValue", [OPTIONAL, V], V, lambda one, other: one.content if one.present else other)
method("first", [list_of(V)], OPTIONAL, lambda members: optional_member(members, 0))
method("last", [list_of(V)], OPTIONAL, lambda members: optional_member(members, len(members) - 1))


def member(value: Value, key: Value) -> Value:
    """``value[key]`` or ``value.key``; of an optional value, an optional member."""
    if type(value) is Optional:
        return optional_member(value, key)
    optional = _found(value, key)
    if optional is None:
        word = "index out of bounds" if type(value) is tuple else "no such key"
        raise EvaluationError(f"{word}: {key[:MAX_SHOWN] if type(key) is str else shown(key)}")
    return optional[0]


def optional_member(value: Value, key: Value) -> Optional:
    if type(value) is Optional:
        if not value.present:
            return NO_CONTENT
        value = value.content
    optional = _found(value, key)
    return NO_CONTENT if optional is None else Optional(*optional)


def _found(value: Value, key: Value) -> tuple[Value] | None:
    """The member in a tuple of one; None if it is missing or ``value`` has no members."""
    if isinstance(value, Map):
        return value.find(key)
    if type(value) is not tuple:
        return None
    if type(key) not in NUMERIC or key != int(key):
        raise EvaluationError(f"unsupported index type {type_name(key)!r} in list")
    return (value[int(key)],) if 0 <= key < len(value) else None


K = param("K")
INDEXED = [(list_of(V), INT), (map_of(K, V), K)]
for _container, _key in [*INDEXED, *((optional_of(container), key) for container, key in INDEXED)]:
    _element = OPTIONAL if _container.name == "optional_type" else V
    function("_[_]", [_container, _key], _element, member)
    function("_[?_]", [_container, _key], OPTIONAL, optional_member)
