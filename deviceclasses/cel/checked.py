"""What the checker finds out about an expression."""

from __future__ import annotations

from dataclasses import dataclass, field

from deviceclasses.cel import nodes
from deviceclasses.cel.library.registry import Overload
from deviceclasses.cel.nodes import Node
from deviceclasses.cel.types import Type, unwrapped
from driver.errors import CelError


@dataclass
class Checked:
    """What the checker found: the type of every node; of each call the name, operands and what it may call."""

    types: dict[Node, Type] = field(default_factory=dict)
    calls: dict[Node, tuple[str, tuple[Node, ...], tuple[Overload, ...]]] = field(default_factory=dict)
    type_names: dict[Node, str] = field(default_factory=dict)
    """Nodes that name a type."""


def members_alike(expression: str, checked: Checked) -> None:
    """Raise CelError for a list or map with members of different types, known and unknown ones being different."""
    for node in list(checked.types):
        groups: list[list[Node]] = []
        if isinstance(node, nodes.ListLiteral):
            groups = [[item.value for item in node.items]]
        elif isinstance(node, nodes.MapLiteral):
            groups = [[entry.key for entry in node.entries], [entry.value for entry in node.entries]]
        optional = {
            part.value for part in (*getattr(node, "items", ()), *getattr(node, "entries", ())) if part.optional
        }
        for group in groups:
            _alike(expression, checked, group, optional)


def _alike(expression: str, checked: Checked, group: list[Node], optional: set[Node]) -> None:
    types = [unwrapped(checked.types[each]) if each in optional else checked.types[each] for each in group]
    for each, found in zip(group, types, strict=True):
        if found != types[0]:
            message = f"{found} next to {types[0]}; all members of a list or map have the same type"
            raise CelError(message, expression, each.position)
