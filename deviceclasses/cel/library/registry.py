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
    if isinstance(value, Map) and len(value):
        return all(map(is_of, wanted.params, next(value.items())))
    return True


SIZED_TYPES = frozenset({"list", "string", "bytes"})
CONSTANT_TIME = frozenset({"size", "first", "last"})
"""Functions that take no longer for a longer list or string."""

FUNCTIONS: dict[str, list[Overload]] = {}
"""All functions by name; filled by importing the modules of this package."""
TIME_FUNCTIONS = (
    "duration", "timestamp", "getFullYear", "getMonth", "getDayOfYear", "getDayOfMonth", "getDate", "getDayOfWeek",
    "getHours", "getMinutes", "getSeconds", "getMilliseconds",
)  # fmt: skip
NETWORK_FUNCTIONS = (
    "ip", "isIP", "ip.isCanonical", "family", "isUnspecified", "isLoopback", "isLinkLocalMulticast",
    "isLinkLocalUnicast", "isGlobalUnicast", "cidr", "isCIDR", "containsIP", "containsCIDR", "prefixLength", "masked",
)  # fmt: skip
UNSUPPORTED_FUNCTIONS = {
    "format": "string.format is not evaluated by Tessera; join strings with + instead",
    "url": "url() is not evaluated by Tessera; use string functions instead",
    "isURL": "isURL() is not evaluated by Tessera; use string functions instead",
    "format.named": "named formats are not evaluated by Tessera; use matches() instead",
    "authorizer": "a selector has no authorizer",
    "google": "types of google.protobuf are not evaluated by Tessera; no attribute of a device has one",
    "net": "types of net are not evaluated by Tessera; no attribute of a device has one",
    **{
        name: f"{name}() is not evaluated by Tessera; no attribute of a device is {what}"
        for names, what in ((TIME_FUNCTIONS, "a time or a duration"), (NETWORK_FUNCTIONS, "an address or a network"))
        for name in names
    },
}
"""The reasons why Tessera refuses names that Kubernetes accepts; "format.named" is for all names after "format."."""


def function(name: str, takes: list[Type], gives: Type, body: Body, *, member: bool = False) -> None:
    """Declare an overload of ``name(...)``."""
    sized = [] if name in CONSTANT_TIME else [index for index, kind in enumerate(takes) if kind.name in SIZED_TYPES]
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


def declare_order(kind: Type, key: Callable[[Any], Any]) -> None:
    """Declare the methods that compare two values of a type which has no operators by a sort key."""
    method("compareTo", [kind, kind], INT, lambda one, other: (key(one) > key(other)) - (key(one) < key(other)))
    method("isGreaterThan", [kind, kind], BOOL, lambda one, other: key(one) > key(other))
    method("isLessThan", [kind, kind], BOOL, lambda one, other: key(one) < key(other))


def _spend_for(values: list[Value]) -> None:
    units = sum(len(value) if type(value) is tuple else len(value) // CHARACTERS_PER_UNIT for value in values)
    if units:
        spend(units)


def chosen(name: str, overloads: tuple[Overload, ...]) -> Body:
    """A function that calls the first overload that matches the values. Raises EvaluationError if none does."""

    def call(*values: Value) -> Value:
        for overload in overloads:
            if overload.fits(values):
                if overload.sized:
                    _spend_for([values[index] for index in overload.sized])
                return overload.body(*values)
        raise no_overload(name, *values)

    return call
