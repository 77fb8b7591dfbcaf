"""Functions by name, each with the signatures it is declared for, and the choice between them by the values at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deviceclasses.cel.types import Type, is_dynamic
from deviceclasses.cel.values import Map, Value, no_overload, type_name

Body = Callable[..., Value]


@dataclass(frozen=True)
class Overload:
    """One signature of a function. ``member``: called behind a dot, the first of ``takes`` standing before it."""

    takes: tuple[Type, ...]
    gives: Type
    member: bool
    body: Body

    def fits(self, values: tuple[Value, ...]) -> bool:
        """Whether values are what the signature says; of a list or map Kubernetes looks at the first member."""
        return len(values) == len(self.takes) and all(map(is_of, self.takes, values))


def is_of(wanted: Type, value: Value) -> bool:
    """Whether a value is of a declared type, seen as ``Overload.fits`` sees it."""
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


FUNCTIONS: dict[str, list[Overload]] = {}
"""All there are; filled while the modules of this package are imported."""


def function(name: str, takes: list[Type], gives: Type) -> Callable[[Body], Body]:
    """Declare the decorated function as ``name(...)``."""
    return _declare(name, takes, gives, member=False)


def method(name: str, takes: list[Type], gives: Type) -> Callable[[Body], Body]:
    """Declare the decorated function as ``first.name(...)``."""
    return _declare(name, takes, gives, member=True)


def _declare(name: str, takes: list[Type], gives: Type, *, member: bool) -> Callable[[Body], Body]:
    def declare(body: Body) -> Body:
        FUNCTIONS.setdefault(name, []).append(Overload(tuple(takes), gives, member, body))
        return body

    return declare


def chosen(name: str, overloads: tuple[Overload, ...]) -> Body:
    """The function that calls the first overload that fits the values, and raises EvaluationError where none does."""

    def call(*values: Value) -> Value:
        for each in overloads:
            if each.fits(values):
                return each.body(*values)
        raise no_overload(name, *values)

    return call
