"""Hints at the end of messages about wrong expressions: what exists, and what would be accepted instead."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from deviceclasses.cel.nodes import COMPARISONS, FLIPPED, Call, Literal, Node
from deviceclasses.cel.types import QUANTITY, SEMVER, Type

UNSUPPORTED_FUNCTIONS = {
    "format": "string.format is not evaluated by Tessera; join strings with + instead",
    "url": "url() is not evaluated by Tessera; use string functions instead",
    "isURL": "isURL() is not evaluated by Tessera; use string functions instead",
    "format.named": "named formats are not evaluated by Tessera; use matches() instead",
    "authorizer": "a selector has no authorizer",
}
"""The reasons why Tessera refuses names that Kubernetes accepts; "format.named" is for all names after "format."."""
BY_FUNCTION = {QUANTITY: ("quantities", "quantity", "100Gi"), SEMVER: ("versions", "semver", "550.0.0")}
"""Types that no operator compares: plural name, conversion function, and an example of its argument."""


def unsupported(name: str) -> str | None:
    """The reason why Tessera refuses a name that Kubernetes accepts; None for a name that Kubernetes refuses too."""
    first, _, rest = name.partition(".")
    return UNSUPPORTED_FUNCTIONS.get("format.named" if first == "format" and rest else name)


def nearest(name: str, known: Sequence[str]) -> str:
    """The end of a sentence: the most similar name, or else all names if they are few."""
    words = [each for each in known if each[0].isalpha()]
    close = get_close_matches(name, words, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(sorted(words))}" if len(words) <= 8 else ""


def advice(name: str, node: Node, types: Sequence[Type]) -> str:
    """A hint for operators on quantities and versions, which only functions compare; empty for all other calls."""
    kind = next((each for each in types if each in BY_FUNCTION), None)
    if name not in COMPARISONS or kind is None or not isinstance(node, Call):
        return ""
    many, function, example = BY_FUNCTION[kind]
    given = [_literal_text(each) for each in node.operands]
    operator = COMPARISONS[name]
    if given[0] is not None:
        operator = FLIPPED.get(operator, operator)
    written = next((each for each in given if each is not None), example)
    return f'; {many} are compared with .compareTo({function}("{written}")) {operator} 0'


def _literal_text(node: Node) -> str | None:
    """The text of a literal, or of the literal that is the only argument of a call."""
    if isinstance(node, Call) and len(node.operands) == 1:
        return _literal_text(node.operands[0])
    return str(node.value) if isinstance(node, Literal) else None
