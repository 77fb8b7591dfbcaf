"""Declaration of functions with their overloads, and the choice of an overload by the values of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deviceclasses.cel.types import BOOL, INT, Type, is_dynamic
from deviceclasses.cel.values import CHARACTERS_PER_UNIT, EvaluationError, Map, Value, no_overload, spend, type_name

Body = Callable[..., Value]


@dataclass(frozen=True)
class Overload:
    """One signature of a function; ``member`` functions are called as ``first.name(...)``."""

    takes: tuple[Type, ...]
    gives: Type
    member: bool
    body: Body
    sized: tuple[int, ...] = ()
    """Positions of the arguments whose size determines the work."""

    def fits(self, values: tuple[Value, ...]) -> bool:
        """Whether values match the signature. Like Kubernetes, looks only at the first member of a list or map."""
        return len(values) == len(self.takes) and all(map(is_of, self.takes, values))


def is_of(wanted: Type, value: Value) -> bool:
    """Whether a value matches a declared type, by the rules of ``Overload.fits``."""
    if wanted.name == "var" or is_dynamic(wanted):
        return True
    if wanted.name != type_name(value):
        return False
    if wanted.name == "list":
        return not value or is_of(wanted.params[0], value[0])
    if isinstance(value, Map):
        return all(is_of(wanted.params[0], key) and is_of(wanted.params[1], item) for key, item in _first(value))
    return True


def _first(value: Map) -> list[tuple[Value, Value]]:
    return [next(value.items())] if len(value) else []


SIZED = frozenset({"list", "string", "bytes"})
CONSTANT_TIME = frozenset({"size", "first", "last"})
"""Functions that take no longer for a longer list or string."""

FUNCTIONS: dict[str, list[Overload]] = {}
"""All functions by name; filled by importing the modules of this package."""
UNSUPPORTED_FUNCTIONS = {
    "format": "string.format is not evaluated by Tessera; join strings with + instead",
    "url": "url() is not evaluated by Tessera; use string functions instead",
    "isURL": "isURL() is not evaluated by Tessera; use string functions instead",
    "format.named": "named formats are not evaluated by Tessera; use matches() instead",
    "authorizer": "a selector has no authorizer",
    **dict.fromkeys(
        ("duration", "timestamp"),
        "durations and timestamps are not evaluated by Tessera, because no device has an attribute of these types",
    ),
    **dict.fromkeys(
        ("ip", "isIP", "ip.isCanonical", "cidr", "isCIDR"),
        "IP addresses and networks are not evaluated by Tessera, because no device has an attribute of these types",
    ),
}
"""The reasons why Tessera refuses names that Kubernetes accepts; "format.named" is for all names after "format."."""


def function(name: str, takes: list[Type], gives: Type, body: Body, *, member: bool = False) -> None:
    """Declare an overload of ``name(...)``."""
    sized = [index for index, each in enumerate(takes) if each.name in SIZED and name not in CONSTANT_TIME]
    FUNCTIONS.setdefault(name, []).append(Overload(tuple(takes), gives, member, body, tuple(sized)))


def method(name: str, takes: list[Type], gives: Type, body: Body) -> None:
    """Declare an overload of ``first.name(...)``."""
    function(name, takes, gives, body, member=True)


def succeeds(convert: Callable[..., Value]) -> Callable[..., bool]:
    """The function that says whether ``convert`` accepts its arguments."""

    def accepted(*arguments: Value) -> bool:
        try:
            convert(*arguments)
        except EvaluationError:
            return False
        return True

    return accepted


def declare_order(kind: Type, order: Callable[[Any, Any], int]) -> None:
    """Declare the methods that compare two values of a type which has no operators; ``order`` gives -1, 0 or 1."""
    method("compareTo", [kind, kind], INT, order)
    method("isGreaterThan", [kind, kind], BOOL, lambda one, other: order(one, other) > 0)
    method("isLessThan", [kind, kind], BOOL, lambda one, other: order(one, other) < 0)


def _spend_for(values: list[Value]) -> None:
    units = sum(len(each) if type(each) is tuple else len(each) // CHARACTERS_PER_UNIT for each in values)
    if units:
        spend(units)


def chosen(name: str, overloads: tuple[Overload, ...]) -> Body:
    """A function that calls the first overload that matches the values. Raises EvaluationError if none does."""

    def call(*values: Value) -> Value:
        for each in overloads:
            if each.fits(values):
                if each.sized:
                    _spend_for([values[index] for index in each.sized])
                return each.body(*values)
        raise no_overload(name, *values)

    return call
