r"""CEL's grammar: cel-python's, with what it lacks (optionals, trailing commas) and where it differs from Kubernetes.

Kubernetes reads no sign inside a number, no ``1.``, no unknown escape, no word that merely begins with ``true``, and
either ``!`` or ``-`` in front of a value, not both. Messages (``Name{field: value}``) are left out: a device has none.
cel-python's evaluator is not used: it has no checker, and its operators differ from Kubernetes' in too many places.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput, UnexpectedToken

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
"""What the parser calls the signs it waits for, and what a person does."""


@cache
def _parser() -> Lark:
    spec = find_spec("celpy")
    if spec is None or spec.origin is None:
        raise EnvironmentFault("the Python package cel-python is not installed; its grammar is needed")
    # Read without importing the package, which would load its evaluator, calendar and query libraries too.
    theirs = Path(spec.origin).with_name("cel.lark").read_text()
    return Lark(theirs + OURS, parser="lalr", start="expr", propagate_positions=True)


def parse_tree(expression: str) -> Tree[Token]:
    """The tree of grammar rules. Raises CelError that names the place, what stands there and what could."""
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
