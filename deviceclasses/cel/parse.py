"""The parser: from the tree of grammar rules to the nodes of an expression, macros expanded.

Source of the macros: the CEL language definition, cel-go's extensions (bindings, lists, two-variable comprehensions,
optionals).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from lark import Token, Tree

from deviceclasses.cel.grammar import double, integer, parse_tree, string, unsigned
from deviceclasses.cel.nodes import (
    Bind,
    Call,
    Choice,
    Entry,
    Index,
    ListItem,
    ListLiteral,
    Literal,
    Logic,
    MapLiteral,
    Name,
    Node,
    OptionalMap,
    Quantifier,
    Select,
    SortBy,
    Transform,
)
from deviceclasses.cel.values import EvaluationError, Value
from driver.errors import CelError

Arguments = tuple[Node, ...]


class MacroError(Exception):
    """Wrong arguments of a macro; ``position`` is that of the first wrong one."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


def expand(position: int, function: str, target: Node | None, arguments: Arguments) -> Node | None:
    """The node of a macro, or None for an ordinary call."""
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


def _map_macro(at: int, over: Node, rest: Arguments) -> Node:
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
    ("map", 2): _map_macro,
    ("map", 3): _map_macro,
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
"""Macros with a target, by name and number of arguments."""

MAX_CHARACTERS = 10 * 1024
"""Kubernetes' limit for a selector, in bytes of UTF-8."""
MAX_DEPTH = 100
"""Maximum nesting of calls and operators. Kubernetes allows 250, which would exceed Python's stack."""
MAX_PARENTHESES = 250
"""Maximum nesting including parentheses."""

RESERVED = frozenset(
    {
        "as", "break", "const", "continue", "else", "for", "function", "if", "import", "in", "let", "loop", "package",
        "namespace", "return", "true", "false", "null", "var", "void", "while",
    }
)  # fmt: skip
OPERATORS = {
    "relation_lt": "_<_", "relation_le": "_<=_", "relation_gt": "_>_", "relation_ge": "_>=_", "relation_eq": "_==_",
    "relation_ne": "_!=_", "relation_in": "@in", "addition_add": "_+_", "addition_sub": "_-_",
    "multiplication_mul": "_*_", "multiplication_div": "_/_", "multiplication_mod": "_%_",
}  # fmt: skip
"""The function of each operator, by the grammar rule of the operator and its left side."""
LITERALS: dict[str, Callable[[str], Value]] = {
    "INT_LIT": integer,
    "UINT_LIT": unsigned,
    "FLOAT_LIT": double,
    "STRING_LIT": string,
    "MLSTRING_LIT": string,
    "BYTES_LIT": string,
    "BOOL_LIT": lambda text: text == "true",
    "NULL_LIT": lambda _: None,
}

Part = Tree[Token]


def parse(expression: str) -> Node:
    """The tree of an expression with macros expanded. Raises CelError with the position of the first error."""
    size = len(expression.encode())
    if size > MAX_CHARACTERS:
        raise CelError(f"the expression has {size} bytes; {MAX_CHARACTERS} are allowed", expression)
    if not expression.strip():
        raise CelError("the expression is empty", expression, 0)
    return _Builder(expression).node(parse_tree(expression))


@dataclass
class _Builder:
    expression: str
    depth: int = 0
    parentheses: int = 0

    def node(self, tree: Part) -> Node:
        """The node of any grammar rule. Rules with a single child are skipped without recursion."""
        before = self.parentheses
        while tree.data not in RULES or tree.data in PASSING:
            parts = [each for each in tree.children if each is not None]
            if len(parts) != 1:
                break
            self.parentheses += tree.data == "paren_expr"
            tree = cast("Part", parts[0])
        self.depth += 1
        if self.depth > MAX_DEPTH or self.depth + self.parentheses > MAX_PARENTHESES:
            raise self.error(tree, f"nested deeper than {MAX_DEPTH} levels, which Tessera does not evaluate")
        try:
            return RULES.get(tree.data, _operation)(self, tree)
        finally:
            self.depth -= 1
            self.parentheses = before

    def error(self, tree: Part | Token, message: str) -> CelError:
        return CelError(message, self.expression, position_of(tree))

    def all(self, tree: object) -> tuple[Node, ...]:
        """The nodes of an argument list; none if the list is missing."""
        return () if tree is None else tuple(self.node(cast("Part", each)) for each in cast("Part", tree).children)

    def call(self, tree: Part, function: str, target: Node | None, arguments: tuple[Node, ...]) -> Node:
        """The node of a call, expanded if it is a macro."""
        position = position_of(tree)
        try:
            expanded = expand(position, function, target, arguments)
        except MacroError as error:
            raise CelError(str(error), self.expression, error.position) from None
        return expanded or Call(position, function, target, arguments)

    def name(self, token: Token) -> str:
        if token in RESERVED:
            raise self.error(token, f"{str(token)!r} is a reserved word and can't be a name")
        return str(token)


def position_of(tree: Part | Token) -> int:
    """The offset of a rule's text."""
    found = tree.start_pos if isinstance(tree, Token) else getattr(tree.meta, "start_pos", 0)
    return found or 0


