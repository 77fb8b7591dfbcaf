"""What evaluating an expression may cost at worst. Kubernetes refuses selectors beyond its limit, and so do we.

Source: cel-go's and Kubernetes' estimators, tried against the API server. It refuses more than one would think, since
what has no known bound counts as unbounded: ``quantity("1") != quantity("2")`` and ``["a"].join()``, for example.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import singledispatchmethod

from deviceclasses.cel import nodes
from deviceclasses.cel.checked import Checked
from deviceclasses.cel.cost_functions import LIST, MAP, Estimate, Operand, function_cost
from deviceclasses.cel.nodes import Node
from deviceclasses.cel.sizes import ONE, UNKNOWN, Path, Size, capped, fixed, of_device
from deviceclasses.cel.types import Type, unwrapped
from driver.errors import CelError

LIMIT = 1_000_000
"""Of Kubernetes, for one evaluation of a selector."""
SCALARS = frozenset({"bool", "double", "int", "uint", "google.protobuf.Duration", "google.protobuf.Timestamp"})


def check_cost(expression: str, root: Node, checked: Checked) -> int:
    """The cost at worst; raises CelError where it is beyond the limit."""
    cost = _Estimator(checked).cost(root)
    if cost > LIMIT:
        shown = "has no bound" if cost >= UNKNOWN.most // 20 else f"is {cost}"
        message = (
            f"too complex: what it may cost to evaluate {shown}, and {LIMIT} is the limit; loops inside of loops, !=, "
            "join() and order of values without a known size are costly"
        )
        raise CelError(message, expression)
    return cost


@dataclass(frozen=True)
class _Entries:
    """Sizes of the keys and values in a list or map."""

    container: str
    key: Size
    value: Size

    def or_else(self, other: _Entries | None) -> _Entries | None:
        if other is None:
            return None
        return _Entries(self.container, self.key.or_else(other.key), self.value.or_else(other.value))


@dataclass(frozen=True)
class _Variable:
    path: Path = ()
    size: Size | None = None
    entries: _Entries | None = None


class _Estimator:
    def __init__(self, checked: Checked) -> None:
        self._checked = checked
        self._paths: dict[Node, Path] = {}
        self._sizes: dict[Node, Size] = {}
        self._entries: dict[Node, _Entries] = {}
        self._variables: dict[str, _Variable] = {"device": _Variable(("device",))}

    @contextmanager
    def _with(self, **variables: _Variable) -> Iterator[None]:
        outer = self._variables
        self._variables = {**outer, **variables}
        try:
            yield
        finally:
            self._variables = outer

    def _size(self, node: Node) -> Size | None:
        if node in self._sizes:
            return self._sizes[node]
        known = _literal_size(node) or of_device(self._path(node)) or _type_size(self._checked.types[node])
        if known is None and isinstance(node, nodes.Name) and node.name in self._variables:
            known = self._variables[node.name].size
        return known

    def _path(self, node: Node) -> Path:
        return self._paths.get(node, ())

    def _entries_of(self, node: Node) -> _Entries | None:
        if node not in self._entries and isinstance(node, nodes.Name) and node.name in self._variables:
            return self._variables[node.name].entries
        return self._entries.get(node)

    def _operand(self, node: Node) -> Operand:
        return Operand(self._checked.types[node], self._path(node), self._size(node), node)

    def _keep(self, node: Node, size: Size | None, entries: _Entries | None = None) -> None:
        if size is not None:
            self._sizes[node] = size
        if entries is not None:
            self._entries[node] = entries

    @singledispatchmethod
    def cost(self, node: Node) -> int:
        """At worst, of a node and all below it; remembers sizes on the way."""
        raise NotImplementedError(type(node).__name__)

    @cost.register
    def _literal(self, _: nodes.Literal) -> int:
        return 0

    @cost.register
    def _name(self, node: nodes.Name) -> int:
        variable = self._variables.get(node.name)
        self._paths[node] = variable.path if variable else (node.name,)
        return 1

    @cost.register
    def _select(self, node: nodes.Select) -> int:
        if node in self._checked.type_names:
            return 1
        below = self.cost(node.operand)
        if node.test:
            return below
        if node.optional:
            self._keep(node, self._size(node))
            return below + 1
        self._paths[node] = (*self._path(node.operand), node.field)
        holds = self._checked.types[node.operand].name
        return below + (1 if holds in ("map", "kubernetes.DRADevice", "var") else 0)

    @cost.register
    def _index(self, node: nodes.Index) -> int:
        below = self.cost(node.operand) + self.cost(node.key)
        holds = self._checked.types[node.operand].name
        if not node.optional and holds != "optional_type":
            self._paths[node] = (*self._path(node.operand), "@items" if holds == "list" else "@values")
            entries = self._entries_of(node.operand)
            self._keep(node, entries.value if entries else self._size(node))
        return below + 1

    @cost.register
    def _call(self, node: nodes.Call) -> int:
        name, operands, overloads = self._checked.calls[node]
        below = capped(sum(self.cost(each) for each in operands))
        if name == "dyn":
            self._keep(node, self._size(operands[0]), self._entries_of(operands[0]))
            return below + 1
        given = [self._operand(each) for each in operands]
        found: list[Estimate] = [function_cost(name, each, given) for each in overloads]
        sizes = [each.size for each in found if each.size is not None]
        size = sizes[0] if sizes else self._size(node)
        for each in sizes[1:]:
            size = each.or_else(size) if size else each
        self._keep(node, size, self._added(name, operands))
        return capped(below + max(each.cost for each in found))

    def _added(self, name: str, operands: tuple[Node, ...]) -> _Entries | None:
        if name != "_+_" or self._checked.types[operands[0]].name != "list":
            return None
        first = self._entries_of(operands[0])
        return first.or_else(self._entries_of(operands[1])) if first else None

    @cost.register
    def _logic(self, node: nodes.Logic) -> int:
        return capped(sum(self.cost(each) for each in node.terms))

    @cost.register
    def _choice(self, node: nodes.Choice) -> int:
        condition, yes, no = (self.cost(each) for each in (node.condition, node.yes, node.no))
        first = self._entries_of(node.yes)
        size = (self._size(node.yes) or UNKNOWN).or_else(self._size(node.no) or UNKNOWN)
        self._keep(node, size, first.or_else(self._entries_of(node.no)) if first else None)
        return capped(condition + max(yes, no))

    @cost.register
    def _list(self, node: nodes.ListLiteral) -> int:
        below = sum(self.cost(item.value) for item in node.items)
        value = self._joined([item.value for item in node.items])
        self._keep(node, None, _Entries("list", ONE, value))
        return capped(below + LIST)

    @cost.register
    def _map(self, node: nodes.MapLiteral) -> int:
        below = sum(self.cost(each.key) + self.cost(each.value) for each in node.entries)
        keys = self._joined([each.key for each in node.entries])
        self._keep(node, None, _Entries("map", keys, self._joined([each.value for each in node.entries])))
        return capped(below + MAP)

    def _joined(self, members: list[Node]) -> Size:
        sizes = [self._size(each) or UNKNOWN for each in members]
        return Size(min((each.least for each in sizes), default=0), max((each.most for each in sizes), default=0))

    def _loop(self, over: Node, names: tuple[str, ...]) -> dict[str, _Variable]:
        """A macro's variables."""
        entries, path = self._entries_of(over), self._path(over)
        container = entries.container if entries else self._checked.types[over].name
        is_list = container == "list"
        key = _Variable((*path, "@indices" if is_list else "@keys"), entries.key if entries else None)
        value = _Variable((*path, "@items" if is_list else "@values"), entries.value if entries else None)
        if len(names) == 1:
            return {names[0]: value if is_list else key}
        return {names[0]: key, names[1]: value}

    def _rounds(self, over: Node, each: int) -> int:
        return capped((self._size(over) or UNKNOWN).most * each)

    @cost.register
    def _quantifier(self, node: nodes.Quantifier) -> int:
        below = self.cost(node.over)
        with self._with(**self._loop(node.over, node.variables)):
            predicate = self.cost(node.predicate)
        self._keep(node, ONE)
        # What cel-go's expansion adds: reading and testing the result so far.
        each, after = {"all": (3, 1), "exists": (4, 1), "exists_one": (2, 2)}[node.kind]
        return capped(below + self._rounds(node.over, predicate + each) + after)

    @cost.register
    def _transform(self, node: nodes.Transform) -> int:
        below = self.cost(node.over)
        with self._with(**self._loop(node.over, node.variables)):
            predicate = self.cost(node.predicate) if node.predicate is not None else 0
            result = self.cost(node.result)
            size = self._size(node.result) or UNKNOWN
        if node.kind == "list":
            step, begin = result + LIST + 2, LIST
            self._keep(node, self._size(node.over) or UNKNOWN, _Entries("list", ONE, size.or_else(fixed(0))))
        else:
            step, begin = result + (3 if node.kind == "map" else 2), MAP
            self._keep(node, self._size(node.over) or UNKNOWN)
        return capped(below + begin + self._rounds(node.over, predicate + step) + 1)

    @cost.register
    def _bind(self, node: nodes.Bind) -> int:
        value = self.cost(node.value)
        variable = _Variable(self._path(node.value), self._size(node.value), self._entries_of(node.value))
        with self._with(**{node.variable: variable}):
            body = self.cost(node.body)
            self._keep(node, self._size(node.body), self._entries_of(node.body))
        return capped(LIST + value + body)

    @cost.register
    def _optional_map(self, node: nodes.OptionalMap) -> int:
        target = self.cost(node.target)
        with self._with(**{node.variable: _Variable((), _type_size(unwrapped(self._checked.types[node.target])))}):
            body = self.cost(node.body)
            size = self._size(node.body)
        bound = LIST + target + 1 + body
        self._keep(
            node, (size or UNKNOWN).or_else(_type_size(self._checked.types[node]) or UNKNOWN) if node.flat else None
        )
        return capped(target + 1 + (max(bound, 1) if node.flat else bound + 1))

    @cost.register
    def _sort_by(self, node: nodes.SortBy) -> int:
        below = self.cost(node.over)
        with self._with(**self._loop(node.over, (node.variable,))):
            key = self.cost(node.key)
        many = self._size(node.over) or UNKNOWN
        keys = LIST + self._rounds(node.over, key + LIST + 2) + 1 + 1
        factor = 2.1 if self._checked.types[node.key].name in ("string", "bytes") else 2.0
        self._keep(node, many.times(many))
        return capped(LIST + below + 1 + keys + many.times(many).cost(factor) + LIST + 1)


def _literal_size(node: Node) -> Size | None:
    if isinstance(node, nodes.Literal):
        return fixed(len(node.value)) if isinstance(node.value, (str, bytes)) else ONE
    if isinstance(node, nodes.ListLiteral):
        return fixed(len(node.items))
    return fixed(len(node.entries)) if isinstance(node, nodes.MapLiteral) else None


def _type_size(one: Type) -> Size | None:
    while one.name == "optional_type":
        one = one.params[0]
    return ONE if one.name in SCALARS else None
