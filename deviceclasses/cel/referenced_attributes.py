"""The attributes of a device that an expression reads, and the literals that it compares them with.

Devices that are equal in the attributes that are read get the same verdict.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from deviceclasses.cel import nodes
from deviceclasses.cel.device import CelDevice, Domains
from deviceclasses.cel.nodes import COMPARISONS, FLIPPED, Node, children
from deviceclasses.cel.parse import parse
from deviceclasses.cel.values import Value

Path = tuple[str, ...]
"""From ``device`` on: ("attributes", domain, name), or the beginning of it."""
SCALAR_FIELDS = ("driver", "allowMultipleAllocations")
SECTIONS = ("attributes", "capacity")


@dataclass(frozen=True)
class ReferencedAttributes:
    """The attributes and capacities that are read, as (domain, name); ``everything`` if that is not known."""

    attributes: frozenset[tuple[str, str]] = frozenset()
    capacity: frozenset[tuple[str, str]] = frozenset()
    everything: bool = False

    def __or__(self, other: ReferencedAttributes) -> ReferencedAttributes:
        return ReferencedAttributes(
            self.attributes | other.attributes,
            self.capacity | other.capacity,
            self.everything or other.everything,
        )

    @cached_property
    def reads(self) -> tuple[tuple[str, str, str], ...]:
        """Section, domain and name of each, sorted."""
        return tuple(
            sorted(
                [("attributes", *each) for each in self.attributes] + [("capacity", *each) for each in self.capacity]
            )
        )


def key_of(referenced: ReferencedAttributes, device: CelDevice) -> Hashable:
    """A key that is equal for devices with equal values of everything that is read."""
    plain = (device.driver, device.allow_multiple_allocations)
    if referenced.everything:
        return (*plain, _all_of(device.attributes), _all_of(device.capacity))
    return (*plain, *[device.read(*each) for each in referenced.reads])


def _all_of(domains: Domains) -> Hashable:
    return frozenset(
        (domain, name, type(value), value) for domain, values in domains.items() for name, value in values.items()
    )


def referenced_attributes(root: Node) -> ReferencedAttributes:
    """Collect what a checked expression reads."""
    return _visit(root, {"device": ()})


def _visit(node: Node, known: Mapping[str, Path]) -> ReferencedAttributes:
    path = path_of(node, known)
    if path is None:
        path = _membership_path(node, known)
    if path is not None:
        return _read(path)
    if isinstance(node, nodes.Bind):
        bound = path_of(node.value, known)
        if bound is not None and len(bound) < 3:
            return _visit(node.body, {**known, node.variable: bound})
    hidden = {name: path for name, path in known.items() if name not in declared_variables(node)}
    found = ReferencedAttributes()
    for each in children(node):
        found |= _visit(each, hidden if each is not getattr(node, "over", None) else known)
    return found


def _membership_path(node: Node, known: Mapping[str, Path]) -> Path | None:
    """The path of ``name`` in ``"name" in device.attributes["domain"]``: such a test counts as reading it."""
    if not isinstance(node, nodes.Call) or node.function != "@in":
        return None
    name, section = node.operands
    if not isinstance(name, nodes.Literal) or not isinstance(name.value, str):
        return None
    before = path_of(section, known)
    return (*before, name.value) if before is not None and len(before) == 2 else None


def declared_variables(node: Node) -> tuple[str, ...]:
    if isinstance(node, (nodes.Quantifier, nodes.Transform)):
        return node.variables
    if isinstance(node, (nodes.SortBy, nodes.Bind, nodes.OptionalMap)):
        return (node.variable,)
    return ()


def _read(path: Path) -> ReferencedAttributes:
    if path[:1] and path[0] in SCALAR_FIELDS:
        return ReferencedAttributes()
    if len(path) < 3:
        return ReferencedAttributes(everything=True)
    section, domain, name = path
    only = frozenset({(domain, name)})
    return ReferencedAttributes(attributes=only) if section == "attributes" else ReferencedAttributes(capacity=only)


def path_of(node: Node, known: Mapping[str, Path]) -> Path | None:
    """The path from ``device`` to a node, or None if the node is anything other than a path."""
    if isinstance(node, nodes.Name):
        return known.get(node.name)
    if isinstance(node, nodes.Select):
        step, operand = node.field, node.operand
    elif isinstance(node, nodes.Index) and isinstance(node.key, nodes.Literal) and isinstance(node.key.value, str):
        step, operand = node.key.value, node.operand
    else:
        return None
    before = path_of(operand, known)
    if before is None or len(before) >= 3 or (before and before[0] in SCALAR_FIELDS):
        return None
    return (*before, step)


OPERATORS = {**COMPARISONS, "@in": "in"}


@dataclass(frozen=True)
class Comparison:
    """A comparison of the value at ``path`` (left operand) with a literal (right operand).

    ``otherwise`` holds the defaults given to ``orValue`` for devices without the value.
    """

    path: Path
    operator: str
    value: Value
    otherwise: tuple[Value, ...] = ()


def comparisons_of(expression: str) -> Iterator[Comparison]:
    """Every comparison with a literal; ``in`` a list is one with each member. Raises CelError."""
    yield from _comparisons(parse(expression), {"device": ()})


def _comparisons(node: Node, known: Mapping[str, Path]) -> Iterator[Comparison]:
    if isinstance(node, nodes.Call) and node.function in OPERATORS and len(node.operands) == 2:
        yield from _compared(OPERATORS[node.function], *node.operands, known)
    inside = {name: path for name, path in known.items() if name not in declared_variables(node)}
    bound = path_of(node.value, known) if isinstance(node, nodes.Bind) else None
    if isinstance(node, nodes.Bind) and bound is not None:
        inside[node.variable] = bound
    outside = [getattr(node, field, None) for field in ("over", "value", "target")]
    for each in children(node):
        yield from _comparisons(each, known if any(each is other for other in outside) else inside)


def _compared(operator: str, left: Node, right: Node, known: Mapping[str, Path]) -> Iterator[Comparison]:
    if isinstance(left, nodes.Literal) and operator != "in":
        operator, left, right = FLIPPED.get(operator, operator), right, left
    read = _operand(left, known)
    members = [item.value for item in right.items] if isinstance(right, nodes.ListLiteral) else [right]
    for each in members if read is not None else ():
        if isinstance(each, nodes.Literal) and read is not None:
            yield replace(read, operator=operator, value=each.value)


def _operand(node: Node, known: Mapping[str, Path]) -> Comparison | None:
    """The comparison for the operand that reads from the device, still without operator and literal."""
    if isinstance(node, nodes.Call) and node.function == "orValue" and node.target is not None:
        found = _operand(node.target, known)
        given = tuple(each.value for each in node.arguments if isinstance(each, nodes.Literal))
        return found and replace(found, otherwise=given)
    path = path_of(node, known)
    return None if path is None else Comparison(path, "", None)
