"""An expression as a tree. Macros have nodes of their own, since each is checked and evaluated in its own way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from deviceclasses.cel.values import Value


@dataclass(frozen=True, eq=False)
class Node:
    """``position``: where it begins in the expression, in characters from 0."""

    position: int


@dataclass(frozen=True, eq=False)
class Literal(Node):
    value: Value


@dataclass(frozen=True, eq=False)
class Name(Node):
    name: str


@dataclass(frozen=True, eq=False)
class Select(Node):
    """``operand.field``; ``optional`` for ``operand.?field``; ``test`` for ``has(operand.field)``."""

    operand: Node
    field: str
    optional: bool = False
    test: bool = False


@dataclass(frozen=True, eq=False)
class Index(Node):
    """``operand[key]``; ``optional`` for ``operand[?key]``."""

    operand: Node
    key: Node
    optional: bool = False


@dataclass(frozen=True, eq=False)
class Call(Node):
    """A function or operator, such as ``size`` or ``_+_``; ``target`` is what stands before the dot."""

    function: str
    target: Node | None
    arguments: tuple[Node, ...]

    @property
    def operands(self) -> tuple[Node, ...]:
        """All that is handed to the function, the target first."""
        return self.arguments if self.target is None else (self.target, *self.arguments)


@dataclass(frozen=True, eq=False)
class Logic(Node):
    """``&&`` or ``||`` over two or more terms."""

    is_and: bool
    terms: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Choice(Node):
    """``condition ? yes : no``."""

    condition: Node
    yes: Node
    no: Node


@dataclass(frozen=True, eq=False)
class ListItem(Node):
    value: Node
    optional: bool


@dataclass(frozen=True, eq=False)
class ListLiteral(Node):
    items: tuple[ListItem, ...]


@dataclass(frozen=True, eq=False)
class Entry(Node):
    key: Node
    value: Node
    optional: bool


@dataclass(frozen=True, eq=False)
class MapLiteral(Node):
    entries: tuple[Entry, ...]


@dataclass(frozen=True, eq=False)
class Quantifier(Node):
    """``all``, ``exists`` or ``exists_one``, with one variable or two."""

    kind: str
    over: Node
    variables: tuple[str, ...]
    predicate: Node


@dataclass(frozen=True, eq=False)
class Transform(Node):
    """``map``, ``filter`` and their like: ``kind`` "list", "map" or "entry" is what is built of the results."""

    kind: str
    over: Node
    variables: tuple[str, ...]
    predicate: Node | None
    result: Node


@dataclass(frozen=True, eq=False)
class SortBy(Node):
    over: Node
    variable: str
    key: Node


@dataclass(frozen=True, eq=False)
class Bind(Node):
    """``cel.bind(variable, value, body)``."""

    variable: str
    value: Node
    body: Node


@dataclass(frozen=True, eq=False)
class OptionalMap(Node):
    """``target.optMap(variable, body)``; ``flat`` for ``optFlatMap``."""

    target: Node
    variable: str
    body: Node
    flat: bool


def children(node: Node) -> Iterator[Node]:
    """The nodes directly below ``node``."""
    for each in fields(node):
        value = getattr(node, each.name)
        if isinstance(value, Node):
            yield value
        elif isinstance(value, tuple):
            yield from (item for item in value if isinstance(item, Node))
