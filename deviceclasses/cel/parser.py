r"""The parser: from the text of an expression to its nodes, macros expanded.

Source: the CEL language definition and cel-go's extensions (bindings, lists, two-variable comprehensions, optionals),
tried against Kubernetes' API server. The grammar is in ``kubernetes_cel.lark``. Names, white space and comments are
those of cel-python's grammar; its rules lack optionals and trailing commas, and its literals differ from Kubernetes' (a
sign inside a number, ``1.``, unknown escapes). Messages (``Name{field: value}``) are left out: a device has none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput, UnexpectedToken

from deviceclasses.cel.nodes import Call, Entry, Expr, ListLiteral, Literal, Logic, Macro, MapLiteral, Name, Select
from deviceclasses.cel.values import INT_MAX, INT_MIN, UINT_MAX, EvaluationError, Uint, Value, whole_number
from driver.errors import CelError, EnvironmentFault

SIGNS = {
    "LPAR": "(", "RPAR": ")", "LSQB": "[", "RSQB": "]", "LBRACE": "{", "RBRACE": "}", "DOT": ".", "COMMA": ",",
    "COLON": ":", "QMARK": "?", "BANG": "!", "MINUS": "-", "PLUS": "+", "STAR": "*", "SLASH": "/", "PERCENT": "%",
    "IDENT": "a name", "$END": "the end",
}  # fmt: skip
"""The parser's names of tokens, and their text in error messages."""

MACROS: dict[tuple[str, int], tuple[str, int]] = {
    ("all", 2): ("all", 1), ("exists", 2): ("exists", 1), ("exists_one", 2): ("exists_one", 1),
    ("all", 3): ("all", 2), ("exists", 3): ("exists", 2), ("exists_one", 3): ("exists_one", 2),
    ("existsOne", 3): ("exists_one", 2),
    ("map", 2): ("list", 1), ("map", 3): ("list", 1), ("filter", 2): ("list", 1),
    ("transformList", 3): ("list", 2), ("transformList", 4): ("list", 2),
    ("transformMap", 3): ("map", 2), ("transformMap", 4): ("map", 2),
    ("transformMapEntry", 3): ("entry", 2), ("transformMapEntry", 4): ("entry", 2),
    ("sortBy", 2): ("sortBy", 1), ("optMap", 2): ("optMap", 1), ("optFlatMap", 2): ("optFlatMap", 1),
}  # fmt: skip
"""Macros with a target, by name and number of arguments: their kind, and how many arguments are variables.

After the variables come a condition, if any, and the body.
"""

MAX_CHARACTERS = 10 * 1024
"""Kubernetes' limit for a selector, in bytes of UTF-8."""
MAX_NESTING = 100
"""Maximum nesting of calls and operators. Kubernetes allows 250, which would exceed Python's stack."""
MAX_PARENTHESES = 250

RESERVED_WORDS = frozenset(
    {
        "as", "break", "const", "continue", "else", "for", "function", "if", "import", "in", "let", "loop", "package",
        "namespace", "return", "true", "false", "null", "var", "void", "while",
    }
)  # fmt: skip


def parse(expression: str) -> Expr:
    """The nodes of an expression, macros expanded. Raises CelError with the position of the first error."""
    node: Expr = _Builder(expression).build(_tree(expression))
    return node


def conditions_of(expression: str) -> list[str]:
    """The texts of the terms that ``&&`` joins at the top level of an expression. Raises CelError."""
    tree = _tree(expression)
    terms = tree.children if tree.data == "conjunction" else [tree]
    return [expression[term.meta.start_pos : term.meta.end_pos] for term in terms if isinstance(term, Tree)]


def _tree(expression: str) -> Tree[Token]:
    size = len(expression.encode())
    if size > MAX_CHARACTERS:
        raise CelError(f"the expression has {size} bytes; {MAX_CHARACTERS} are allowed", expression)
    if not expression.strip():
        raise CelError("the expression is empty", expression, 0)
    try:
        return _parser().parse(expression)
    except UnexpectedInput as error:
        ended = isinstance(error, UnexpectedToken) and error.token.type == "$END"
        position = len(expression) if ended or error.pos_in_stream is None else error.pos_in_stream
        raise CelError(f"syntax error: {_what(expression, position)}{_expected(error)}", expression, position) from None


@cache
def _parser() -> Lark:
    spec = find_spec("celpy")
    if spec is None or spec.origin is None:
        raise EnvironmentFault("the Python package cel-python is not installed; its grammar is needed")
    # Its folder, without importing the package, which would load its evaluator, calendar and query libraries too.
    folder = str(Path(spec.origin).parent)
    grammar = files(__package__).joinpath("kubernetes_cel.lark").read_text("utf-8")
    return Lark(grammar, parser="lalr", start="expr", propagate_positions=True, import_paths=[folder])