def _operation(builder: _Builder, tree: Part) -> Node:
    """A binary operator. The operator and its left side are one grammar rule."""
    left, right = cast("Part", tree.children[0]), cast("Part", tree.children[1])
    function = OPERATORS[left.data]
    operands = (builder.node(cast("Part", left.children[0])), builder.node(right))
    return Call(position_of(right), function, None, operands)


def _logic(builder: _Builder, tree: Part) -> Node:
    terms: list[Part] = []
    rest: Part = tree
    while rest.data == tree.data and rest.children[0] is not None:
        terms.append(cast("Part", rest.children[1]))
        rest = cast("Part", rest.children[0])
    if rest.data == tree.data:
        rest = cast("Part", rest.children[1])
    nodes = tuple(builder.node(each) for each in (rest, *reversed(terms)))
    return Logic(nodes[0].position, tree.data == "conditionaland", nodes)


def _choice(builder: _Builder, tree: Part) -> Node:
    condition, yes, no = tree.children
    nodes = [builder.node(cast("Part", each)) for each in (condition, yes, no)]
    return Choice(nodes[0].position, *nodes)


def _nots(builder: _Builder, tree: Part) -> Node:
    signs, member = (cast("Part", each) for each in tree.children)
    count = len(signs.children)
    if signs.data == "minuses":
        return _negated(builder, tree, member, count)
    node = builder.node(member)
    return node if count % 2 == 0 else Call(position_of(tree), "!_", None, (node,))


def _negated(builder: _Builder, tree: Part, member: Part, count: int) -> Node:
    inner: Part | Token = member
    while isinstance(inner, Tree) and inner.data in ("member", "primary", "literal") and len(inner.children) == 1:
        inner = inner.children[0]
    if count == 1 and isinstance(inner, Token) and inner.type in ("INT_LIT", "FLOAT_LIT"):
        return _literal_of(builder, inner, f"-{inner}")
    node = builder.node(member)
    return node if count % 2 == 0 else Call(position_of(tree), "-_", None, (node,))


def _literal(builder: _Builder, tree: Part) -> Node:
    token = cast("Token", tree.children[0])
    return _literal_of(builder, token, str(token))


def _literal_of(builder: _Builder, token: Token, text: str) -> Node:
    try:
        return Literal(position_of(token), LITERALS[token.type](text))
    except EvaluationError as error:
        raise builder.error(token, str(error)) from None


def _ident(builder: _Builder, tree: Part) -> Node:
    return Name(position_of(tree), builder.name(cast("Token", tree.children[0])))


def _ident_call(builder: _Builder, tree: Part) -> Node:
    function, arguments = tree.children
    return builder.call(tree, builder.name(cast("Token", function)), None, builder.all(arguments))


def _select(builder: _Builder, tree: Part) -> Node:
    operand, name = tree.children
    token = cast("Token", name)
    optional = tree.data == "member_optional"
    return Select(position_of(token), builder.node(cast("Part", operand)), token.strip("`"), optional=optional)


def _member_call(builder: _Builder, tree: Part) -> Node:
    target, name, arguments = tree.children
    token = cast("Token", name)
    return builder.call(tree, str(token), builder.node(cast("Part", target)), builder.all(arguments))


def _index(builder: _Builder, tree: Part) -> Node:
    operand, key = (builder.node(cast("Part", each)) for each in tree.children)
    return Index(key.position, operand, key, optional=tree.data == "member_optional_index")


def _flattened(tree: Part, rule: str) -> list[Part]:
    """The members of a left-recursive rule."""
    found: list[Part] = []
    while tree.data == rule and len(tree.children) == 2:
        found.append(cast("Part", tree.children[1]))
        tree = cast("Part", tree.children[0])
    return [cast("Part", tree.children[0]) if tree.data == rule else tree, *reversed(found)]


def _item(builder: _Builder, tree: Part) -> tuple[Node, bool]:
    if tree.data == "optional":
        return builder.node(cast("Part", tree.children[0])), True
    return builder.node(tree), False


def _list(builder: _Builder, tree: Part) -> Node:
    parts = _flattened(cast("Part", tree.children[0]), "items") if tree.children else []
    items = [_item(builder, part) for part in parts]
    return ListLiteral(position_of(tree), tuple(ListItem(node.position, node, opt) for node, opt in items))


def _map(builder: _Builder, tree: Part) -> Node:
    entries = []
    for part in _flattened(cast("Part", tree.children[0]), "entries") if tree.children else []:
        key, optional = _item(builder, cast("Part", part.children[0]))
        entries.append(Entry(key.position, key, builder.node(cast("Part", part.children[1])), optional))
    return MapLiteral(position_of(tree), tuple(entries))


PASSING = frozenset({"expr", "conditionalor", "conditionaland", "unary"})
"""Rules that are skipped if they have a single child."""
RULES: dict[str, Callable[[_Builder, Part], Node]] = {
    "expr": _choice,
    "conditionalor": _logic,
    "conditionaland": _logic,
    "unary": _nots,
    "literal": _literal,
    "ident": _ident,
    "dot_ident": _ident,
    "ident_arg": _ident_call,
    "dot_ident_arg": _ident_call,
    "member_dot": _select,
    "member_optional": _select,
    "member_dot_arg": _member_call,
    "member_index": _index,
    "member_optional_index": _index,
    "list_lit": _list,
    "map_lit": _map,
}
