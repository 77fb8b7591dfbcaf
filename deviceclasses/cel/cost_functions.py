"""What one call of a function may cost at worst, beyond its operands, and how large its result may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deviceclasses.cel import nodes
from deviceclasses.cel.library.registry import Overload
from deviceclasses.cel.nodes import Node
from deviceclasses.cel.sizes import ONE, UNKNOWN, Path, Size, capped, fixed, of_device, scaled
from deviceclasses.cel.types import Type
from deviceclasses.cel.values import UINT_MAX

TRAVERSAL, PATTERN = 0.1, 0.25
"""Of a character that is looked at, and of a character of a regular expression."""
LIST, MAP = 10, 30
"""Of making a list or a map."""
ADDRESS = Size(4, 16)
"""Bytes of an IP address."""
BY_VALUE = ("kubernetes.Quantity", "kubernetes.Semver", "net.IP", "net.CIDR")


@dataclass(frozen=True)
class Operand:
    """``size`` is None where nothing bounds it."""

    type: Type
    path: Path
    size: Size | None
    node: Node

    @property
    def bound(self) -> Size:
        return self.size or of_device(self.path) or UNKNOWN


@dataclass(frozen=True)
class Estimate:
    cost: int
    size: Size | None = None


Operands = Sequence[Operand]
Rule = Callable[[Operands], Estimate]


def function_cost(name: str, overload: Overload, operands: Operands) -> Estimate:
    """The estimate for one signature; a function without a rule costs 1."""
    telling = overload.takes[-1 if name == "@in" else 0].name if overload.takes else ""
    rule = RULES.get((name, telling)) or RULES.get((name, ""))
    return rule(operands) if rule else Estimate(1)


def _traversal(index: int, factor: float = TRAVERSAL, *, keeps_size: bool = False) -> Rule:
    """Looking through one operand."""

    def rule(operands: Operands) -> Estimate:
        size = operands[index].bound
        return Estimate(size.cost(factor), size if keeps_size else None)

    return rule


def _compared(operands: Operands) -> Estimate:
    """Up to the end of the shorter one."""
    return Estimate(scaled(min(each.size.most if each.size else UINT_MAX for each in operands), TRAVERSAL))


def _equal(operands: Operands) -> Estimate:
    one, other = operands
    return Estimate(1) if one.type == other.type and one.type.name in BY_VALUE else _compared(operands)


def _searched(text: int, pattern: int) -> Rule:
    def rule(operands: Operands) -> Estimate:
        characters = operands[text].bound.plus(ONE).cost(TRAVERSAL)
        return Estimate(capped(characters * operands[pattern].bound.cost(PATTERN)))

    return rule


def _found(operands: Operands) -> Estimate:
    return Estimate(_searched(0, 1)(operands).cost, Size(0, operands[0].bound.most))


def _contains(operands: Operands) -> Estimate:
    return Estimate(capped(operands[0].bound.cost(TRAVERSAL) * operands[1].bound.cost(TRAVERSAL)))


def _members(operands: Operands) -> Estimate:
    """Comparing each member of a list; of strings, every character of each, and no one knows how many."""
    over = operands[0]
    if not over.type.params:
        return Estimate(over.bound.cost(TRAVERSAL))
    each = 1
    if over.type.params[0].name in ("string", "bytes"):
        inner = of_device((*over.path, "@items")) or UNKNOWN
        each = capped(each + inner.cost(TRAVERSAL))
    return Estimate(capped(over.bound.most * each))


def _split(operands: Operands) -> Estimate:
    size = operands[0].bound
    most = _number(operands[2], size.most) if len(operands) > 2 else size.most
    return Estimate(size.cost(2 * TRAVERSAL), Size(0, most))


def _number(operand: Operand, otherwise: int) -> int:
    """The value of an int literal."""
    node = operand.node
    if isinstance(node, nodes.Literal) and type(node.value) is int:
        return max(0, node.value)
    return otherwise


def _join(operands: Operands) -> Estimate:
    many = operands[0].bound
    size = many.times(of_device((*operands[0].path, "@items")) or UNKNOWN)
    if len(operands) > 1:
        size = size.plus(operands[1].bound.times(Size(max(0, many.least - 1), max(0, many.most - 1))))
    return Estimate(size.cost(TRAVERSAL), size)


def _replace(operands: Operands) -> Estimate:
    text, old, new = (each.bound for each in operands[:3])
    least = _replaced(text.least, old.most, new.least, kept=0 < old.most <= new.least)
    most = _replaced(text.most, old.least, new.most, kept=new.most <= old.least)
    return Estimate(text.cost(2 * TRAVERSAL), Size(least, most))


def _replaced(text: int, old: int, new: int, *, kept: bool) -> int:
    """``kept``: replacing does not move this bound of the length."""
    if old == 0:
        return capped((text + 1) * new + text)
    return text if kept else capped(-(-text // old) * new)


def _concatenated(operands: Operands) -> Estimate:
    size = operands[0].bound.plus(operands[1].bound)
    return Estimate(size.cost(TRAVERSAL), size)


def _allocated(size: Size, factor: float = 1.0) -> Estimate:
    return Estimate(capped(size.cost(factor) + 1 + LIST), size)


def _sorted(operands: Operands) -> Estimate:
    element = operands[0].type.params[0].name if operands[0].type.params else ""
    size = operands[0].bound
    return _allocated(size.times(size), 2.1 if element in ("string", "bytes") else 2.0)


def _slice(operands: Operands) -> Estimate:
    start, end = _number(operands[1], 0), _number(operands[2], operands[0].bound.most)
    return _allocated(fixed((end - start) % (UINT_MAX + 1)))


def _flatten(operands: Operands) -> Estimate:
    depth = _number(operands[1], UINT_MAX) if len(operands) > 1 else 1
    return _allocated(operands[0].bound, float(depth))


def _range(operands: Operands) -> Estimate:
    return _allocated(fixed(_number(operands[0], UINT_MAX)))


def _distinct(operands: Operands) -> Estimate:
    return _allocated(operands[0].bound.times(operands[0].bound), 2.0)


def _sets(factor: float) -> Rule:
    return lambda operands: Estimate(capped(operands[0].bound.times(operands[1].bound).cost(factor) + 1))


def _in_network(operands: Operands) -> Estimate:
    text = operands[1].bound.cost(TRAVERSAL) if operands[1].type.name == "string" else 0
    return Estimate(capped(ADDRESS.plus(ADDRESS).cost(TRAVERSAL) + text))


def _network_in_network(operands: Operands) -> Estimate:
    return Estimate(capped(_in_network(operands).cost + ADDRESS.cost(TRAVERSAL) + 1))


def _text_to_bytes(operands: Operands) -> Estimate:
    size = operands[0].bound
    return Estimate(size.cost(TRAVERSAL), Size(size.least, capped(size.most * 4)))


def _bytes_to_text(operands: Operands) -> Estimate:
    size = operands[0].bound
    return Estimate(size.cost(TRAVERSAL), Size(size.least // 4, size.most))


def _quoted(operands: Operands) -> Estimate:
    size = operands[0].bound
    return Estimate(size.cost(TRAVERSAL), Size(capped(size.least + 2), capped(size.most * 2 + 2)))


RULES: dict[tuple[str, str], Rule] = {
    ("_==_", ""): _equal,
    ("_!=_", ""): _compared,
    **{(name, kind): _compared for name in ("_<_", "_<=_", "_>_", "_>=_") for kind in ("string", "bytes")},
    ("_+_", "string"): _concatenated,
    ("_+_", "bytes"): _concatenated,
    ("_+_", "list"): lambda operands: Estimate(1, operands[0].bound.plus(operands[1].bound)),
    ("startsWith", ""): _traversal(1),
    ("endsWith", ""): _traversal(1),
    ("contains", ""): _contains,
    ("matches", ""): _searched(0, 1),
    ("find", ""): _found,
    ("findAll", ""): _found,
    **{(name, ""): _traversal(0, keeps_size=True) for name in ("lowerAscii", "upperAscii", "substring", "trim")},
    ("split", ""): _split,
    ("join", ""): _join,
    ("replace", ""): _replace,
    ("strings.quote", ""): _quoted,
    ("bytes", "string"): _text_to_bytes,
    ("string", "bytes"): _bytes_to_text,
    **{(name, ""): _members for name in ("isSorted", "sum", "max", "min", "indexOf", "lastIndexOf")},
    **{
        (name, ""): _traversal(0) for name in ("quantity", "isQuantity", "semver", "isSemver", "cidr", "isIP", "isCIDR")
    },
    ("ip", "string"): _traversal(0),
    ("ip.isCanonical", ""): _traversal(0, 2 * TRAVERSAL),
    ("containsIP", ""): _in_network,
    ("containsCIDR", ""): _network_in_network,
    ("sort", ""): _sorted,
    ("slice", ""): _slice,
    ("flatten", ""): _flatten,
    ("reverse", ""): lambda operands: _allocated(operands[0].bound),
    ("distinct", ""): _distinct,
    ("lists.range", ""): _range,
    ("sets.contains", ""): _sets(1),
    ("sets.intersects", ""): _sets(1),
    ("sets.equivalent", ""): _sets(2),
    ("@in", "list"): lambda operands: Estimate(operands[1].bound.cost(1)),
}
"""By function and the type that tells its signatures apart, the first one (of ``in`` the last); "" for any."""