def _what(expression: str, position: int) -> str:
    rest = expression[position:]
    if not rest:
        return "the expression ends too early"
    if rest[0] in "\"'":
        return f"{rest[:20]!r} is not a complete string (an unknown escape, or the closing quote is missing)"
    return f"{rest[0]!r} can't stand here"


def _expected(error: UnexpectedInput) -> str:
    if not isinstance(error, UnexpectedToken):
        return ""
    accepted = sorted(SIGNS[name] for name in error.accepts or error.expected if name in SIGNS)
    return f"; possible: {' '.join(accepted)}" if accepted else ""


SINGLE = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "\\": "\\", "'": "'", '"': '"', "`": "`", "?": "?",
}  # fmt: skip
ESCAPE_SEQUENCE = re.compile(
    r"\\(?:[xX]([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-3][0-7]{2})|(.?))", re.DOTALL
)


def _integer(text: str) -> int:
    """An int literal, its sign included; raises EvaluationError beyond 64 bits."""
    value = int(text, 16) if "0x" in text else whole_number(text)
    if not INT_MIN <= value <= INT_MAX:
        raise EvaluationError(f"{text} does not fit into an int; from {INT_MIN} to {INT_MAX} does")
    return value


def _unsigned(text: str) -> Uint:
    """A uint literal with its suffix; raises EvaluationError beyond 64 bits."""
    digits = text[:-1]
    value = int(digits, 16) if "0x" in digits else whole_number(digits)
    if value > UINT_MAX:
        raise EvaluationError(f"{text} does not fit into a uint; up to {UINT_MAX} does")
    return Uint(value)


def _double(text: str) -> float:
    """A double literal; raises EvaluationError where it is too large for one."""
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise EvaluationError(f"{text} is too large for a double")
    return value


def _string(text: str) -> Value:
    """A string or bytes literal with its quotes; raises EvaluationError for an unknown escape."""
    binary = text[0] in "bB"
    body = text[1:] if binary else text
    raw = body[0] in "rR"
    body = body[1:] if raw else body
    width = 3 if body[:3] in ('"""', "'''") and len(body) >= 6 else 1
    body = body[width:-width].replace("\r\n", "\n").replace("\r", "\n")
    if binary:
        return body.encode() if raw else b"".join(_pieces(body))
    return body if raw else ESCAPE_SEQUENCE.sub(lambda match: chr(_code_point(match)), body)


def _pieces(body: str) -> list[bytes]:
    pieces, end = [], 0
    for match in ESCAPE_SEQUENCE.finditer(body):
        if match[2] or match[3]:
            raise EvaluationError(f"bytes know no escape {match[0]}; \\x and two digits are possible")
        pieces += [body[end : match.start()].encode(), bytes([_code_point(match)])]
        end = match.end()
    return [*pieces, body[end:].encode()]


