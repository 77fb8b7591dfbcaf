"""The interpreter: builds a Python function of a checked expression, one closure per node.

Variables are kept in the numbered slots of a frame. Errors are raised as EvaluationError; ``&&``, ``||``, ``all`` and
``exists`` ignore an error if another term decides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatchmethod

from deviceclasses.cel import nodes
from deviceclasses.cel.checker import TypeInfo
from deviceclasses.cel.library.collections import sort_by
from deviceclasses.cel.library.operators import CONVERSIONS
from deviceclasses.cel.library.registry import chosen
from deviceclasses.cel.library.text import regex
from deviceclasses.cel.nodes import Node, children
from deviceclasses.cel.primitives import (
    Evaluate,
    Frame,
    absent_or,
    as_bool,
    bound_value,
    built_collection,
    combined,
    entries_of,
    in_constants,
    iterate,
    member,
    members,
    optional_member,
    present,
)
from deviceclasses.cel.values import (
    NONE,
    EvaluationError,
    Map,
    Optional,
    TypeValue,
    Value,
    equal,
    no_overload,
)
from driver.errors import CelError

PATTERN_FUNCTIONS = ("matches", "find", "findAll")


def build(expression: str, root: Node, type_info: TypeInfo) -> Callable[[Value], Value]:
    """Return the function from a device to the value of the expression. It raises EvaluationError on failure.

    Raises CelError for constants that can't be converted and for patterns that RE2 refuses, as Kubernetes does.
    """
    builder = _Builder(expression, type_info)
    evaluate = builder.build(root)
    size = builder.size
    return lambda device: evaluate([device, *[None] * size])


def _work_of(body: Node) -> int:
    """The units of work of one round of a loop: the nodes of its body except literals, and the round itself."""
    return 1 + sum(_work_of(each) for each in children(body)) if not isinstance(body, nodes.Literal) else 1


class _Builder:
    def __init__(self, expression: str, type_info: TypeInfo) -> None:
        self._expression = expression
        self._type_info = type_info
        self._slots: dict[str, int] = {"device": 0}
        self._constants: dict[Evaluate, Value] = {}
        self._bound: set[int] = set()
        self.size = 0

    @singledispatchmethod
    def build(self, node: Node) -> Evaluate:
        raise NotImplementedError(type(node).__name__)

    def _constant(self, value: Value) -> Evaluate:
        def constant(_: Frame) -> Value:
            return value

        self._constants[constant] = value
        return constant

    def _with_variables(
        self, names: tuple[str, ...], *below: Node, bound: bool = False
    ) -> tuple[list[int], list[Evaluate]]:
        """Allocate slots for variables, and build the nodes below in their scope."""
        outer = dict(self._slots)
        frame = []
        for name in names:
            self.size += 1
            frame.append(self.size)
            self._slots[name] = self.size
        if bound:
            self._bound.update(frame)
        built = [self.build(each) for each in below]
        self._slots = outer
        return frame, built

    @build.register
    def _literal(self, node: nodes.Literal) -> Evaluate:
        return self._constant(node.value)

    @build.register
    def _name(self, node: nodes.Name) -> Evaluate:
        if node in self._type_info.type_names:
            return self._constant(TypeValue(self._type_info.type_names[node]))
        slot = self._slots[node.name]
        return bound_value(slot) if slot in self._bound else lambda frame: frame[slot]

    @build.register
    def _select(self, node: nodes.Select) -> Evaluate:
        if node in self._type_info.type_names:
            return self._constant(TypeValue(self._type_info.type_names[node]))
        operand, name = self.build(node.operand), node.field
        if node.test:
            return lambda frame: present(operand(frame), name)
        if node.optional:
            return lambda frame: optional_member(operand(frame), name)
        return lambda frame: member(operand(frame), name)

    @build.register
    def _index(self, node: nodes.Index) -> Evaluate:
        operand, key = self.build(node.operand), self.build(node.key)
        take = optional_member if node.optional else member
        return lambda frame: take(operand(frame), key(frame))

    @build.register
    def _call(self, node: nodes.Call) -> Evaluate:
        name, operands, overloads = self._type_info.calls[node]
        built = [self.build(each) for each in operands]
        if name in ("_==_", "_!=_"):
            left, right = built
            wanted = name == "_==_"
            return lambda frame: equal(left(frame), right(frame)) is wanted
        if name in ("or", "orValue"):
            return absent_or(name, built[0], built[1])
        self._check_constants(node, name, operands)
        if name == "@in" and built[1] in self._constants and overloads[0].takes[1].name == "list":
            return in_constants(built[0], self._constants[built[1]])
        body = chosen(name, overloads)
        if name in CONVERSIONS and len(built) == 1 and built[0] in self._constants:
            return self._constant(self._converted(node, body, self._constants[built[0]]))
        if len(built) == 1:
            [only] = built
            return lambda frame: body(only(frame))
        if len(built) == 2:
            left, right = built
            return lambda frame: body(left(frame), right(frame))
        return lambda frame: body(*[each(frame) for each in built])

    def _check_constants(self, node: nodes.Call, name: str, operands: tuple[Node, ...]) -> None:
        if name not in PATTERN_FUNCTIONS:
            return
        pattern = operands[1]
        first = node.arguments[0] if name == "matches" else pattern
        for each in (pattern, first):
            if isinstance(each, nodes.Literal):
                self._converted(each, regex, each.value)

    def _converted(self, node: Node, body: Callable[[Value], Value], value: Value) -> Value:
        """Convert a constant at compile time, so that a wrong one is refused without a device."""
        try:
            return body(value)
        except EvaluationError as error:
            raise CelError(str(error), self._expression, node.position) from None

    @build.register
    def _logic(self, node: nodes.Logic) -> Evaluate:
        terms = [self.build(each) for each in node.terms]
        decisive = not node.is_and
        operator = "_&&_" if node.is_and else "_||_"
        return lambda frame: combined(terms, frame, decisive, operator)

    @build.register
    def _choice(self, node: nodes.Choice) -> Evaluate:
        condition, yes, no = (self.build(each) for each in (node.condition, node.yes, node.no))
        return lambda frame: yes(frame) if as_bool(condition(frame), "_?_:_") else no(frame)

    @build.register
    def _list(self, node: nodes.ListLiteral) -> Evaluate:
        built = [(self.build(item.value), item.optional) for item in node.items]
        if not any(optional for _, optional in built) and all(each in self._constants for each, _ in built):
            return self._constant(tuple(self._constants[each] for each, _ in built))
        if not any(optional for _, optional in built):
            plain = [each for each, _ in built]
            return lambda frame: tuple([each(frame) for each in plain])
        return lambda frame: tuple(members(built, frame))

    @build.register
    def _map(self, node: nodes.MapLiteral) -> Evaluate:
        entries = [(self.build(each.key), self.build(each.value), each.optional) for each in node.entries]
        return lambda frame: Map(entries_of(entries, frame))

    @build.register
    def _bind(self, node: nodes.Bind) -> Evaluate:
        value = self.build(node.value)
        [slot], [body] = self._with_variables((node.variable,), node.body, bound=True)

        def bind(frame: Frame) -> Value:
            try:
                frame[slot] = value(frame)
            except EvaluationError as error:
                # Kubernetes evaluates a bound value when it is first read.
                frame[slot] = error
            return body(frame)

        return bind

    @build.register
    def _optional_map(self, node: nodes.OptionalMap) -> Evaluate:
        target = self.build(node.target)
        [slot], [body] = self._with_variables((node.variable,), node.body)
        flat = node.flat

        def mapped(frame: Frame) -> Value:
            found = target(frame)
            if type(found) is not Optional:
                raise no_overload("hasValue", found)
            if not found.present:
                return NONE
            frame[slot] = found.content
            result = body(frame)
            return result if flat else Optional(present=True, content=result)

        return mapped

    @build.register
    def _quantifier(self, node: nodes.Quantifier) -> Evaluate:
        over = self.build(node.over)
        slots, [predicate] = self._with_variables(node.variables, node.predicate)
        units = _work_of(node.predicate)
        if node.kind == "exists_one":
            return lambda frame: (
                sum(as_bool(predicate(frame), "_?_:_") for _ in iterate(over(frame), slots, frame, units)) == 1
            )
        decisive = node.kind == "exists"
        operator = "_||_" if decisive else "_&&_"

        def quantify(frame: Frame) -> bool:
            terms = (predicate for _ in iterate(over(frame), slots, frame, units))
            return combined(terms, frame, decisive, operator)

        return quantify

    @build.register
    def _transform(self, node: nodes.Transform) -> Evaluate:
        over = self.build(node.over)
        below = [node.result] if node.predicate is None else [node.result, node.predicate]
        slots, [result, *conditions] = self._with_variables(node.variables, *below)
        kind, units = node.kind, sum(map(_work_of, below))

        def transform(frame: Frame) -> Value:
            found = [
                (frame[slots[0]], result(frame))
                for _ in iterate(over(frame), slots, frame, units)
                if all(as_bool(each(frame), "_?_:_") for each in conditions)
            ]
            return built_collection(kind, found)

        return transform

    @build.register
    def _sort_by(self, node: nodes.SortBy) -> Evaluate:
        over = self.build(node.over)
        slots, [key] = self._with_variables((node.variable,), node.key)
        units = _work_of(node.key)

        def sort(frame: Frame) -> Value:
            members = over(frame)
            if type(members) is not tuple:
                raise no_overload("sortBy", members)
            return sort_by(members, tuple(key(frame) for _ in iterate(members, slots, frame, units)))

        return sort
