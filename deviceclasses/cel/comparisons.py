"""What an expression compares a device's values with, where that stands in it as a literal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from deviceclasses.cel import nodes
from deviceclasses.cel.mentions import Path, declares, path_of
from deviceclasses.cel.nodes import Node, children
from deviceclasses.cel.parse import parse
from deviceclasses.cel.signatures import COMPARISONS, FLIPPED
from deviceclasses.cel.values import Value

OPERATORS = {**COMPARISONS, "@in": "in"}


@dataclass(frozen=True)
class Comparison:
    """``path`` is what is compared, from ``device`` on; it stands on the left of ``operator``.

    ``otherwise``: what is compared where the device has no such value, as told to ``orValue``.
    """

    path: Path
    operator: str
    value: Value
    otherwise: tuple[Value, ...] = ()


def comparisons_of(expression: str) -> Iterator[Comparison]:
    """Every comparison with a literal, ``in`` a list being one with each of its members. Raises CelError."""
    yield from _visit(parse(expression), {"device": ()})


def _visit(node: Node, known: Mapping[str, Path]) -> Iterator[Comparison]:
    if isinstance(node, nodes.Call) and node.function in OPERATORS and len(node.operands) == 2:
        yield from _compared(OPERATORS[node.function], *node.operands, known)
    inside = {name: path for name, path in known.items() if name not in declares(node)}
    bound = path_of(node.value, known) if isinstance(node, nodes.Bind) else None
    if isinstance(node, nodes.Bind) and bound is not None:
        inside[node.variable] = bound
    outside = [getattr(node, field, None) for field in ("over", "value", "target")]
    for each in children(node):
        yield from _visit(each, known if any(each is other for other in outside) else inside)


def _compared(operator: str, left: Node, right: Node, known: Mapping[str, Path]) -> Iterator[Comparison]:
    if isinstance(left, nodes.Literal) and operator != "in":
        operator, left, right = FLIPPED.get(operator, operator), right, left
    read = _read(left, known)
    members = [item.value for item in right.items] if isinstance(right, nodes.ListLiteral) else [right]
    for each in members if read is not None else ():
        if isinstance(each, nodes.Literal) and read is not None:
            yield replace(read, operator=operator, value=each.value)


def _read(node: Node, known: Mapping[str, Path]) -> Comparison | None:
    """What is read, with nothing yet that it is compared with."""
    if isinstance(node, nodes.Call) and node.function == "orValue" and node.target is not None:
        found = _read(node.target, known)
        given = tuple(each.value for each in node.arguments if isinstance(each, nodes.Literal))
        return found and replace(found, otherwise=given)
    path = path_of(node, known)
    return None if path is None else Comparison(path, "", None)
