"""The parser: from the tree of grammar rules to the nodes of an expression, macros expanded.

Source of the macros: the CEL language definition, cel-go's extensions (bindings, lists, two-variable comprehensions,
optionals).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lark import Token, Tree

from deviceclasses.cel.grammar import double, integer, parse_tree, string, unsigned
from deviceclasses.cel.nodes import Call, Entry, ListLiteral, Literal, Logic, Macro, MapLiteral, Name, Node, Select
from deviceclasses.cel.values import EvaluationError, Value
from driver.errors import CelError

MACROS: dict[tuple[str, int], tuple[str, int]] = {
    ("all", 2): ("all", 1),
    ("exists", 2): ("exists", 1),
    ("exists_one", 2): ("exists_one", 1),
    ("all", 3): ("all", 2),
    ("exists", 3): ("exists", 2),
    ("exists_one", 3): ("exists_one", 2),
    ("existsOne", 3): ("exists_one", 2),
    ("map", 2): ("list", 1),
    ("map", 3): ("list", 1),
    ("filter", 2): ("list", 1),
    ("transformList", 3): ("list", 2),
    ("transformList", 4): ("list", 2),
    ("transformMap", 3): ("map", 2),
    ("transformMap", 4): ("map", 2),
    ("transformMapEntry", 3): ("entry", 2),
    ("transformMapEntry", 4): ("entry", 2),
    ("sortBy", 2): ("sortBy", 1),
    ("optMap", 2): ("optMap", 1),
    ("optFlatMap", 2): ("optFlatMap", 1),
}
"""Macros with a target, by name and number of arguments: their kind, and how many arguments are variables.

