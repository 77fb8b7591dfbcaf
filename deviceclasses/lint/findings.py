"""Findings of lint: issues in objects, and misspelt names (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum

from driver.config.strict_schema import shown
from driver.config.suggestions import nearest

MIN_SIMILARITY = 0.8
"""Minimum similarity, from 0 to 1, of a misspelt name and the right one."""


class Severity(StrEnum):
    """Severity of a finding. A warning may be correct in a cluster with other classes or drivers."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Issue:
    """One problem in an object.

    path     of the field
    value    as it was found
    message  what is wrong, with what would be accepted
    """

    path: str
    value: str
    message: str
    severity: Severity = Severity.ERROR


@dataclass(frozen=True, slots=True)
class Finding:
    """An issue with its file, the number of the document in it, and its object (``DeviceClass gpu-dev``)."""

    file: str
    document: int
    object: str
    path: str
    value: str
    message: str
    severity: Severity


def misspelt(name: str, known: Sequence[str]) -> str | None:
    """The name in ``known`` of which ``name`` is probably a misspelling, else None."""
    close = nearest(name, known)
    if name in known or close is None:
        return None
    return close if SequenceMatcher(None, name.casefold(), close.casefold()).ratio() >= MIN_SIMILARITY else None


def almost(path: str, value: str, known: Sequence[str], what: str) -> Iterator[Issue]:
    """A warning about a value that is probably a misspelling of one in ``known``; none for any other value."""
    if close := misspelt(value, known):
        yield Issue(path, shown(value), f"is almost {what}; did you mean {close}?", Severity.WARNING)
