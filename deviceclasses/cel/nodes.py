"""The nodes of an expression's tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from deviceclasses.cel.values import Value

COMPARISONS = {"_==_": "==", "_!=_": "!=", "_<_": "<", "_<=_": "<=", "_>_": ">", "_>=_": ">="}
"""The functions of the operators that compare, and how those are written."""
FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
"""The equivalent operators for exchanged operands; operators that are missing here are symmetric."""


@dataclass(frozen=True, eq=False)
class Expr:
    """Base of all nodes; ``position`` is its offset in the expression, in characters from 0."""

    position: int


@dataclass(frozen=True, eq=False)
class Literal(Expr):
    value: Value


@dataclass(frozen=True, eq=False)
class Name(Expr):
    name: str


@dataclass(frozen=True, eq=False)
class Select(Expr):
    """``operand.field``; ``optional`` for ``operand.?field``; ``test`` for ``has(operand.field)``."""

    operand: Expr
    field: str
    optional: bool = False
    test: bool = False


@dataclass(frozen=True, eq=False)
class Call(Expr):
    """A function or operator, such as ``size`` or ``_+_``; ``target`` is the operand before the dot.

    ``a[b]``, ``a[?b]`` and ``a ? b : c`` are the functions ``_[_]``, ``_[?_]`` and ``_?_:_``.
    """

    function: str
    target: Expr | None
    arguments: tuple[Expr, ...]

    @property
    def operands(self) -> tuple[Expr, ...]:
        """The target, if any, and the arguments."""
        return self.arguments if self.target is None else (self.target, *self.arguments)


@dataclass(frozen=True, eq=False)
class Logic(Expr):
    """``&&`` or ``||`` over two or more terms."""

    is_and: bool
    terms: tuple[Expr, ...]


@dataclass(frozen=True, eq=False)
class Entry(Expr):
    """A member of a list, without key, or an entry of a map; ``optional`` for one after ``?``."""

    key: Expr | None
    value: Expr
    optional: bool


@dataclass(frozen=True, eq=False)
class ListLiteral(Expr):
    entries: tuple[Entry, ...]


@dataclass(frozen=True, eq=False)
class MapLiteral(Expr):
    entries: tuple[Entry, ...]


@dataclass(frozen=True, eq=False)
class Macro(Expr):
    """A macro with variables. ``over`` is evaluated outside their scope; ``condition`` and ``body`` inside.

    ``kind`` is "all", "exists" or "exists_one"; the result of ``map``, ``filter`` and the like: "list", "map" or
    "entry" (of a map); "sortBy"; "bind" (``over`` is the value of the variable); "optMap" or "optFlatMap".
    """

    kind: str
    over: Expr
    variables: tuple[str, ...]
    condition: Expr | None
    body: Expr


def calls_of_literals(node: Expr) -> Iterator[Call]:
    """The calls of functions, without a target, all of whose arguments are literals."""
    if (
        isinstance(node, Call)
        and node.target is None
        and node.arguments
        and all(isinstance(argument, Literal) for argument in node.arguments)
    ):
        yield node
    for child in children(node):
        yield from calls_of_literals(child)


def children(node: Expr) -> Iterator[Expr]:
    for attribute in fields(node):
        value = getattr(node, attribute.name)
        if isinstance(value, Expr):
            yield value
        elif isinstance(value, tuple):
            yield from (item for item in value if isinstance(item, Expr))


def dotted(node: Expr) -> str | None:
    """The text ``a.b.c`` of a node that consists of names only, else None."""
    if isinstance(node, Name):
        return node.name
    if isinstance(node, Select) and not node.optional and not node.test:
        prefix = dotted(node.operand)
        return None if prefix is None else f"{prefix}.{node.field}"
    return None
