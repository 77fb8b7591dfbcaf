"""Names and signatures that the checker knows besides the functions, and how it speaks of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from deviceclasses.cel import nodes
from deviceclasses.cel.library.registry import Overload
from deviceclasses.cel.nodes import Node
from deviceclasses.cel.types import (
    BOOL,
    BYTES,
    CIDR,
    COMPARABLE,
    DEVICE,
    DOUBLE,
    DURATION,
    DYN,
    INT,
    IP,
    NULL,
    QUANTITY,
    SEMVER,
    STRING,
    TIMESTAMP,
    UINT,
    Type,
    list_of,
    map_of,
    optional_of,
    param,
    type_of_type,
    unwrapped,
)  # fmt: skip

A, B = param("A"), param("B")
VARIABLES = {"device": DEVICE}
TYPES = {
    each.name: each
    for each in (
        BOOL, BYTES, DOUBLE, INT, NULL, STRING, UINT, DURATION, TIMESTAMP, IP, CIDR,
        list_of(DYN), map_of(DYN, DYN), optional_of(DYN), type_of_type(DYN),
    )
}  # fmt: skip
"""Types that have a name in expressions, as in ``type(x) == int``."""
LITERAL_TYPES = {each.name: each for each in (BOOL, BYTES, DOUBLE, INT, NULL, STRING, UINT)}


def _signature(*takes: Type, gives: Type) -> Overload:
    return Overload(takes, gives, member=False, body=lambda *_: None)


EQUALITY = (_signature(A, A, gives=BOOL),)
CHOICE = (_signature(BOOL, A, A, gives=A),)
INDEX = (
    _signature(list_of(A), INT, gives=A),
    _signature(map_of(A, B), A, gives=B),
    _signature(optional_of(list_of(A)), INT, gives=optional_of(A)),
    _signature(optional_of(map_of(A, B)), A, gives=optional_of(B)),
)
OPTIONAL_INDEX = tuple(_signature(*each.takes, gives=optional_of(unwrapped(each.gives))) for each in INDEX)
SORT_KEYS = tuple(_signature(list_of(each), gives=BOOL) for each in COMPARABLE)
STRUCTURAL = {"_==_": EQUALITY, "_!=_": EQUALITY}

COMPARISONS = {"_==_": "==", "_!=_": "!=", "_<_": "<", "_<=_": "<=", "_>_": ">", "_>=_": ">="}
FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
BY_FUNCTION = {QUANTITY: ("quantities", "quantity", "100Gi"), SEMVER: ("versions", "semver", "550.0.0")}
"""Types that no operator compares: what they are called, what makes one of a string, and an example of that."""


def dotted(node: Node) -> str | None:
    """``a.b.c`` as it is written, where a node is nothing but names."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Select) and not node.optional and not node.test:
        prefix = dotted(node.operand)
        return None if prefix is None else f"{prefix}.{node.field}"
    return None


def parameters(one: Type) -> Iterator[str]:
    if one.name == "var":
        yield one.key
    for each in one.params:
        yield from parameters(each)


def accepted(declared: Sequence[Overload]) -> str:
    ways = sorted({f"({', '.join(map(str, each.takes))})" for each in declared})
    return f"; it takes {' or '.join(ways)}" if ways else "; it is not called this way"


def advice(name: str, node: Node, types: Sequence[Type]) -> str:
    """What everybody tries first, and how it is written; empty where ``name`` is something else."""
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
    """The literal that a node is, or that a function makes its value of."""
    if isinstance(node, nodes.Call) and len(node.operands) == 1:
        return _literal(node.operands[0])
    return str(node.value) if isinstance(node, nodes.Literal) else None


def nearest(name: str, known: Sequence[str]) -> str:
    """What may have been meant, or else all there is, as the end of a sentence."""
    words = [each for each in known if each[0].isalpha()]
    close = get_close_matches(name, words, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(sorted(words))}" if len(words) <= 8 else ""
