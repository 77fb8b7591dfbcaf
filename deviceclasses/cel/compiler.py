"""The compiler: the type of each node, as the API server finds it at admission, and the function that evaluates it.

What the API server refuses is refused here, with the position of the first error and the nearest name that exists.
Variables are kept in the numbered slots of a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import singledispatchmethod

from deviceclasses.cel import evaluation_functions as evaluation
from deviceclasses.cel import nodes
from deviceclasses.cel.evaluation_functions import DIRECT, Evaluate, Frame, combined, entries_of, members
from deviceclasses.cel.library.lists_and_optionals import member, optional_member
from deviceclasses.cel.library.operators_and_conversions import CONVERSIONS
from deviceclasses.cel.library.registry import FUNCTIONS, UNSUPPORTED_FUNCTIONS, Overload, chosen
from deviceclasses.cel.library.text import regex
from deviceclasses.cel.nodes import COMPARISONS, FLIPPED, Expr, dotted
from deviceclasses.cel.types import (
    ANY_TYPE,
    BOOL,
    DEVICE,
    DEVICE_FIELDS,
    DYN,
    INT,
    QUANTITY,
    SEMVER,
    TYPES_BY_NAME,
    Bindings,
    Type,
    is_dynamic,
    list_of,
    map_of,
    most_general,
    optional_of,
    type_of_type,
    unwrapped,
)
from deviceclasses.cel.values import EvaluationError, Map, TypeValue, Value, type_name
from driver.errors import CelError

PATTERN_FUNCTIONS = ("matches", "find", "findAll")
COMPARED_BY_FUNCTION = {QUANTITY: ("quantities", "quantity", "100Gi"), SEMVER: ("versions", "semver", "550.0.0")}
"""Types that no operator compares: plural name, conversion function, and an example of its argument."""

Typed = tuple[Type, Evaluate]
"""The type of a node and the function that evaluates it."""


def compile_tree(expression: str, root: Expr) -> Callable[[Value], Value]:
    """Return the function from a device to the value of a selector. It raises EvaluationError on failure.

    Raises CelError with the position of the first type error, else of the first constant that can't be converted or
    pattern that RE2 refuses, as Kubernetes does.
    """
    compiler = _Compiler(expression, {"device": DEVICE})
    result_type, evaluate = compiler.build(root)
    compiler.finish(root, result_type)
    size = compiler.size
    return lambda device: evaluate([device, *[None] * size])


def compile_untyped(expression: str, root: Expr, variables: Sequence[str]) -> Callable[..., Value]:
    """Return the function from values of ``variables``, whose types are not known, to the value of an expression.

    Raises CelError for unknown names; the function raises EvaluationError for types that do not fit.
    """
    compiler = _Compiler(expression, dict.fromkeys(variables, DYN))
    _, evaluate = compiler.build(root)
    spare = compiler.size + 1 - len(variables)
    return lambda *values: evaluate([*values, *[None] * spare])


def _slot(number: int) -> Evaluate:
    return lambda frame: frame[number]


class _Compiler:
    """``size`` is the number of the last slot that is in use."""

    def __init__(self, expression: str, variables: Mapping[str, Type]) -> None:
        self.size = len(variables) - 1
        self._expression = expression
        self._bindings = Bindings()
        self._scope: dict[str, Typed] = {
            name: (kind, _slot(number)) for number, (name, kind) in enumerate(variables.items())
        }
        self._constants: dict[Evaluate, Value] = {}
        self._collections: list[list[tuple[Expr, Type, bool]]] = []
        self._wrong_constants: list[CelError] = []

    def finish(self, root: Expr, result_type: Type) -> None:
        """Check what is known only after all nodes. Raises CelError."""
        result_type = self._bindings.resolve(result_type, final=True)
        if result_type not in (BOOL, ANY_TYPE):
            raise self._error(root, f"the expression gives {result_type}; a selector has to give bool")
        for collection in self._collections:
            first: Type | None = None
            for node, found, optional in collection:
                resolved = self._bindings.resolve(found, final=True)
                resolved = unwrapped(resolved) if optional else resolved
                first = first or resolved
                if resolved != first:  # known and dynamic types are different
                    raise self._different(node, resolved, first)
        for error in self._wrong_constants:
            raise error

    def _error(self, node: Expr, message: str) -> CelError:
        return CelError(message, self._expression, node.position)

    def _different(self, node: Expr, one: Type, other: Type) -> CelError:
        return self._error(node, f"{one} next to {other}; all members of a list or map have the same type")

    def _unknown(self, node: Expr, name: str, known: Sequence[str], what: str = "name") -> CelError:
        """The error about an unknown name, with the most similar known one, or else all of them if they are few."""
        reason = UNSUPPORTED_FUNCTIONS.get("format.named" if name.startswith("format.") else name)
        words = sorted(word for word in known if word[0].isalpha())
        hint = f"; known are {', '.join(words)}" if len(words) <= 8 else ""
        if close := get_close_matches(name, words, 1):
            hint = f"; did you mean {close[0]!r}?"
        return self._error(node, reason or f"unknown {what} {name!r}{hint}")

    def _constant(self, value: Value) -> Evaluate:
        def constant(_: Frame) -> Value:
            return value

        self._constants[constant] = value
        return constant

    @contextmanager
    def _variables(self, names: Sequence[str], types: Sequence[Type], *, bound: bool = False) -> Iterator[list[int]]:
        """Declare variables for the duration of the block, and give their slots; ``bound`` ones may hold an error."""
        outer = self._scope
        slots = [self.size + 1 + index for index in range(len(names))]
        self.size += len(names)
        read = evaluation.bound_value if bound else _slot
        self._scope = {**outer, **dict(zip(names, zip(types, map(read, slots), strict=True), strict=True))}
        try:
            yield slots
        finally:
            self._scope = outer

    @singledispatchmethod
    def build(self, node: Expr) -> Typed:
        raise NotImplementedError(type(node).__name__)

    @build.register
    def _literal(self, node: nodes.Literal) -> Typed:
        return TYPES_BY_NAME[type_name(node.value)], self._constant(node.value)

    @build.register
    def _name(self, node: nodes.Name) -> Typed:
        found_type = self._scope.get(node.name) or self._type_named(node.name)
        if found_type is None:
            raise self._unknown(node, node.name, [*self._scope, *TYPES_BY_NAME])
        return found_type

    def _type_named(self, name: str) -> Typed | None:
        return (type_of_type(TYPES_BY_NAME[name]), self._constant(TypeValue(name))) if name in TYPES_BY_NAME else None

    @build.register
    def _select(self, node: nodes.Select) -> Typed:
        qualified = dotted(node)
        if qualified is not None and qualified.split(".", 1)[0] not in self._scope:
            named = self._type_named(qualified)
            if named is not None:
                return named
        operand_type, operand = self.build(node.operand)
        operand_type = self._bindings.resolve(operand_type)
        gives, name = self._field(node, unwrapped(operand_type)), node.field
        if node.test:
            return BOOL, lambda frame: optional_member(operand(frame), name).present
        if node.optional:
            return optional_of(gives), lambda frame: optional_member(operand(frame), name)
        if operand_type.name == "optional_type":
            gives = optional_of(gives)
        return gives, lambda frame: member(operand(frame), name)

    def _field(self, node: nodes.Select, operand: Type) -> Type:
        if operand.name == "map":
            return operand.params[1]
        if operand == DEVICE:
            if node.field not in DEVICE_FIELDS:
                raise self._unknown(node, node.field, list(DEVICE_FIELDS), "field of device")
            return DEVICE_FIELDS[node.field]
        if operand.name == "var":
            self._bindings.accepts([DYN], [operand])
        elif not is_dynamic(operand):
            raise self._error(node, f"{operand} has no field {node.field!r}; only maps and device have fields")
        return DYN

    @build.register
    def _call(self, node: nodes.Call) -> Typed:
        operands = [self.build(argument) for argument in node.arguments]
        name, is_method = node.function, False
        if node.target is not None:
            prefix = dotted(node.target)
            if prefix is not None and f"{prefix}.{name}" in FUNCTIONS:
                name = f"{prefix}.{name}"
            elif prefix is not None and prefix.split(".", 1)[0] not in (*self._scope, *TYPES_BY_NAME):
                raise self._unknown(node, f"{prefix}.{name}", list(FUNCTIONS), "function")
            else:
                operands, is_method = [self.build(node.target), *operands], True
        if name not in FUNCTIONS:
            raise self._unknown(node, name, list(FUNCTIONS), "function")
        declared = [overload for overload in FUNCTIONS[name] if overload.member is is_method]
        result_type, overloads = self._resolve(node, name, declared, [operand_type for operand_type, _ in operands])
        return result_type, self._calling(node, name, overloads, [evaluate for _, evaluate in operands])

    def _resolve(
        self, node: Expr, name: str, declared: Sequence[Overload], types: Sequence[Type]
    ) -> tuple[Type, tuple[Overload, ...]]:
        """The type of a call, and its possible overloads: several if types are known only during evaluation."""
        result_type: Type | None = None
        candidates = []
        for overload in declared:
            *takes, gives = self._bindings.instance(*overload.takes, overload.gives)
            if self._bindings.accepts(types, takes):
                candidates.append(overload)
                result = self._bindings.resolve(gives)
                if result_type is None:
                    result_type = result
                elif not is_dynamic(result_type) and result != result_type:
                    result_type = DYN
        if result_type is None:
            given = [self._bindings.resolve(operand_type, final=True) for operand_type in types]
            ways = sorted({f"({', '.join(map(str, overload.takes))})" for overload in declared})
            accepted = f"; it takes {' or '.join(ways)}" if ways else "; it is not called this way"
            instead = _comparison_hint(name, node, given) or accepted
            raise self._error(node, f"{name} does not take ({', '.join(map(str, given))}){instead}")
        return result_type, tuple(candidates)

    def _calling(
        self, node: nodes.Call, name: str, overloads: tuple[Overload, ...], operands: Sequence[Evaluate]
    ) -> Evaluate:
        if name in DIRECT:
            return DIRECT[name](*operands)
        if name in PATTERN_FUNCTIONS:
            # Kubernetes takes the first argument of matches(text, pattern), too, for a pattern.
            for argument in (node.operands[1], node.arguments[0] if name == "matches" else node.operands[1]):
                if isinstance(argument, nodes.Literal):
                    self._converted(argument, regex, argument.value)
        constants = [self._constants[operand] for operand in operands if operand in self._constants]
        if name == "@in" and operands[1] in self._constants and overloads[0].takes[1].name == "list":
            return evaluation.in_constants(operands[0], constants[-1])
        body = chosen(name, overloads)
        if name in CONVERSIONS and len(operands) == len(constants) == 1:
            return self._constant(self._converted(node, body, constants[0]))
        if len(operands) == 1:
            [only] = operands
            return lambda frame: body(only(frame))
        if len(operands) == 2:
            left, right = operands
            return lambda frame: body(left(frame), right(frame))
        return lambda frame: body(*[operand(frame) for operand in operands])

    def _converted(self, node: Expr, body: Callable[[Value], Value], value: Value) -> Value:
        """Convert a constant at compile time, so that a wrong one is refused without a device."""
        try:
            return body(value)
        except EvaluationError as error:
            self._wrong_constants.append(self._error(node, str(error)))
            return None

    @build.register
    def _logic(self, node: nodes.Logic) -> Typed:
        terms = [self._bool(term, "&&" if node.is_and else "||") for term in node.terms]
        decisive = not node.is_and
        operator = "_&&_" if node.is_and else "_||_"
        return BOOL, lambda frame: combined(terms, frame, decisive, operator)

    def _bool(self, node: Expr, where: str) -> Evaluate:
        result_type, evaluate = self.build(node)
        if not self._bindings.accepts([result_type], [BOOL]):
            raise self._error(node, f"{where} takes bool, not {self._bindings.resolve(result_type, final=True)}")
        return evaluate

    @build.register
    def _list(self, node: nodes.ListLiteral) -> Typed:
        member_type, built = self._joined([(entry.value, entry.optional) for entry in node.entries])
        plain = [evaluate for evaluate, optional in built if not optional]
        if len(plain) < len(built):
            return list_of(member_type), lambda frame: tuple(members(built, frame))
        if all(member in self._constants for member in plain):
            return list_of(member_type), self._constant(tuple(self._constants[member] for member in plain))
        return list_of(member_type), lambda frame: tuple([member(frame) for member in plain])

    @build.register
    def _map(self, node: nodes.MapLiteral) -> Typed:
        key, keys = self._joined([(entry.key, False) for entry in node.entries if entry.key is not None])
        value, values = self._joined([(entry.value, entry.optional) for entry in node.entries])
        built = [(of_key, *of_value) for (of_key, _), of_value in zip(keys, values, strict=True)]
        return map_of(key, value), lambda frame: Map(entries_of(built, frame))

    def _joined(self, collection: Sequence[tuple[Expr, bool]]) -> tuple[Type, list[tuple[Evaluate, bool]]]:
        """The common type of members, and each with whether it is optional."""
        joined: Type | None = None
        typed, built = [], []
        for node, optional in collection:
            value_type, evaluate = self.build(node)
            typed.append((node, value_type, optional))
            built.append((evaluate, optional))
            if optional:
                if value_type.name != "optional_type" and not is_dynamic(value_type):
                    raise self._error(node, f"? in front of a member takes an optional value, not {value_type}")
                value_type = unwrapped(value_type)
            if joined is None:
                joined = value_type
            elif self._bindings.accepts([joined], [value_type]):
                joined = most_general(joined, value_type)
            else:
                raise self._different(node, value_type, joined)
        self._collections.append(typed)
        return joined or self._bindings.fresh(), built

    @build.register
    def _macro(self, node: nodes.Macro) -> Typed:
        over_type, over = self.build(node.over)
        if node.kind == "bind":
            return self._bind(node, over_type, over)
        if node.kind in ("optMap", "optFlatMap"):
            return self._optional_map(node, over_type, over)
        over_type = self._bindings.resolve(over_type)
        types = self._iterated(node.over, over_type, len(node.variables))
        units = evaluation.work_of(node.body) + (0 if node.condition is None else evaluation.work_of(node.condition))
        with self._variables(node.variables, types) as slots:
            if node.kind in ("all", "exists", "exists_one"):
                return BOOL, evaluation.quantifier(node.kind, over, slots, self._bool(node.body, node.kind), units)
            condition = None if node.condition is None else self._bool(node.condition, "the condition of a macro")
            result, body = self.build(node.body)
        if node.kind == "sortBy":
            self._resolve(node, "sortBy", FUNCTIONS["sort"], [list_of(result)])
            if over_type.name != "list" and not is_dynamic(over_type):
                raise self._error(node, f"sortBy takes a list, not {over_type}")
            result_type = over_type if over_type.name == "list" else list_of(DYN)
            return result_type, evaluation.sorted_by(over, slots, body, units)
        evaluate = evaluation.transform(node.kind, over, slots, condition, body, units)
        if node.kind == "list":
            return list_of(result), evaluate
        if node.kind == "map":
            return map_of(types[0], result), evaluate
        map_type = map_of(self._bindings.fresh(), self._bindings.fresh())
        if not self._bindings.accepts([result], [map_type]):
            raise self._error(node.body, f"transformMapEntry takes a map of one entry, not {result}")
        return self._bindings.resolve(map_type), evaluate

    def _iterated(self, over: Expr, found: Type, count: int) -> list[Type]:
        if found.name == "list":
            return [found.params[0]] if count == 1 else [INT, found.params[0]]
        if found.name == "map":
            return list(found.params[:count])
        if found.name == "var":
            self._bindings.accepts([DYN], [found])
        elif found != DYN:
            raise self._error(over, f"{found} can't be iterated over; lists and maps can")
        return [DYN] * count

    def _bind(self, node: nodes.Macro, found: Type, value: Evaluate) -> Typed:
        with self._variables(node.variables, [found], bound=True) as [slot]:
            result, body = self.build(node.body)
        return result, evaluation.bind(slot, value, body)

    def _optional_map(self, node: nodes.Macro, found: Type, target: Evaluate) -> Typed:
        content = self._bindings.fresh()
        if not self._bindings.accepts([found], [optional_of(content)]):
            raise self._error(node, f"optMap and optFlatMap take an optional value, not {found}")
        types = [DYN if is_dynamic(found) else self._bindings.resolve(content)]
        with self._variables(node.variables, types) as [slot]:
            result, body = self.build(node.body)
        flat = node.kind == "optFlatMap"
        evaluate = evaluation.optional_map(slot, target, body, flat=flat)
        if not flat:
            return optional_of(result), evaluate
        types = [BOOL, result, optional_of(self._bindings.fresh())]
        return self._resolve(node, "optFlatMap", FUNCTIONS["_?_:_"], types)[0], evaluate


def _comparison_hint(name: str, node: Expr, types: Sequence[Type]) -> str:
    """A hint for operators on quantities and versions, which only functions compare; empty for all other calls."""
    kind = next((operand_type for operand_type in types if operand_type in COMPARED_BY_FUNCTION), None)
    if name not in COMPARISONS or kind is None or not isinstance(node, nodes.Call):
        return ""
    many, function, example = COMPARED_BY_FUNCTION[kind]
    given = [_literal_text(operand) for operand in node.operands]
    operator = COMPARISONS[name]
    if given[0] is not None:
        operator = FLIPPED.get(operator, operator)
    written = next((literal for literal in given if literal is not None), example)
    return f'; {many} are compared with .compareTo({function}("{written}")) {operator} 0'


def _literal_text(node: Expr) -> str | None:
    """The text of a literal, or of the literal that is the only argument of a call."""
    if isinstance(node, nodes.Call) and len(node.operands) == 1:
        return _literal_text(node.operands[0])
    return str(node.value) if isinstance(node, nodes.Literal) else None
