"""The primitive operations that the interpreter combines.

Errors are raised as EvaluationError. The error of a bound value is stored in its slot and raised on the first read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from deviceclasses.cel.types import BYTES, SEMVER
from deviceclasses.cel.values import (
    MAX_SHOWN,
    NONE,
    NUMERIC,
    EvaluationError,
    Map,
    Optional,
    Uint,
    Value,
    no_overload,
    same,
    shown,
    spend,
    type_name,
)

Frame = list[Value]
"""The values of variables during an evaluation; the first is ``device``."""
Evaluate = Callable[[Frame], Value]


def bound_value(slot: int) -> Evaluate:
    def read(frame: Frame) -> Value:
        value = frame[slot]
        if isinstance(value, EvaluationError):
            raise EvaluationError(*value.args)
        return value

    return read


def in_constants(wanted: Evaluate, members: Value) -> Evaluate:
    """Membership in a list of constants. Kubernetes uses a set: it skips an empty one and can't look up every type."""
    if not members:
        return lambda _: False
    plain = all(type(each) in SET_MEMBERS for each in members)

    def contained(frame: Frame) -> bool:
        value = wanted(frame)
        spend(len(members))
        if plain and type_name(value) in NOT_IN_SETS:
            raise EvaluationError(f"{type_name(value)} can't be looked for in a list of constants")
        return any(same(value, each) for each in members)

    return contained


SET_MEMBERS = frozenset({bool, int, Uint, float, str, type(None)})
NOT_IN_SETS = frozenset({SEMVER.name, BYTES.name})


def as_bool(value: Value, operator: str) -> bool:
    if type(value) is not bool:
        raise no_overload(operator, value)
    return value


def combined(terms: Iterator[Evaluate] | list[Evaluate], frame: Frame, decisive: bool, operator: str) -> bool:
    """``decisive`` if any term has that value; else the first error; else the opposite."""
    first: EvaluationError | None = None
    for each in terms:
        try:
            if as_bool(each(frame), operator) is decisive:
                return decisive
        except EvaluationError as error:
            first = first or error
    if first is not None:
        raise first
    return not decisive


def absent_or(name: str, left: Evaluate, right: Evaluate) -> Evaluate:
    def choose(frame: Frame) -> Value:
        found = left(frame)
        if type(found) is not Optional:
            raise no_overload(name, found)
        if not found.present:
            return right(frame)
        return found if name == "or" else found.content

    return choose


def iterate(over: Value, slots: list[int], frame: Frame, units: int) -> Iterator[None]:
    """Iterate over a list or map, setting the variables of a macro; ``units`` is the work of one round."""
    pairs: Iterable[tuple[Value, Value]]
    if type(over) is tuple:
        pairs = enumerate(over) if len(slots) == 2 else ((each, None) for each in over)
    elif isinstance(over, Map):
        pairs = over.items()
    else:
        raise EvaluationError(f"got {type_name(over)!r}, expected a list or map to iterate over")
    for first, second in pairs:
        spend(units)
        frame[slots[0]] = first
        if len(slots) == 2:
            frame[slots[1]] = second
        yield None


def built_collection(kind: str, found: list[tuple[Value, Value]]) -> Value:
    if kind == "list":
        return tuple(result for _, result in found)
    if kind == "map":
        return Map(found)
    for _, result in found:
        if not isinstance(result, Map):
            raise no_overload("cel.@mapInsert", result)
    return Map((entry for _, result in found for entry in result.items()), unique=True)


def members(built: list[tuple[Evaluate, bool]], frame: Frame) -> Iterator[Value]:
    for evaluate, optional in built:
        value = evaluate(frame)
        if not optional:
            yield value
        elif type(value) is not Optional:
            raise EvaluationError(f"an optional member is initialized from {type_name(value)}, which is not optional")
        elif value.present:
            yield value.content


def entries_of(built: list[tuple[Evaluate, Evaluate, bool]], frame: Frame) -> Iterator[tuple[Value, Value]]:
    for key, value, optional in built:
        for content in members([(value, optional)], frame):
            yield key(frame), content


def member(value: Value, key: Value) -> Value:
    """``value[key]`` or ``value.key``; of an optional value, an optional member."""
    if type(value) is Optional:
        return optional_member(value, key)
    found = _find(value, key)
    if found is None:
        word = "index out of bounds" if type(value) is tuple else "no such key"
        raise EvaluationError(f"{word}: {key[:MAX_SHOWN] if type(key) is str else shown(key)}")
    return found[0]


def optional_member(value: Value, key: Value) -> Optional:
    if type(value) is Optional:
        if not value.present:
            return NONE
        value = value.content
    found = _find(value, key)
    return NONE if found is None else Optional(present=True, content=found[0])


def present(value: Value, key: str) -> bool:
    return optional_member(value, key).present


def _find(value: Value, key: Value) -> tuple[Value] | None:
    """The member in a tuple of one; None if it is missing or ``value`` has no members."""
    if isinstance(value, Map):
        return value.find(key)
    if type(value) is not tuple:
        return None
    if type(key) not in NUMERIC or key != int(key):
        raise EvaluationError(f"unsupported index type {type_name(key)!r} in list")
    return (value[int(key)],) if 0 <= key < len(value) else None
