r"""CEL's grammar and its literals: from the text of an expression to a tree of grammar rules.

Source: the CEL language definition, tried against Kubernetes' API server. Names, white space and comments
are those of cel-python's grammar; its rules lack optionals and trailing commas, and its literals differ from
Kubernetes' (a sign inside a number, ``1.``, unknown escapes). Messages (``Name{field: value}``) are left out: a device
has none.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput, UnexpectedToken

from deviceclasses.cel.values import INT_MAX, INT_MIN, UINT_MAX, EvaluationError, Uint, Value, whole_number
from driver.errors import CelError, EnvironmentFault

GRAMMAR = r"""
?expr           : disjunction | disjunction "?" disjunction ":" expr -> choice
?disjunction    : conjunction ("||" conjunction)*
?conjunction    : relation ("&&" relation)*
!?relation      : addition | relation ("<" | "<=" | ">" | ">=" | "==" | "!=" | "in") addition -> binary
!?addition      : multiplication | addition ("+" | "-") multiplication -> binary
!?multiplication : unary | multiplication ("*" | "/" | "%") unary -> binary
?unary          : member | nots member -> unary | minuses member -> unary
!nots           : "!"+
!minuses        : "-"+
?member         : primary
                | member "." (IDENT | QUOTED) -> select
                | member "." "?" (IDENT | QUOTED) -> optional_select
                | member "." IDENT "(" arguments ")" -> member_call
                | member "[" expr "]" -> index
                | member "[" "?" expr "]" -> optional_index
?primary        : literal | list | map | "(" expr ")" -> parentheses
                | "."? name -> ident
                | "."? name "(" arguments ")" -> call
arguments       : (expr ("," expr)*)?
name            : IDENT
list            : "[" ","? "]" | "[" item ("," item)* ","? "]"
item            : expr | "?" expr -> optional_item
map             : "{" ","? "}" | "{" entry ("," entry)* ","? "}"
entry           : expr ":" expr | "?" expr ":" expr -> optional_entry
literal         : UINT_LIT | FLOAT_LIT | INT_LIT | MLSTRING_LIT | STRING_LIT | BYTES_LIT | BOOL_LIT | NULL_LIT

%import cel (IDENT, WHITESPACE, COMMENT)
%ignore WHITESPACE
%ignore COMMENT
QUOTED          : /`[a-zA-Z0-9_.\-\/ ]+`/
INT_LIT         : /0x[0-9a-fA-F]+|[0-9]+/
UINT_LIT.2      : /(0x[0-9a-fA-F]+|[0-9]+)[uU]/
FLOAT_LIT.2     : /[0-9]+\.[0-9]+([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+|\.[0-9]+([eE][+-]?[0-9]+)?/
STRING_LIT      : /\"(\\.|[^\\\"\n\r])*\"|'(\\.|[^\\'\n\r])*'|[rR]\"[^\"\n\r]*\"|[rR]'[^'\n\r]*'/
MLSTRING_LIT.2  : /\"{3}(\\[^\n\r]|[^\\])*?\"{3}|'{3}(\\[^\n\r]|[^\\])*?'{3}|[rR]\"{3}(.|\n|\r)*?\"{3}|[rR]'{3}(.|\n|\r)*?'{3}/
BYTES_LIT.3     : /[bB]/ MLSTRING_LIT | /[bB]/ STRING_LIT
BOOL_LIT.2      : /(true|false)(?![_a-zA-Z0-9])/
NULL_LIT.2      : /null(?![_a-zA-Z0-9])/
"""  # noqa: E501 - a terminal is one line

SIGNS = {
    "LPAR": "(", "RPAR": ")", "LSQB": "[", "RSQB": "]", "LBRACE": "{", "RBRACE": "}", "DOT": ".", "COMMA": ",",
    "COLON": ":", "QMARK": "?", "BANG": "!", "MINUS": "-", "PLUS": "+", "STAR": "*", "SLASH": "/", "PERCENT": "%",
    "IDENT": "a name", "$END": "the end",
}  # fmt: skip
"""The parser's names of tokens, and their text in error messages."""


@cache
def _parser() -> Lark:
    spec = find_spec("celpy")
    if spec is None or spec.origin is None:
        raise EnvironmentFault("the Python package cel-python is not installed; its grammar is needed")
    # Its folder, without importing the package, which would load its evaluator, calendar and query libraries too.
    folder = str(Path(spec.origin).parent)
    return Lark(GRAMMAR, parser="lalr", start="expr", propagate_positions=True, import_paths=[folder])


def parse_tree(expression: str) -> Tree[Token]:
    """The tree of grammar rules. Raises CelError with the position, the text there and what would be accepted."""
    try:
        return _parser().parse(expression)
    except UnexpectedInput as error:
        ended = isinstance(error, UnexpectedToken) and error.token.type == "$END"
        position = len(expression) if ended or error.pos_in_stream is None else error.pos_in_stream
        raise CelError(f"syntax error: {_what(expression, position)}{_expected(error)}", expression, position) from None


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
    wanted = sorted(SIGNS[name] for name in error.accepts or error.expected if name in SIGNS)
    return f"; possible: {' '.join(wanted)}" if wanted else ""


SINGLE = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "\\": "\\", "'": "'", '"': '"', "`": "`", "?": "?",
}  # fmt: skip
ESCAPE = re.compile(r"\\(?:[xX]([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-3][0-7]{2})|(.?))", re.DOTALL)


def integer(text: str) -> int:
    """An int literal, its sign included; raises EvaluationError beyond 64 bits."""
    value = int(text, 16) if "0x" in text else whole_number(text)
    if not INT_MIN <= value <= INT_MAX:
        raise EvaluationError(f"{text} does not fit into an int; from {INT_MIN} to {INT_MAX} does")
    return value


def unsigned(text: str) -> Uint:
    """A uint literal with its suffix; raises EvaluationError beyond 64 bits."""
    digits = text[:-1]
    value = int(digits, 16) if "0x" in digits else whole_number(digits)
    if value > UINT_MAX:
        raise EvaluationError(f"{text} does not fit into a uint; up to {UINT_MAX} does")
    return Uint(value)


def double(text: str) -> float:
    """A double literal; raises EvaluationError where it is too large for one."""
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise EvaluationError(f"{text} is too large for a double")
    return value


def string(text: str) -> Value:
    """A string or bytes literal with its quotes; raises EvaluationError for an unknown escape."""
    binary = text[0] in "bB"
    body = text[1:] if binary else text
    raw = body[0] in "rR"
    body = body[1:] if raw else body
    width = 3 if body[:3] in ('"""', "'''") and len(body) >= 6 else 1
    body = body[width:-width].replace("\r\n", "\n").replace("\r", "\n")
    if binary:
        return body.encode() if raw else b"".join(_pieces(body))
    return body if raw else ESCAPE.sub(lambda match: chr(_code_point(match)), body)


def _pieces(body: str) -> list[bytes]:
    pieces, end = [], 0
    for match in ESCAPE.finditer(body):
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
