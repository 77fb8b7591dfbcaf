"""The type checker: the types of an expression and the functions it calls, as the API server finds them at admission.

What the API server refuses is refused here, with the position of the first error and the nearest name that exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import singledispatchmethod

from deviceclasses.cel import nodes
from deviceclasses.cel.library.registry import FUNCTIONS, Overload
from deviceclasses.cel.nodes import COMPARISONS, FLIPPED, Node, dotted
from deviceclasses.cel.types import (
    ANY,
    BOOL,
    DEVICE,
    DEVICE_FIELDS,
    DYN,
    INT,
    LITERAL_TYPES,
    QUANTITY,
    SEMVER,
    TYPES,
    VARIABLES,
    Bindings,
    Type,
    is_dynamic,
    list_of,
    map_of,
    most_general,
    optional_of,
    param,
    type_of_type,
    unwrapped,
)  # fmt: skip
from deviceclasses.cel.values import type_name
from driver.errors import CelError

UNSUPPORTED_FUNCTIONS = {
    "format": "string.format is not evaluated by Tessera; join strings with + instead",
    "url": "url() is not evaluated by Tessera; use string functions instead",
    "isURL": "isURL() is not evaluated by Tessera; use string functions instead",
    "format.named": "named formats are not evaluated by Tessera; use matches() instead",
    "authorizer": "a selector has no authorizer",
}


def reason_unsupported(name: str) -> str | None:
    """The reason why Tessera refuses a name that Kubernetes accepts; None for a name that Kubernetes refuses too."""
    first, _, rest = name.partition(".")
    return UNSUPPORTED_FUNCTIONS.get("format.named" if first == "format" and rest else name)


A, B = param("A"), param("B")


def _signature(*takes: Type, gives: Type) -> Overload:
    return Overload(takes, gives, member=False, body=lambda *_: None)


CHOICE = (_signature(BOOL, A, A, gives=A),)
INDEX = (
    _signature(list_of(A), INT, gives=A),
    _signature(map_of(A, B), A, gives=B),
    _signature(optional_of(list_of(A)), INT, gives=optional_of(A)),
    _signature(optional_of(map_of(A, B)), A, gives=optional_of(B)),
)
OPTIONAL_INDEX = tuple(_signature(*each.takes, gives=optional_of(unwrapped(each.gives))) for each in INDEX)

BY_FUNCTION = {QUANTITY: ("quantities", "quantity", "100Gi"), SEMVER: ("versions", "semver", "550.0.0")}
"""Types that no operator compares: plural name, conversion function, and an example of its argument."""


def parameters(one: Type) -> Iterator[str]:
    if one.name == "var":
        yield one.key
    for each in one.params:
        yield from parameters(each)


def accepted(declared: Sequence[Overload]) -> str:
    ways = sorted({f"({', '.join(map(str, each.takes))})" for each in declared})
    return f"; it takes {' or '.join(ways)}" if ways else "; it is not called this way"


def advice(name: str, node: Node, types: Sequence[Type]) -> str:
    """A hint for operators on quantities and versions, which only functions compare; empty for all other calls."""
    kind = next((each for each in types if each in BY_FUNCTION), None)
    if name not in COMPARISONS or kind is None or not isinstance(node, nodes.Call):
        return ""
    many, function, example = BY_FUNCTION[kind]
    given = [_literal(each) for each in node.operands]
    operator = COMPARISONS[name]
    if given[0] is not None:
        operator = FLIPPED.get(operator, operator)
    written = next((each for each in given if each is not None), example)
    return f'; {many} are compared with .compareTo({function}("{written}")) {operator} 0'


def _literal(node: Node) -> str | None:
    """The text of a literal, or of the literal that is the only argument of a call."""
    if isinstance(node, nodes.Call) and len(node.operands) == 1:
        return _literal(node.operands[0])
    return str(node.value) if isinstance(node, nodes.Literal) else None


def nearest(name: str, known: Sequence[str]) -> str:
    """The end of a sentence: the most similar name, or else all names if they are few."""
    words = [each for each in known if each[0].isalpha()]
    close = get_close_matches(name, words, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(sorted(words))}" if len(words) <= 8 else ""


@dataclass
class TypeInfo:
    """The result of type checking: the type of each node; the name, operands and possible overloads of each call."""

    types: dict[Node, Type] = field(default_factory=dict)
    calls: dict[Node, tuple[str, tuple[Node, ...], tuple[Overload, ...]]] = field(default_factory=dict)
    type_names: dict[Node, str] = field(default_factory=dict)
    """The names of types, by the node that stands for one."""


def members_alike(expression: str, type_info: TypeInfo) -> None:
    """Raise CelError for a list or map with members of different types; known and dynamic types are different."""
    for node in list(type_info.types):
        groups: list[list[Node]] = []
        if isinstance(node, nodes.ListLiteral):
            groups = [[item.value for item in node.items]]
        elif isinstance(node, nodes.MapLiteral):
            groups = [[entry.key for entry in node.entries], [entry.value for entry in node.entries]]
        optional = {
            part.value for part in (*getattr(node, "items", ()), *getattr(node, "entries", ())) if part.optional
        }
        for group in groups:
            _alike(expression, type_info, group, optional)


def _alike(expression: str, type_info: TypeInfo, group: list[Node], optional: set[Node]) -> None:
    types = [unwrapped(type_info.types[each]) if each in optional else type_info.types[each] for each in group]
    for each, found in zip(group, types, strict=True):
        if found != types[0]:
            message = f"{found} next to {types[0]}; all members of a list or map have the same type"
            raise CelError(message, expression, each.position)


def check(expression: str, root: Node) -> TypeInfo:
    """Check the types of a selector. Raises CelError with the position of the first error."""
    checker = _Checker(expression)
    found = checker.bindings.resolve(checker.type(root), final=True)
    type_info = checker.type_info
    type_info.types = {node: checker.bindings.resolve(each, final=True) for node, each in type_info.types.items()}
    if found not in (BOOL, ANY):
        raise CelError(f"the expression gives {found}; a selector has to give bool", expression, root.position)
    members_alike(expression, type_info)
    return type_info


class _Checker:
    def __init__(self, expression: str) -> None:
        self.expression = expression
        self.bindings = Bindings()
        self.type_info = TypeInfo()
        self._scope: dict[str, Type] = dict(VARIABLES)

    def type(self, node: Node) -> Type:
        """Check a node and all nodes below it."""
        found = self._check(node)
        self.type_info.types[node] = found
        return found

    def error(self, node: Node, message: str) -> CelError:
        return CelError(message, self.expression, node.position)

    @contextmanager
    def variables(self, **known: Type) -> Iterator[None]:
        """Declare variables for the duration of the block."""
        outer = self._scope
        self._scope = {**outer, **known}
        try:
            yield
        finally:
            self._scope = outer

    @singledispatchmethod
    def _check(self, node: Node) -> Type:
        raise NotImplementedError(type(node).__name__)

    @_check.register
    def _literal(self, node: nodes.Literal) -> Type:
        return LITERAL_TYPES[type_name(node.value)]

    @_check.register
    def _name(self, node: nodes.Name) -> Type:
        if node.name in self._scope:
            return self._scope[node.name]
        return self._type_named(node, node.name) or self._unknown(node, node.name, [*self._scope, *TYPES])

    def _type_named(self, node: Node, name: str) -> Type | None:
        if name not in TYPES:
            return None
        self.type_info.type_names[node] = name
        return type_of_type(TYPES[name])

    def _unknown(self, node: Node, name: str, known: Sequence[str], what: str = "name") -> Type:
        raise self.error(node, reason_unsupported(name) or f"unknown {what} {name!r}{nearest(name, known)}")

    @_check.register
    def _select(self, node: nodes.Select) -> Type:
        qualified = dotted(node)
        if qualified is not None and qualified.split(".", 1)[0] not in self._scope:
            found = self._type_named(node, qualified)
            if found is not None:
                return found
        operand = self.bindings.resolve(self.type(node.operand))
        found = self._field(node, unwrapped(operand))
        if node.test:
            return BOOL
        return optional_of(found) if node.optional or operand.name == "optional_type" else found

    def _field(self, node: nodes.Select, operand: Type) -> Type:
        if operand.name == "map":
            return operand.params[1]
        if operand == DEVICE:
            if node.field not in DEVICE_FIELDS:
                self._unknown(node, node.field, list(DEVICE_FIELDS), "field of device")
            return DEVICE_FIELDS[node.field]
        if operand.name == "var":
            self.bindings.accepts([DYN], [operand])
        elif not is_dynamic(operand):
            raise self.error(node, f"{operand} has no field {node.field!r}; only maps and device have fields")
        return DYN

    @_check.register
    def _index(self, node: nodes.Index) -> Type:
        types = [self.type(node.operand), self.type(node.key)]
        name = "_[?_]" if node.optional else "_[_]"
        return self._resolve(node, name, OPTIONAL_INDEX if node.optional else INDEX, types)[0]

    @_check.register
    def _call(self, node: nodes.Call) -> Type:
        types = [self.type(each) for each in node.arguments]
        name, operands, target = node.function, node.operands, node.target
        if target is not None:
            prefix = dotted(target)
            if prefix is not None and f"{prefix}.{name}" in FUNCTIONS:
                name, operands, target = f"{prefix}.{name}", node.arguments, None
            elif prefix is not None and prefix.split(".", 1)[0] not in (*self._scope, *TYPES):
                self._unknown(node, f"{prefix}.{name}", list(FUNCTIONS), "function")
            else:
                types = [self.type(target), *types]
        declared = FUNCTIONS.get(name)
        if declared is None:
            return self._unknown(node, name, list(FUNCTIONS), "function")
        style = [each for each in declared if each.member == (target is not None)]
        found, overloads = self._resolve(node, name, style, types)
        self.type_info.calls[node] = (name, operands, overloads)
        return found

    def _resolve(
        self, node: Node, name: str, declared: Sequence[Overload], types: Sequence[Type]
    ) -> tuple[Type, tuple[Overload, ...]]:
        """The type of a call, and its possible overloads: several if types are known only during evaluation."""
        found: Type | None = None
        candidates = []
        for each in declared:
            takes, gives = self._instance(each)
            if self.bindings.accepts(types, takes):
                candidates.append(each)
                result = self.bindings.resolve(gives)
                if found is None:
                    found = result
                elif not is_dynamic(found) and result != found:
                    found = DYN
        if found is None:
            given = [self.bindings.resolve(each, final=True) for each in types]
            instead = advice(name, node, given) or accepted(declared)
            raise self.error(node, f"{name} does not take ({', '.join(map(str, given))}){instead}")
        return found, tuple(candidates)

    def _instance(self, overload: Overload) -> tuple[tuple[Type, ...], Type]:
        """The signature with fresh type parameters."""
        own = Bindings()
        for each in (*overload.takes, overload.gives):
            for key in parameters(each):
                own.found.setdefault(key, self.bindings.fresh())
        return tuple(own.resolve(each) for each in overload.takes), own.resolve(overload.gives)

    @_check.register
    def _logic(self, node: nodes.Logic) -> Type:
        for each in node.terms:
            self._bool(each, "&&" if node.is_and else "||")
        return BOOL

    def _bool(self, node: Node, where: str) -> None:
        found = self.type(node)
        if not self.bindings.accepts([found], [BOOL]):
            raise self.error(node, f"{where} takes bool, not {self.bindings.resolve(found, final=True)}")

    @_check.register
    def _choice(self, node: nodes.Choice) -> Type:
        types = [self.type(each) for each in (node.condition, node.yes, node.no)]
        return self._resolve(node, "_?_:_", CHOICE, types)[0]

    @_check.register
    def _list(self, node: nodes.ListLiteral) -> Type:
        return list_of(self._joined([(item.value, item.optional) for item in node.items]))

    @_check.register
    def _map(self, node: nodes.MapLiteral) -> Type:
        key = self._joined([(entry.key, False) for entry in node.entries])
        return map_of(key, self._joined([(entry.value, entry.optional) for entry in node.entries]))

    def _joined(self, members: Sequence[tuple[Node, bool]]) -> Type:
        """The common type of all members."""
        joined: Type | None = None
        for node, optional in members:
            found = self.type(node)
            if optional:
                if found.name != "optional_type" and not is_dynamic(found):
                    raise self.error(node, f"? in front of a member takes an optional value, not {found}")
                found = unwrapped(found)
            if joined is None:
                joined = found
            elif self.bindings.accepts([joined], [found]):
                joined = most_general(joined, found)
            else:
                raise self.error(node, f"{found} next to {joined}; all members of a list or map have the same type")
        return joined or self.bindings.fresh()

    def _iterated(self, over: Node, count: int) -> list[Type]:
        """The types of the variables of a macro."""
        found = self.bindings.resolve(self.type(over))
        if found.name == "list":
            return [found.params[0]] if count == 1 else [INT, found.params[0]]
        if found.name == "map":
            return list(found.params[:count])
        if found.name == "var":
            self.bindings.accepts([DYN], [found])
        elif found != DYN:
            raise self.error(over, f"{found} can't be iterated over; lists and maps can")
        return [DYN] * count

    @_check.register
    def _quantifier(self, node: nodes.Quantifier) -> Type:
        types = self._iterated(node.over, len(node.variables))
        with self.variables(**dict(zip(node.variables, types, strict=True))):
            self._bool(node.predicate, node.kind)
        return BOOL

    @_check.register
    def _transform(self, node: nodes.Transform) -> Type:
        types = self._iterated(node.over, len(node.variables))
        with self.variables(**dict(zip(node.variables, types, strict=True))):
            if node.predicate is not None:
                self._bool(node.predicate, "the condition of a macro")
            result = self.type(node.result)
        if node.kind == "list":
            return list_of(result)
        if node.kind == "map":
            return map_of(types[0], result)
        wanted = map_of(self.bindings.fresh(), self.bindings.fresh())
        if not self.bindings.accepts([result], [wanted]):
            raise self.error(node.result, f"transformMapEntry takes a map of one entry, not {result}")
        return self.bindings.resolve(wanted)

    @_check.register
    def _sort_by(self, node: nodes.SortBy) -> Type:
        over = self.bindings.resolve(self.type(node.over))
        [variable] = self._iterated(node.over, 1)
        with self.variables(**{node.variable: variable}):
            key = self.type(node.key)
        self._resolve(node, "sortBy", FUNCTIONS["sort"], [list_of(key)])
        if over.name != "list" and not is_dynamic(over):
            raise self.error(node, f"sortBy takes a list, not {over}")
        return over if over.name == "list" else list_of(DYN)

    @_check.register
    def _bind(self, node: nodes.Bind) -> Type:
        value = self.type(node.value)
        with self.variables(**{node.variable: value}):
            return self.type(node.body)

    @_check.register
    def _optional_map(self, node: nodes.OptionalMap) -> Type:
        target, content = self.type(node.target), self.bindings.fresh()
        if not self.bindings.accepts([target], [optional_of(content)]):
            raise self.error(node, f"optMap and optFlatMap take an optional value, not {target}")
        with self.variables(**{node.variable: DYN if is_dynamic(target) else self.bindings.resolve(content)}):
            body = self.type(node.body)
        if not node.flat:
            return optional_of(body)
        return self._resolve(node, "optFlatMap", CHOICE, [BOOL, body, optional_of(self.bindings.fresh())])[0]