After the variables come a condition, if any, and the body.
"""

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
PARTS = frozenset({"name", "arguments", "item", "optional_item", "entry", "optional_entry", "nots", "minuses"})
"""Grammar rules that are parts of a node, not nodes."""

Arguments = tuple[Node, ...]


def parse(expression: str) -> Node:
    """The tree of an expression with macros expanded. Raises CelError with the position of the first error."""
    size = len(expression.encode())
    if size > MAX_CHARACTERS:
        raise CelError(f"the expression has {size} bytes; {MAX_CHARACTERS} are allowed", expression)
    if not expression.strip():
        raise CelError("the expression is empty", expression, 0)
    node: Node = _Builder(expression).build(parse_tree(expression))
    return node


def _position(tree: Any) -> int:
    """The offset of the text of a rule or token."""
    return (tree.start_pos if isinstance(tree, Token) else getattr(tree.meta, "start_pos", 0)) or 0


@dataclass
class _Builder:
    """Builds the node of each grammar rule by the method of that name, from the tree and what its children gave."""

    expression: str
    depth: int = 0
    parentheses: int = 0

    def build(self, tree: Tree[Token]) -> Any:
        outside = self.depth, self.parentheses
        while tree.data == "parentheses":
            self.parentheses += 1
            [tree] = tree.children  # type: ignore[assignment]
        self.depth += tree.data not in PARTS
        if self.depth > MAX_DEPTH or self.depth + self.parentheses > MAX_PARENTHESES:
            raise self.error(tree, f"nested deeper than {MAX_DEPTH} levels, which Tessera does not evaluate")
        parts = (self.build(each) if isinstance(each, Tree) else each for each in tree.children)
        built = self._negative_number(tree) or getattr(self, tree.data)(tree, *parts)
        self.depth, self.parentheses = outside
        return built

    def error(self, tree: Tree[Token] | Token, message: str) -> CelError:
        return CelError(message, self.expression, _position(tree))

    def choice(self, _: Tree[Token], condition: Node, yes: Node, no: Node) -> Node:
        return Call(condition.position, "_?_:_", None, (condition, yes, no))

    def disjunction(self, tree: Tree[Token], *terms: Node) -> Node:
        return Logic(terms[0].position, tree.data == "conjunction", terms)

    conjunction = disjunction

    def binary(self, tree: Tree[Token], left: Node, operator: Token, right: Node) -> Node:
        function = "@in" if operator == "in" else f"_{operator}_"
        return Call(_position(tree.children[2]), function, None, (left, right))

    def unary(self, tree: Tree[Token], signs: tuple[Token, ...], operand: Node) -> Node:
        return Call(_position(tree), f"{signs[0]}_", None, (operand,)) if len(signs) % 2 else operand

    def nots(self, _: Tree[Token], *signs: Token) -> tuple[Token, ...]:
        return signs

    minuses = nots

    def _negative_number(self, tree: Tree[Token]) -> Node | None:
        """The literal of a number after one sign, since the smallest int does not fit without its sign."""
        if tree.data != "unary":
            return None
        signs, operand = tree.children
        if signs.children != ["-"] or operand.data != "literal":  # type: ignore[union-attr]
            return None
        [token] = operand.children  # type: ignore[union-attr]
        return self.literal(tree, token, "-") if token.type in ("INT_LIT", "FLOAT_LIT") else None  # type: ignore[union-attr, arg-type]

    def literal(self, _: Tree[Token], token: Token, sign: str = "") -> Node:
        try:
            return Literal(_position(token), LITERALS[token.type](f"{sign}{token}"))
        except EvaluationError as error:
            raise self.error(token, str(error)) from None

    def name(self, _: Tree[Token], token: Token) -> str:
        if token in RESERVED:
            raise self.error(token, f"{str(token)!r} is a reserved word and can't be a name")
        return str(token)

    def ident(self, tree: Tree[Token], name: str) -> Node:
        return Name(_position(tree), name)

    def select(self, tree: Tree[Token], operand: Node, name: Token) -> Node:
        return Select(_position(name), operand, name.strip("`"), optional=tree.data == "optional_select")

    optional_select = select

    def index(self, tree: Tree[Token], operand: Node, key: Node) -> Node:
        return Call(key.position, "_[_]" if tree.data == "index" else "_[?_]", None, (operand, key))

    optional_index = index

    def arguments(self, _: Tree[Token], *arguments: Node) -> Arguments:
        return arguments

    def call(self, tree: Tree[Token], function: str, arguments: Arguments) -> Node:
        if function == "has" and len(arguments) == 1:
            return self._has(tree, arguments[0])
        return Call(_position(tree), function, None, arguments)

    def member_call(self, tree: Tree[Token], target: Node, function: Token, arguments: Arguments) -> Node:
        macro = self._macro(_position(tree), target, str(function), arguments)
        return macro or Call(_position(tree), str(function), target, arguments)

    def item(self, tree: Tree[Token], value: Node) -> Entry:
        return Entry(value.position, None, value, tree.data == "optional_item")

    optional_item = item

    def list(self, tree: Tree[Token], *items: Entry) -> Node:
        return ListLiteral(_position(tree), items)

    def entry(self, tree: Tree[Token], key: Node, value: Node) -> Entry:
        return Entry(key.position, key, value, tree.data == "optional_entry")

    optional_entry = entry

    def map(self, tree: Tree[Token], *entries: Entry) -> Node:
        return MapLiteral(_position(tree), entries)

    def _has(self, tree: Tree[Token], tested: Node) -> Node:
        if not isinstance(tested, Select) or tested.optional or tested.test:
            message = 'has() takes a field after a dot, such as device.attributes["domain"].name'
            raise CelError(message, self.expression, tested.position)
        return Select(_position(tree), tested.operand, tested.field, test=True)

    def _macro(self, position: int, target: Node, function: str, arguments: Arguments) -> Node | None:
        """The node of a macro, or None for an ordinary call."""
        if isinstance(target, Name) and target.name == "cel" and function == "bind" and len(arguments) == 3:
            variable, value, body = arguments
            return Macro(position, "bind", value, (self._variable("cel.bind", variable),), None, body)
        if (function, len(arguments)) not in MACROS:
            return None
        kind, count = MACROS[function, len(arguments)]
        variables = tuple(self._variable(function, each) for each in arguments[:count])
        if len(set(variables)) < count:
            message = f"both variables of {function} are named {variables[0]}"
            raise CelError(message, self.expression, arguments[1].position)
        *condition, body = (arguments[1], arguments[0]) if function == "filter" else arguments[count:]
        return Macro(position, kind, target, variables, condition[0] if condition else None, body)

    def _variable(self, macro: str, node: Node) -> str:
        if not isinstance(node, Name):
            message = f"the variable of {macro} must be a simple name"
        elif node.name == "__result__":
            message = "__result__ can't be a variable"
        else:
            return node.name
        raise CelError(message, self.expression, node.position)
