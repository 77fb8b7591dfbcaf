"""Functions on strings. Regular expressions are RE2's, as Go's are; lengths and positions count code points."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import re2

from deviceclasses.cel.library.registry import function, method
from deviceclasses.cel.types import BOOL, INT, STRING, list_of
from deviceclasses.cel.values import CHARACTERS_PER_UNIT, EvaluationError, Value, spend, type_name

STRINGS = list_of(STRING)
GO_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}
UPPER = {lower: upper for upper, lower in LOWER.items()}


@lru_cache(maxsize=256)
def regex(pattern: str) -> Any:
    """A compiled pattern. Raises EvaluationError if RE2 refuses it."""
    try:
        options = re2.Options()
        options.log_errors = False
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        raise EvaluationError(f"illegal regular expression {pattern!r}: {reason}") from None


def _search(text: str, pattern: str) -> Any:
    spend(len(text) * len(pattern) // CHARACTERS_PER_UNIT**2)
    return regex(pattern).search(text)


def _matches(text: str, pattern: str) -> bool:
    return _search(text, pattern) is not None


def _find(text: str, pattern: str) -> str:
    match = _search(text, pattern)
    return match.group(0) if match else ""


def _find_all(text: str, pattern: str, count: int = -1) -> tuple[str, ...]:
    """All matches except, as in Go, an empty match directly after another match."""
    found: list[str] = []
    end = -1
    for match in regex(pattern).finditer(text):
        if 0 <= count <= len(found):
            break
        # Each search may scan the rest of the text.
        spend(len(text) * len(pattern) // CHARACTERS_PER_UNIT**2)
        if not (match.start() == match.end() == end):
            found.append(match.group(0))
        end = match.end()
    return tuple(found)


def _char_at(text: str, index: int) -> str:
    if not 0 <= index <= len(text):
        raise EvaluationError(f"index out of range: {index}")
    return text[index : index + 1]


def _index_of(text: str, wanted: str, start: int = 0) -> int:
    if start < 0:
        raise EvaluationError(f"index out of range: {start}")
    if not wanted:
        return min(start, len(text))
    return text.find(wanted, start)


def _last_index_of(text: str, wanted: str, start: int | None = None) -> int:
    if start is None:
        return text.rfind(wanted)
    if start < 0:
        raise EvaluationError(f"index out of range: {start}")
    if not wanted:
        return min(start, len(text))
    if start >= len(text):
        return -1
    return text.rfind(wanted, 0, start + len(wanted))


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    spend((text.count(old) if count < 0 else min(count, len(text) + 1)) * len(new) // CHARACTERS_PER_UNIT)
    return text.replace(old, new, count)


def _split(text: str, separator: str, count: int = -1) -> tuple[str, ...]:
    if count == 0:
        return ()
    if separator:
        return tuple(text.split(separator, count - 1 if count > 0 else -1))
    if count < 0 or count >= len(text):
        return tuple(text)
    return (*text[: count - 1], text[count - 1 :])


def _substring(text: str, start: int, end: int | None = None) -> str:
    stop = len(text) if end is None else end
    if start > stop and end is not None:
        raise EvaluationError(f"invalid substring range. start: {start}, end: {end}")
    if not 0 <= start <= len(text) or not 0 <= stop <= len(text):
        raise EvaluationError(f"index out of range: {start} or {stop}")
    return text[start:stop]


def _join(parts: tuple[Value, ...], separator: str = "") -> str:
    for part in parts:
        if type(part) is not str:
            raise EvaluationError(f"join: invalid input: {type_name(part)}")
    spend((sum(map(len, parts)) + len(parts) * len(separator)) // CHARACTERS_PER_UNIT)
    return separator.join(parts)


QUOTED = {"\a": "\\a", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v"}
QUOTE = str.maketrans({**QUOTED, "\\": "\\\\", '"': '\\"'})

method("contains", [STRING, STRING], BOOL, lambda text, part: part in text)
method("startsWith", [STRING, STRING], BOOL, lambda text, part: text.startswith(part))
method("endsWith", [STRING, STRING], BOOL, lambda text, part: text.endswith(part))
function("matches", [STRING, STRING], BOOL, _matches)
method("matches", [STRING, STRING], BOOL, _matches)
method("find", [STRING, STRING], STRING, _find)
method("findAll", [STRING, STRING], STRINGS, _find_all)
method("findAll", [STRING, STRING, INT], STRINGS, _find_all)
method("charAt", [STRING, INT], STRING, _char_at)
method("indexOf", [STRING, STRING], INT, _index_of)
method("indexOf", [STRING, STRING, INT], INT, _index_of)
method("lastIndexOf", [STRING, STRING], INT, _last_index_of)
method("lastIndexOf", [STRING, STRING, INT], INT, _last_index_of)
method("lowerAscii", [STRING], STRING, lambda text: text.translate(LOWER))
method("upperAscii", [STRING], STRING, lambda text: text.translate(UPPER))
method("replace", [STRING, STRING, STRING], STRING, _replace)
method("replace", [STRING, STRING, STRING, INT], STRING, _replace)
method("split", [STRING, STRING], STRINGS, _split)
method("split", [STRING, STRING, INT], STRINGS, _split)
method("substring", [STRING, INT], STRING, _substring)
method("substring", [STRING, INT, INT], STRING, _substring)
method("trim", [STRING], STRING, lambda text: text.strip(GO_SPACE))
method("join", [STRINGS], STRING, _join)
method("join", [STRINGS, STRING], STRING, _join)
function("strings.quote", [STRING], STRING, lambda text: f'"{text.translate(QUOTE)}"')