def _code_point(match: re.Match[str]) -> int:
    two, four, eight, octal, single = match.groups()
    if octal:
        return int(octal, 8)
    if single is not None:
        if single not in SINGLE:
            raise EvaluationError(f"unknown escape {match[0]!r}; write a backslash as two")
        return ord(SINGLE[single])
    code = int(two or four or eight, 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise EvaluationError(f"{match[0]} is no Unicode character")
    return code


LITERALS: dict[str, Callable[[str], Value]] = {
    "INT_LIT": _integer,
    "UINT_LIT": _unsigned,
    "FLOAT_LIT": _double,
    "STRING_LIT": _string,
    "MLSTRING_LIT": _string,
    "BYTES_LIT": _string,
    "BOOL_LIT": lambda text: text == "true",
    "NULL_LIT": lambda _: None,
}
PARTS = frozenset({"name", "item", "optional_item", "entry", "optional_entry"})
"""Grammar rules that are parts of a node, not nodes."""


def _position(tree: Any) -> int:
    """The offset of the text of a rule or token."""
    return (tree.start_pos if isinstance(tree, Token) else getattr(tree.meta, "start_pos", 0)) or 0


@dataclass
class _Builder:
    """Builds the node of each grammar rule by the method of that name, from the tree and what its children gave.

    A rule ``optional_X`` has the method of ``X``.
    """

    expression: str
    depth: int = 0
    parentheses: int = 0

    def build(self, tree: Tree[Token]) -> Any:
        outside = self.depth, self.parentheses
        while tree.data == "parentheses":
            self.parentheses += 1
            [tree] = tree.children  # type: ignore[assignment]
        self.depth += tree.data not in PARTS
        if self.depth > MAX_NESTING or self.depth + self.parentheses > MAX_PARENTHESES:
            raise self.error(
                _position(tree), f"nested deeper than {MAX_NESTING} levels, which Tessera does not evaluate"
            )
        parts = (self.build(child) if isinstance(child, Tree) else child for child in tree.children)
        built = self._negative_number(tree) or getattr(self, tree.data.removeprefix("optional_"))(tree, *parts)
        self.depth, self.parentheses = outside
        return built

    def error(self, position: int, message: str) -> CelError:
        return CelError(message, self.expression, position)

    def choice(self, _: Tree[Token], condition: Expr, yes: Expr, no: Expr) -> Expr:
        return Call(condition.position, "_?_:_", None, (condition, yes, no))

    def disjunction(self, tree: Tree[Token], *terms: Expr) -> Expr:
        return Logic(terms[0].position, tree.data == "conjunction", terms)

    conjunction = disjunction

    def binary(self, tree: Tree[Token], left: Expr, operator: Token, right: Expr) -> Expr:
        function = "@in" if operator == "in" else f"_{operator}_"
        return Call(_position(tree.children[2]), function, None, (left, right))

    def unary(self, tree: Tree[Token], sign: Token, *rest: Any) -> Expr:
        *more, operand = rest
        return operand if len(more) % 2 else Call(_position(tree), f"{sign}_", None, (operand,))

    def _negative_number(self, tree: Tree[Token]) -> Expr | None:
        """The literal of a number after one sign, since the smallest int does not fit without its sign."""
        match tree.children:
            case ["-", Tree(data="literal", children=[Token(type="INT_LIT" | "FLOAT_LIT") as number])]:
                return self.literal(tree, number, "-")
        return None

    def literal(self, _: Tree[Token], token: Token, sign: str = "") -> Expr:
        try:
            return Literal(_position(token), LITERALS[token.type](f"{sign}{token}"))
        except EvaluationError as error:
            raise self.error(_position(token), str(error)) from None

    def name(self, _: Tree[Token], token: Token) -> str:
        if token in RESERVED_WORDS:
            raise self.error(_position(token), f"{str(token)!r} is a reserved word and can't be a name")
        return str(token)

    def ident(self, tree: Tree[Token], name: str) -> Expr:
        return Name(_position(tree), name)

    def select(self, tree: Tree[Token], operand: Expr, name: Token) -> Expr:
        return Select(_position(name), operand, name.strip("`"), optional=tree.data == "optional_select")

    def index(self, tree: Tree[Token], operand: Expr, key: Expr) -> Expr:
        return Call(key.position, "_[_]" if tree.data == "index" else "_[?_]", None, (operand, key))

    def call(self, tree: Tree[Token], function: str, *arguments: Expr) -> Expr:
        if function != "has" or len(arguments) != 1:
            return Call(_position(tree), function, None, arguments)
        [tested] = arguments
        if not isinstance(tested, Select) or tested.optional or tested.test:
            message = 'has() takes a field after a dot, such as device.attributes["domain"].name'
            raise self.error(tested.position, message)
        return Select(_position(tree), tested.operand, tested.field, test=True)

    def member_call(self, tree: Tree[Token], target: Expr, function: Token, *arguments: Expr) -> Expr:
        macro = self._macro(_position(tree), target, str(function), arguments)
        return macro or Call(_position(tree), str(function), target, arguments)

    def item(self, tree: Tree[Token], value: Expr) -> Entry:
        return Entry(value.position, None, value, tree.data == "optional_item")

    def list(self, tree: Tree[Token], *items: Entry) -> Expr:
        return ListLiteral(_position(tree), items)

    def entry(self, tree: Tree[Token], key: Expr, value: Expr) -> Entry:
        return Entry(key.position, key, value, tree.data == "optional_entry")

    def map(self, tree: Tree[Token], *entries: Entry) -> Expr:
        return MapLiteral(_position(tree), entries)

    def _macro(self, position: int, target: Expr, function: str, arguments: Sequence[Expr]) -> Expr | None:
        """The node of a macro, or None for an ordinary call."""
        if isinstance(target, Name) and target.name == "cel" and function == "bind" and len(arguments) == 3:
            variable, value, body = arguments
            return Macro(position, "bind", value, (self._variable("cel.bind", variable),), None, body)
        if (function, len(arguments)) not in MACROS:
            return None
        kind, count = MACROS[function, len(arguments)]
        variables = tuple(self._variable(function, argument) for argument in arguments[:count])
        if len(set(variables)) < count:
            raise self.error(arguments[1].position, f"both variables of {function} are named {variables[0]}")
        *condition, body = (arguments[1], arguments[0]) if function == "filter" else arguments[count:]
        return Macro(position, kind, target, variables, condition[0] if condition else None, body)

    def _variable(self, macro: str, node: Expr) -> str:
        if not isinstance(node, Name):
            raise self.error(node.position, f"the variable of {macro} must be a simple name")
        if node.name == "__result__":
            raise self.error(node.position, "__result__ can't be a variable")
        return node.name
