"""Calls that are no functions: their arguments name variables, or are not evaluated as they stand.

Source: the CEL language definition, cel-go's extensions (bindings, lists, two-variable comprehensions, optionals).
"""

from __future__ import annotations

from collections.abc import Callable

from deviceclasses.cel.nodes import Bind, Name, Node, OptionalMap, Quantifier, Select, SortBy, Transform

Arguments = tuple[Node, ...]


class MacroError(Exception):
    """A macro's arguments are not what it needs; ``position`` is that of the wrong one."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


def expand(position: int, function: str, target: Node | None, arguments: Arguments) -> Node | None:
    """The node that a macro stands for, or None where this is an ordinary call."""
    if target is None:
        return _has(position, arguments) if function == "has" and len(arguments) == 1 else None
    if isinstance(target, Name) and target.name == "cel" and function == "bind" and len(arguments) == 3:
        return Bind(position, _variable("cel.bind", arguments[0]), arguments[1], arguments[2])
    make = MACROS.get((function, len(arguments)))
    return None if make is None else make(position, target, arguments)


def _has(position: int, arguments: Arguments) -> Node:
    [tested] = arguments
    if not isinstance(tested, Select) or tested.optional or tested.test:
        raise MacroError('has() takes a field after a dot, such as device.attributes["domain"].name', tested.position)
    return Select(position, tested.operand, tested.field, test=True)


def _variable(macro: str, node: Node) -> str:
    if not isinstance(node, Name):
        raise MacroError(f"the variable of {macro} must be a simple name", node.position)
    if node.name == "__result__":
        raise MacroError("__result__ can't be a variable", node.position)
    return node.name


def _two(macro: str, arguments: Arguments) -> tuple[str, str]:
    first, second = _variable(macro, arguments[0]), _variable(macro, arguments[1])
    if first == second:
        raise MacroError(f"both variables of {macro} are named {first}", arguments[1].position)
    return first, second


Maker = Callable[[int, Node, Arguments], Node]


def _quantifier(kind: str) -> Maker:
    return lambda at, over, rest: Quantifier(at, kind, over, (_variable(kind, rest[0]),), rest[1])


def _quantifier_of_two(kind: str) -> Maker:
    return lambda at, over, rest: Quantifier(at, kind, over, _two(kind, rest), rest[2])


def _transform_of_two(name: str, kind: str) -> Maker:
    def make(at: int, over: Node, rest: Arguments) -> Node:
        return Transform(at, kind, over, _two(name, rest), rest[2] if len(rest) == 4 else None, rest[-1])

    return make


def _map(at: int, over: Node, rest: Arguments) -> Node:
    return Transform(at, "list", over, (_variable("map", rest[0]),), rest[1] if len(rest) == 3 else None, rest[-1])


def _filter(at: int, over: Node, rest: Arguments) -> Node:
    return Transform(at, "list", over, (_variable("filter", rest[0]),), rest[1], rest[0])


def _sort_by(at: int, over: Node, rest: Arguments) -> Node:
    return SortBy(at, over, _variable("sortBy", rest[0]), rest[1])


def _optional_map(name: str) -> Maker:
    flat = name == "optFlatMap"
    return lambda at, target, rest: OptionalMap(at, target, _variable(name, rest[0]), rest[1], flat)


MACROS: dict[tuple[str, int], Maker] = {
    ("all", 2): _quantifier("all"),
    ("exists", 2): _quantifier("exists"),
    ("exists_one", 2): _quantifier("exists_one"),
    ("all", 3): _quantifier_of_two("all"),
    ("exists", 3): _quantifier_of_two("exists"),
    ("exists_one", 3): _quantifier_of_two("exists_one"),
    ("existsOne", 3): _quantifier_of_two("exists_one"),
    ("map", 2): _map,
    ("map", 3): _map,
    ("filter", 2): _filter,
    ("sortBy", 2): _sort_by,
    ("optMap", 2): _optional_map("optMap"),
    ("optFlatMap", 2): _optional_map("optFlatMap"),
    **{
        (name, count): _transform_of_two(name, kind)
        for name, kind in (("transformList", "list"), ("transformMap", "map"), ("transformMapEntry", "entry"))
        for count in (3, 4)
    },
}
"""By name and number of arguments, all behind a target."""
