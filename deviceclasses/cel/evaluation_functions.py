"""The evaluation functions that the compiler combines: lazy operators, bound values, literals, and loops of macros.

Errors are raised as EvaluationError; ``&&``, ``||``, ``all`` and ``exists`` ignore an error if another term decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from deviceclasses.cel.library.lists_and_optionals import member, optional_member, sort_by
from deviceclasses.cel.nodes import Expr, children
from deviceclasses.cel.types import BYTES, SEMVER
from deviceclasses.cel.values import (
    NO_CONTENT,
    EvaluationError,
    Map,
    Optional,
    Uint,
    Value,
    differs,
    equal,
    no_overload,
    same,
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
    plain = all(type(member) in SET_MEMBERS for member in members)

    def contained(frame: Frame) -> bool:
        value = wanted(frame)
        spend(len(members))
        if plain and type_name(value) in NOT_IN_SETS:
            raise EvaluationError(f"{type_name(value)} can't be looked for in a list of constants")
        return any(same(value, member) for member in members)

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
    for term in terms:
        try:
            if as_bool(term(frame), operator) is decisive:
                return decisive
        except EvaluationError as error:
            first = first or error
    if first is not None:
        raise first
    return not decisive


def _choice(condition: Evaluate, yes: Evaluate, no: Evaluate) -> Evaluate:
    return lambda frame: yes(frame) if as_bool(condition(frame), "_?_:_") else no(frame)


def _absent_or(name: str) -> Callable[[Evaluate, Evaluate], Evaluate]:
    def lazy(left: Evaluate, right: Evaluate) -> Evaluate:
        def choose(frame: Frame) -> Value:
            operand = _as_optional(left(frame), name)
            if not operand.present:
                return right(frame)
            return operand if name == "or" else operand.content

        return choose

    return lazy


DIRECT: dict[str, Callable[..., Evaluate]] = {
    "_?_:_": _choice,
    "or": _absent_or("or"),
    "orValue": _absent_or("orValue"),
    "_==_": lambda left, right: lambda frame: equal(left(frame), right(frame)),
    "_!=_": lambda left, right: lambda frame: differs(left(frame), right(frame)),
    "_[_]": lambda operand, key: lambda frame: member(operand(frame), key(frame)),
    "_[?_]": lambda operand, key: lambda frame: optional_member(operand(frame), key(frame)),
}
"""Functions without a choice of an overload: they take values of every type, or evaluate an operand only if needed."""


def _as_optional(value: Value, function: str) -> Optional:
    if type(value) is not Optional:
        raise no_overload(function, value)
    return value


def bind(slot: int, value: Evaluate, body: Evaluate) -> Evaluate:
    def bound(frame: Frame) -> Value:
        try:
            frame[slot] = value(frame)
        except EvaluationError as error:
            # Kubernetes evaluates a bound value when it is first read.
            frame[slot] = error
        return body(frame)

    return bound


def optional_map(slot: int, target: Evaluate, body: Evaluate, *, flat: bool) -> Evaluate:
    def mapped(frame: Frame) -> Value:
        operand = _as_optional(target(frame), "hasValue")
        if not operand.present:
            return NO_CONTENT
        frame[slot] = operand.content
        result = body(frame)
        return result if flat else Optional(result)

    return mapped


def work_of(body: Expr) -> int:
    """The units of work of one round of a loop: one for each node of its body."""
    return 1 + sum(map(work_of, children(body)))


def quantifier(kind: str, over: Evaluate, slots: list[int], predicate: Evaluate, units: int) -> Evaluate:
    if kind == "exists_one":
        return lambda frame: (
            sum(as_bool(predicate(frame), "_?_:_") for _ in iterate(over(frame), slots, frame, units)) == 1
        )
    decisive = kind == "exists"
    operator = "_||_" if decisive else "_&&_"

    def quantify(frame: Frame) -> bool:
        terms = (predicate for _ in iterate(over(frame), slots, frame, units))
        return combined(terms, frame, decisive, operator)

    return quantify


def transform(
    kind: str, over: Evaluate, slots: list[int], condition: Evaluate | None, body: Evaluate, units: int
) -> Evaluate:
    def transformed(frame: Frame) -> Value:
        members = [
            (frame[slots[0]], body(frame))
            for _ in iterate(over(frame), slots, frame, units)
            if condition is None or as_bool(condition(frame), "_?_:_")
        ]
        if kind == "list":
            return tuple(result for _, result in members)
        if kind == "map":
            return Map(members)
        for _, result in members:
            if not isinstance(result, Map):
                raise no_overload("cel.@mapInsert", result)
        return Map((entry for _, result in members for entry in result.items()), unique=True)

    return transformed


def sorted_by(over: Evaluate, slots: list[int], key: Evaluate, units: int) -> Evaluate:
    def sort(frame: Frame) -> Value:
        members = over(frame)
        if type(members) is not tuple:
            raise no_overload("sortBy", members)
        return sort_by(members, tuple(key(frame) for _ in iterate(members, slots, frame, units)))

    return sort


def iterate(over: Value, slots: list[int], frame: Frame, units: int) -> Iterator[None]:
    """Iterate over a list or map, setting the variables of a macro; ``units`` is the work of one round."""
    pairs: Iterable[tuple[Value, Value]]
    if type(over) is tuple:
        pairs = enumerate(over) if len(slots) == 2 else ((member, None) for member in over)
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
