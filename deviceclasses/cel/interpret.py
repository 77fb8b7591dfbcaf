"""A checked expression becomes a Python function: one closure a node, variables in numbered places.

An error is raised as EvaluationError; ``&&``, ``||``, ``all`` and ``exists`` forget one where another term decides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatchmethod

from deviceclasses.cel import nodes
from deviceclasses.cel.checked import Checked
from deviceclasses.cel.library.conversions import CONVERSIONS
from deviceclasses.cel.library.lists import sort_by
from deviceclasses.cel.library.registry import chosen
from deviceclasses.cel.library.text import regex
from deviceclasses.cel.nodes import Node
from deviceclasses.cel.steps import (
    Evaluate,
    Places,
    among_constants,
    assembled,
    bound_value,
    either,
    entries_of,
    joined,
    member,
    members,
    optional_member,
    present,
    rounds,
    truth,
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


def build(expression: str, root: Node, checked: Checked) -> Callable[[Value], Value]:
    """The function from a device to the expression's value, which raises EvaluationError where there is none.

    Raises CelError for constants that can't be converted and for patterns that RE2 refuses, as Kubernetes does.
    """
    builder = _Builder(expression, checked)
    evaluate = builder.build(root)
    size = builder.size
    return lambda device: evaluate([device, *[None] * size])


class _Builder:
    def __init__(self, expression: str, checked: Checked) -> None:
        self._expression = expression
        self._checked = checked
        self._places: dict[str, int] = {"device": 0}
        self._constants: dict[Evaluate, Value] = {}
        self._bound: set[int] = set()
        self.size = 0

    @singledispatchmethod
    def build(self, node: Node) -> Evaluate:
        raise NotImplementedError(type(node).__name__)

    def _constant(self, value: Value) -> Evaluate:
        def constant(_: Places) -> Value:
            return value

        self._constants[constant] = value
        return constant

    def _with_variables(
        self, names: tuple[str, ...], *below: Node, bound: bool = False
    ) -> tuple[list[int], list[Evaluate]]:
        """Places for variables, and what is below them built where they are known."""
        outer = dict(self._places)
        places = []
        for name in names:
            self.size += 1
            places.append(self.size)
            self._places[name] = self.size
        if bound:
            self._bound.update(places)
        built = [self.build(each) for each in below]
        self._places = outer
        return places, built

    @build.register
    def _literal(self, node: nodes.Literal) -> Evaluate:
        return self._constant(node.value)

    @build.register
    def _name(self, node: nodes.Name) -> Evaluate:
        if node in self._checked.type_names:
            return self._constant(TypeValue(self._checked.type_names[node]))
        place = self._places[node.name]
        return bound_value(place) if place in self._bound else lambda places: places[place]

    @build.register
    def _select(self, node: nodes.Select) -> Evaluate:
        if node in self._checked.type_names:
            return self._constant(TypeValue(self._checked.type_names[node]))
        operand, name = self.build(node.operand), node.field
        if node.test:
            return lambda places: present(operand(places), name)
        if node.optional:
            return lambda places: optional_member(operand(places), name)
        return lambda places: member(operand(places), name)

    @build.register
    def _index(self, node: nodes.Index) -> Evaluate:
        operand, key = self.build(node.operand), self.build(node.key)
        take = optional_member if node.optional else member
        return lambda places: take(operand(places), key(places))

    @build.register
    def _call(self, node: nodes.Call) -> Evaluate:
        name, operands, overloads = self._checked.calls[node]
        built = [self.build(each) for each in operands]
        if name in ("_==_", "_!=_"):
            left, right = built
            wanted = name == "_==_"
            return lambda places: equal(left(places), right(places)) is wanted
        if name in ("or", "orValue"):
            return either(name, built[0], built[1])
        self._check_constants(node, name, operands)
        if name == "@in" and built[1] in self._constants and overloads[0].takes[1].name == "list":
            return among_constants(built[0], self._constants[built[1]])
        body = chosen(name, overloads)
        if name in CONVERSIONS and len(built) == 1 and built[0] in self._constants:
            return self._constant(self._converted(node, body, self._constants[built[0]]))
        if len(built) == 1:
            [only] = built
            return lambda places: body(only(places))
        if len(built) == 2:
            left, right = built
            return lambda places: body(left(places), right(places))
        return lambda places: body(*[each(places) for each in built])

    def _check_constants(self, node: nodes.Call, name: str, operands: tuple[Node, ...]) -> None:
        if name not in PATTERN_FUNCTIONS:
            return
        pattern = operands[1]
        first = node.arguments[0] if name == "matches" else pattern
        for each in (pattern, first):
            if isinstance(each, nodes.Literal):
                self._converted(each, regex, each.value)

    def _converted(self, node: Node, body: Callable[[Value], Value], value: Value) -> Value:
        """A conversion of a constant, made now, so that a wrong one is refused before there is a device."""
        try:
            return body(value)
        except EvaluationError as error:
            raise CelError(str(error), self._expression, node.position) from None

    @build.register
    def _logic(self, node: nodes.Logic) -> Evaluate:
        terms = [self.build(each) for each in node.terms]
        decisive = not node.is_and
        operator = "_&&_" if node.is_and else "_||_"
        return lambda places: joined(terms, places, decisive, operator)

    @build.register
    def _choice(self, node: nodes.Choice) -> Evaluate:
        condition, yes, no = (self.build(each) for each in (node.condition, node.yes, node.no))
        return lambda places: yes(places) if truth(condition(places), "_?_:_") else no(places)

    @build.register
    def _list(self, node: nodes.ListLiteral) -> Evaluate:
        built = [(self.build(item.value), item.optional) for item in node.items]
        if not any(optional for _, optional in built) and all(each in self._constants for each, _ in built):
            return self._constant(tuple(self._constants[each] for each, _ in built))
        if not any(optional for _, optional in built):
            plain = [each for each, _ in built]
            return lambda places: tuple([each(places) for each in plain])
        return lambda places: tuple(members(built, places))

    @build.register
    def _map(self, node: nodes.MapLiteral) -> Evaluate:
        entries = [(self.build(each.key), self.build(each.value), each.optional) for each in node.entries]
        return lambda places: Map(entries_of(entries, places))

    @build.register
    def _bind(self, node: nodes.Bind) -> Evaluate:
        value = self.build(node.value)
        [place], [body] = self._with_variables((node.variable,), node.body, bound=True)

        def bind(places: Places) -> Value:
            try:
                places[place] = value(places)
            except EvaluationError as error:
                # Kubernetes evaluates a bound value when it is first read.
                places[place] = error
            return body(places)

        return bind

    @build.register
    def _optional_map(self, node: nodes.OptionalMap) -> Evaluate:
        target = self.build(node.target)
        [place], [body] = self._with_variables((node.variable,), node.body)
        flat = node.flat

        def mapped(places: Places) -> Value:
            found = target(places)
            if type(found) is not Optional:
                raise no_overload("hasValue", found)
            if not found.present:
                return NONE
            places[place] = found.content
            result = body(places)
            return result if flat else Optional(present=True, content=result)

        return mapped

    @build.register
    def _quantifier(self, node: nodes.Quantifier) -> Evaluate:
        over = self.build(node.over)
        at, [predicate] = self._with_variables(node.variables, node.predicate)
        if node.kind == "exists_one":
            return lambda places: sum(truth(predicate(places), "_?_:_") for _ in rounds(over(places), at, places)) == 1
        decisive = node.kind == "exists"
        operator = "_||_" if decisive else "_&&_"

        def quantify(places: Places) -> bool:
            terms = (predicate for _ in rounds(over(places), at, places))
            return joined(terms, places, decisive, operator)

        return quantify

    @build.register
    def _transform(self, node: nodes.Transform) -> Evaluate:
        over = self.build(node.over)
        below = [node.result] if node.predicate is None else [node.result, node.predicate]
        at, [result, *conditions] = self._with_variables(node.variables, *below)
        kind = node.kind

        def transform(places: Places) -> Value:
            found = [
                (places[at[0]], result(places))
                for _ in rounds(over(places), at, places)
                if all(truth(each(places), "_?_:_") for each in conditions)
            ]
            return assembled(kind, found)

        return transform

    @build.register
    def _sort_by(self, node: nodes.SortBy) -> Evaluate:
        over = self.build(node.over)
        at, [key] = self._with_variables((node.variable,), node.key)

        def sort(places: Places) -> Value:
            members = over(places)
            if type(members) is not tuple:
                raise no_overload("sortBy", members)
            return sort_by(members, tuple(key(places) for _ in rounds(members, at, places)))

        return sort
