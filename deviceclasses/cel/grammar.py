r"""CEL's grammar and its literals: from the text of an expression to a tree of grammar rules.

The grammar is cel-python's, with what it lacks (optionals, trailing commas) and where it differs from Kubernetes:
no sign inside a number, no ``1.``, no unknown escape, no word that merely begins with ``true``, and either ``!`` or
``-`` in front of a value, not both. Messages (``Name{field: value}``) are left out: a device has none.
cel-python's evaluator is not used: it has no checker, and its operators differ from Kubernetes' in too many places.
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

OURS = r"""
%override unary          : member | nots member | minuses member
!nots          : "!"+
!minuses       : "-"+

%override member_dot     : member "." IDENT | member "." QUOTED
%override member         : member_dot | member_dot_arg | member_optional | member_index | member_optional_index | primary
member_optional : member "." "?" IDENT | member "." "?" QUOTED
member_optional_index : member "[" "?" expr "]"

%override list_lit       : "[" ","? "]" | "[" items ","? "]"
items          : item | items "," item
?item          : expr | optional
optional       : "?" expr
%override map_lit        : "{" ","? "}" | "{" entries ","? "}"
entries        : entry | entries "," entry
entry          : item ":" expr

QUOTED         : /`[a-zA-Z0-9_.\-\/ ]+`/
%override INT_LIT        : /0x[0-9a-fA-F]+|[0-9]+/
%override UINT_LIT.2     : /(0x[0-9a-fA-F]+|[0-9]+)[uU]/
%override FLOAT_LIT.2    : /[0-9]+\.[0-9]+([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+|\.[0-9]+([eE][+-]?[0-9]+)?/
%override STRING_LIT     : /\"(\\.|[^\\\"\n\r])*\"|'(\\.|[^\\'\n\r])*'|[rR]\"[^\"\n\r]*\"|[rR]'[^'\n\r]*'/
%override MLSTRING_LIT.2 : /\"{3}(\\[^\n\r]|[^\\])*?\"{3}|'{3}(\\[^\n\r]|[^\\])*?'{3}|[rR]\"{3}(.|\n|\r)*?\"{3}|[rR]'{3}(.|\n|\r)*?'{3}/
%override BYTES_LIT.3    : /[bB]/ MLSTRING_LIT | /[bB]/ STRING_LIT
%override BOOL_LIT.2     : /(true|false)(?![_a-zA-Z0-9])/
%override NULL_LIT.2     : /null(?![_a-zA-Z0-9])/
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
    # Read without importing the package, which would load its evaluator, calendar and query libraries too.
    theirs = Path(spec.origin).with_name("cel.lark").read_text()
    return Lark(theirs + OURS, parser="lalr", start="expr", propagate_positions=True)


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
        pieces += [body[end : match.start()].encode(), _one_byte(match)]
        end = match.end()
    return [*pieces, body[end:].encode()]


def _one_byte(match: re.Match[str]) -> bytes:
    return bytes([_code_point(match)])


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
