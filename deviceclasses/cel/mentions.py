"""What of a device an expression reads: devices that are alike in it get the same verdict."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

from deviceclasses.cel import nodes
from deviceclasses.cel.device import CelDevice, Domains
from deviceclasses.cel.nodes import Node, children

Path = tuple[str, ...]
"""From ``device`` on: ("attributes", domain, name), or the beginning of it."""
WHOLE = ("driver", "allowMultipleAllocations")
SECTIONS = ("attributes", "capacity")


@dataclass(frozen=True)
class Mentions:
    """The attributes and capacities that are read, as (domain, name); ``everything`` where that can't be told."""

    attributes: frozenset[tuple[str, str]] = frozenset()
    capacity: frozenset[tuple[str, str]] = frozenset()
    everything: bool = False

    def __or__(self, other: Mentions) -> Mentions:
        return Mentions(
            self.attributes | other.attributes,
            self.capacity | other.capacity,
            self.everything or other.everything,
        )

    @cached_property
    def reads(self) -> tuple[tuple[str, str, str], ...]:
        """Section, domain and name of each, always in the same order."""
        return tuple(
            sorted(
                [("attributes", *each) for each in self.attributes] + [("capacity", *each) for each in self.capacity]
            )
        )


def key_of(mentions: Mentions, device: CelDevice) -> Hashable:
    """Equal for devices that no expression with these mentions can tell apart."""
    plain = (device.driver, device.allow_multiple_allocations)
    if mentions.everything:
        return (*plain, _all_of(device.attributes), _all_of(device.capacity))
    return (*plain, *[device.read(*each) for each in mentions.reads])


def _all_of(domains: Domains) -> Hashable:
    return frozenset(
        (domain, name, type(value), value) for domain, values in domains.items() for name, value in values.items()
    )


def mentions_of(root: Node) -> Mentions:
    """What the checked expression reads."""
    return _visit(root, {"device": ()})


def _visit(node: Node, known: Mapping[str, Path]) -> Mentions:
    path = path_of(node, known)
    if path is None:
        path = _asked_for(node, known)
    if path is not None:
        return _read(path)
    if isinstance(node, nodes.Bind):
        bound = path_of(node.value, known)
        if bound is not None and len(bound) < 3:
            return _visit(node.body, {**known, node.variable: bound})
    hidden = {name: path for name, path in known.items() if name not in declares(node)}
    found = Mentions()
    for each in children(node):
        found |= _visit(each, hidden if each is not getattr(node, "over", None) else known)
    return found


def _asked_for(node: Node, known: Mapping[str, Path]) -> Path | None:
    """The path of ``name`` in ``"name" in device.attributes["domain"]``: that it is there is part of what it is."""
    if not isinstance(node, nodes.Call) or node.function != "@in":
        return None
    name, section = node.operands
    if not isinstance(name, nodes.Literal) or not isinstance(name.value, str):
        return None
    before = path_of(section, known)
    return (*before, name.value) if before is not None and len(before) == 2 else None


def declares(node: Node) -> tuple[str, ...]:
    if isinstance(node, (nodes.Quantifier, nodes.Transform)):
        return node.variables
    if isinstance(node, (nodes.SortBy, nodes.Bind, nodes.OptionalMap)):
        return (node.variable,)
    return ()


def _read(path: Path) -> Mentions:
    if path[:1] and path[0] in WHOLE:
        return Mentions()
    if len(path) < 3:
        return Mentions(everything=True)
    section, domain, name = path
    only = frozenset({(domain, name)})
    return Mentions(attributes=only) if section == "attributes" else Mentions(capacity=only)


def path_of(node: Node, known: Mapping[str, Path]) -> Path | None:
    """How a node is reached from ``device``, where it is nothing but that."""
    if isinstance(node, nodes.Name):
        return known.get(node.name)
    if isinstance(node, nodes.Select):
        step, operand = node.field, node.operand
    elif isinstance(node, nodes.Index) and isinstance(node.key, nodes.Literal) and isinstance(node.key.value, str):
        step, operand = node.key.value, node.operand
    else:
        return None
    before = path_of(operand, known)
    if before is None or len(before) >= 3 or (before and before[0] in WHOLE):
        return None
    return (*before, step)
