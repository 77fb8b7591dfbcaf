"""The steps that an expression's function is made of.

An error is an EvaluationError; a bound value that is one is kept until it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from deviceclasses.cel.types import BYTES, SEMVER
from deviceclasses.cel.values import (
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
    type_name,
)

Places = list[Value]
"""The values of variables while evaluating; ``device`` is the first."""
Evaluate = Callable[[Places], Value]


def bound_value(place: int) -> Evaluate:
    def read(places: Places) -> Value:
        value = places[place]
        if isinstance(value, EvaluationError):
            raise EvaluationError(*value.args)
        return value

    return read


def among_constants(wanted: Evaluate, members: Value) -> Evaluate:
    """Kubernetes makes a set of constants: it asks for nothing where that is empty, and some values fit in no set."""
    if not members:
        return lambda _: False
    plain = all(type(each) in SET_MEMBERS for each in members)

    def contained(places: Places) -> bool:
        value = wanted(places)
        if plain and type_name(value) in NOT_IN_SETS:
            raise EvaluationError(f"{type_name(value)} can't be looked for in a list of constants")
        return any(same(value, each) for each in members)

    return contained


SET_MEMBERS = frozenset({bool, int, Uint, float, str, type(None)})
NOT_IN_SETS = frozenset({SEMVER.name, BYTES.name})


def truth(value: Value, operator: str) -> bool:
    if type(value) is not bool:
        raise no_overload(operator, value)
    return value


def joined(terms: Iterator[Evaluate] | list[Evaluate], places: Places, decisive: bool, operator: str) -> bool:
    """``decisive`` if any term gives it; else the first error; else the opposite."""
    first: EvaluationError | None = None
    for each in terms:
        try:
            if truth(each(places), operator) is decisive:
                return decisive
        except EvaluationError as error:
            first = first or error
    if first is not None:
        raise first
    return not decisive


def either(name: str, left: Evaluate, right: Evaluate) -> Evaluate:
    def choose(places: Places) -> Value:
        found = left(places)
        if type(found) is not Optional:
            raise no_overload(name, found)
        if not found.present:
            return right(places)
        return found if name == "or" else found.content

    return choose


def rounds(over: Value, at: list[int], places: Places) -> Iterator[None]:
    """Go through a list or map, the variables of a macro set each time."""
    pairs: Iterable[tuple[Value, Value]]
    if type(over) is tuple:
        pairs = enumerate(over) if len(at) == 2 else ((each, None) for each in over)
    elif isinstance(over, Map):
        pairs = over.items()
    else:
        raise EvaluationError(f"got {type_name(over)!r}, expected a list or map to iterate over")
    for first, second in pairs:
        places[at[0]] = first
        if len(at) == 2:
            places[at[1]] = second
        yield None


def assembled(kind: str, found: list[tuple[Value, Value]]) -> Value:
    if kind == "list":
        return tuple(result for _, result in found)
    if kind == "map":
        return Map(found)
    for _, result in found:
        if not isinstance(result, Map):
            raise no_overload("cel.@mapInsert", result)
    return Map((entry for _, result in found for entry in result.items()), unique=True)


def members(built: list[tuple[Evaluate, bool]], places: Places) -> Iterator[Value]:
    for evaluate, optional in built:
        value = evaluate(places)
        if not optional:
            yield value
        elif type(value) is not Optional:
            raise EvaluationError(f"cannot initialize optional list element from non-optional value {shown(value)}")
        elif value.present:
            yield value.content


def entries_of(built: list[tuple[Evaluate, Evaluate, bool]], places: Places) -> Iterator[tuple[Value, Value]]:
    for key, value, optional in built:
        for content in members([(value, optional)], places):
            yield key(places), content


def member(value: Value, key: Value) -> Value:
    """``value[key]`` or ``value.key``; of an optional value, an optional member."""
    if type(value) is Optional:
        return optional_member(value, key)
    found = _find(value, key)
    if found is None:
        word = "index out of bounds" if type(value) is tuple else "no such key"
        raise EvaluationError(f"{word}: {key}")
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
    """The member in a tuple; None where there is none, which includes that ``value`` has no members at all."""
    if isinstance(value, Map):
        return value.find(key)
    if type(value) is not tuple:
        return None
    if type(key) not in NUMERIC or key != int(key):
        raise EvaluationError(f"unsupported index type {type_name(key)!r} in list")
    return (value[int(key)],) if 0 <= key < len(value) else None
