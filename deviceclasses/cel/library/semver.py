"""Semantic versions 2.0.0 and the functions on them. Order and equality ignore build metadata."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from deviceclasses.cel.library.registry import declare_order, function, method, succeeds
from deviceclasses.cel.types import BOOL, INT, SEMVER, STRING
from deviceclasses.cel.values import UINT_MAX, EvaluationError, Opaque, whole_number

VERSION_NUMBER = r"(0|[1-9][0-9]*)"
WORDS = r"[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*"
VERSION_SYNTAX = re.compile(rf"{VERSION_NUMBER}\.{VERSION_NUMBER}\.{VERSION_NUMBER}(?:-({WORDS}))?(?:\+({WORDS}))?")
LEADING_ZERO = re.compile(r"0[0-9]+")


@dataclass(frozen=True)
class Semver(Opaque):
    """A version; build metadata is not part of it."""

    numbers: tuple[int, int, int]
    prerelease: tuple[str, ...]

    type_name = SEMVER.name


@lru_cache(maxsize=4096)
def parse_semver(text: str) -> Semver:
    """Parse a version of semver 2.0.0. Raises EvaluationError for any other text."""
    match = VERSION_SYNTAX.fullmatch(text)
    if match is None:
        raise EvaluationError(
            f"{text!r} is not a semantic version: three numbers without leading zeros, such as 12.0.1"
        )
    words = tuple(match[4].split(".")) if match[4] else ()
    numbers = (whole_number(match[1]), whole_number(match[2]), whole_number(match[3]))
    largest = max(*numbers, *map(whole_number, filter(str.isdigit, words)))
    if any(map(LEADING_ZERO.fullmatch, words)) or largest > UINT_MAX:
        raise EvaluationError(f"{text!r} is not a semantic version: leading zeros, or a number beyond 64 bits")
    return Semver(numbers, words)


def normalized(text: str) -> str:
    """The text without a leading "v" and leading zeros, and with ".0" appended up to three numbers."""
    parts = [_trimmed(part) for part in text.removeprefix("v").split(".", 2)]
    if len(parts) < 3 and re.search(r"[+-]", parts[-1]):
        raise EvaluationError("short version cannot contain PreRelease/Build meta data")
    return ".".join([*parts, *["0"] * (3 - len(parts))])


def _trimmed(part: str) -> str:
    if len(part) <= 1:
        return part
    rest = part.lstrip("0")
    return rest if rest[:1] in set("0123456789") else f"0{rest}"


def _parse(text: str, normalize: bool = False) -> Semver:
    return parse_semver(normalized(text) if normalize else text)


def _rank(version: Semver) -> tuple[object, ...]:
    """The sort key of a version: numbers before words, and a prerelease before its release."""
    words = [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in version.prerelease]
    return (version.numbers, not version.prerelease, words)


for _takes in ([STRING], [STRING, BOOL]):
    function("semver", _takes, SEMVER, _parse)
    function("isSemver", _takes, BOOL, succeeds(_parse))
declare_order(SEMVER, _rank)
for _position, _part in enumerate(("major", "minor", "patch")):
    method(_part, [SEMVER], INT, lambda one, position=_position: one.numbers[position])
