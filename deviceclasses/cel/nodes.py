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
class Node:
    """Base of all nodes; ``position`` is its offset in the expression, in characters from 0."""

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
class Call(Node):
    """A function or operator, such as ``size`` or ``_+_``; ``target`` is the operand before the dot.

    ``a[b]``, ``a[?b]`` and ``a ? b : c`` are the functions ``_[_]``, ``_[?_]`` and ``_?_:_``.
    """

    function: str
    target: Node | None
    arguments: tuple[Node, ...]

    @property
    def operands(self) -> tuple[Node, ...]:
        """The target, if any, and the arguments."""
        return self.arguments if self.target is None else (self.target, *self.arguments)


@dataclass(frozen=True, eq=False)
class Logic(Node):
    """``&&`` or ``||`` over two or more terms."""

    is_and: bool
    terms: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Entry(Node):
    """A member of a list, without key, or an entry of a map; ``optional`` for one after ``?``."""

    key: Node | None
    value: Node
    optional: bool


@dataclass(frozen=True, eq=False)
class ListLiteral(Node):
    entries: tuple[Entry, ...]


@dataclass(frozen=True, eq=False)
class MapLiteral(Node):
    entries: tuple[Entry, ...]


@dataclass(frozen=True, eq=False)
class Macro(Node):
    """A macro with variables. ``over`` is evaluated outside their scope; ``condition`` and ``body`` inside.

    ``kind`` is "all", "exists" or "exists_one"; the result of ``map``, ``filter`` and the like: "list", "map" or
    "entry" (of a map); "sortBy"; "bind" (``over`` is the value of the variable); "optMap" or "optFlatMap".
    """

    kind: str
    over: Node
    variables: tuple[str, ...]
    condition: Node | None
    body: Node


def children(node: Node) -> Iterator[Node]:
    """The nodes directly below ``node``."""
    for each in fields(node):
        value = getattr(node, each.name)
        if isinstance(value, Node):
            yield value
        elif isinstance(value, tuple):
            yield from (item for item in value if isinstance(item, Node))


def dotted(node: Node) -> str | None:
    """The text ``a.b.c`` of a node that consists of names only, else None."""
    if isinstance(node, Name):
        return node.name
    if isinstance(node, Select) and not node.optional and not node.test:
        prefix = dotted(node.operand)
        return None if prefix is None else f"{prefix}.{node.field}"
    return None
