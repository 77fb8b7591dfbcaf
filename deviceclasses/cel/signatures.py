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


def nearest(name: str, known: Sequence[str]) -> str:
    """What may have been meant, or else all there is, as the end of a sentence."""
    words = [each for each in known if each[0].isalpha()]
    close = get_close_matches(name, words, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(sorted(words))}" if len(words) <= 8 else ""
