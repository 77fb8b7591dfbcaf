"""The attributes of a device that an expression reads, and the literals that it compares them with.

Devices that are equal in the attributes that are read get the same verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from deviceclasses.cel import nodes
from deviceclasses.cel.nodes import COMPARISONS, FLIPPED, Expr, children
from deviceclasses.cel.parser import parse
from deviceclasses.cel.values import Value

Path = tuple[str, ...]
"""From ``device`` on: ("attributes", domain, name), or the beginning of it."""
SCALAR_FIELDS = (("driver",), ("allowMultipleAllocations",))
Read = tuple[str, str, str]
"""An attribute or a capacity: "attributes" or "capacity", domain and name."""


INDEXES = ("_[_]", "_[?_]")
COMPARISON_OPERATORS = {**COMPARISONS, "@in": "in"}


@dataclass(frozen=True)
class Comparison:
    """A comparison of the value at ``path`` (left operand) with a literal (right operand).

    ``otherwise`` holds the defaults given to ``orValue`` for devices without the value.
    """

    path: Path
    operator: str
    value: Value
    otherwise: tuple[Value, ...] = ()


def reads_of(root: Expr) -> tuple[tuple[Read, ...], bool]:
    """What a checked expression reads, sorted; and whether it may read more, which is not known."""
    paths = {path for path in _walk(root, {"device": ()}) if isinstance(path, tuple) and path[:1] not in SCALAR_FIELDS}
    reads = sorted((path[0], path[1], path[2]) for path in paths if len(path) == 3)
    return tuple(reads), len(reads) < len(paths)


@lru_cache(128)
def comparisons_of(expression: str) -> tuple[Comparison, ...]:
    """Every comparison with a literal; ``in`` a list is one with each member. Raises CelError."""
    found = _walk(parse(expression), {"device": ()})
    return tuple(comparison for comparison in found if isinstance(comparison, Comparison))


def _walk(node: Expr, known: Mapping[str, Path]) -> Iterator[Path | Comparison]:
    """The paths that are read and the comparisons; ``known`` has the paths of variables."""
    if isinstance(node, nodes.Call) and node.function in COMPARISON_OPERATORS and len(node.operands) == 2:
        left, right = node.operands
        yield from _compared(COMPARISON_OPERATORS[node.function], left, right, known)
    path = path_of(node, known)
    if path is None:
        path = _membership_path(node, known)
    if path is not None:
        yield path
        return
    inside = known
    if isinstance(node, nodes.Macro):
        inside = {name: path for name, path in known.items() if name not in node.variables}
        bound = path_of(node.over, known) if node.kind == "bind" else None
        if bound is not None:
            inside[node.variables[0]] = bound
        if bound is None or len(bound) == 3:
            yield from _walk(node.over, known)
    for child in children(node):
        if not isinstance(node, nodes.Macro) or child is not node.over:
            yield from _walk(child, inside)


def _membership_path(node: Expr, known: Mapping[str, Path]) -> Path | None:
    """The path of ``name`` in ``"name" in device.attributes["domain"]``: such a test counts as reading it."""
    if not isinstance(node, nodes.Call) or node.function != "@in" or (name := _string(node.operands[0])) is None:
        return None
    before = path_of(node.operands[1], known)
    return (*before, name) if before is not None and len(before) == 2 else None


def _string(node: Expr) -> str | None:
    return node.value if isinstance(node, nodes.Literal) and isinstance(node.value, str) else None


def path_of(node: Expr, known: Mapping[str, Path]) -> Path | None:
    """The path from ``device`` to a node, or None if the node is anything other than a path."""
    if isinstance(node, nodes.Name):
        return known.get(node.name)
    if isinstance(node, nodes.Select):
        step, operand = node.field, node.operand
    elif isinstance(node, nodes.Call) and node.function in INDEXES and (key := _string(node.arguments[1])) is not None:
        step, operand = key, node.arguments[0]
    else:
        return None
    before = path_of(operand, known)
    if before is None or len(before) >= 3 or before in SCALAR_FIELDS:
        return None
    return (*before, step)


def _compared(operator: str, left: Expr, right: Expr, known: Mapping[str, Path]) -> Iterator[Comparison]:
    if isinstance(left, nodes.Literal) and operator != "in":
        operator, left, right = FLIPPED.get(operator, operator), right, left
    read = _operand(left, known)
    members = [item.value for item in right.entries] if isinstance(right, nodes.ListLiteral) else [right]
    for member in members if read is not None else ():
        if isinstance(member, nodes.Literal) and read is not None:
            yield replace(read, operator=operator, value=member.value)


def _operand(node: Expr, known: Mapping[str, Path]) -> Comparison | None:
    """The comparison for the operand that reads from the device, still without operator and literal."""
    if isinstance(node, nodes.Call) and node.function == "orValue" and node.target is not None:
        operand = _operand(node.target, known)
        given = tuple(argument.value for argument in node.arguments if isinstance(argument, nodes.Literal))
        return operand and replace(operand, otherwise=given)
    path = path_of(node, known)
    return None if path is None else Comparison(path, "", None)
