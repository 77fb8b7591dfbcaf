"""What a check of ``tessera status`` says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to be dealt with: what it is about, what is the case, what to do."""

    about: str
    message: str
    remedy: str


class State(StrEnum):
    """Of a check, as people see it."""

    OK = "ok"
    LOOK = "look"
    UNREAD = "unread"


@dataclass(frozen=True, slots=True)
class Result:
    """What one check found: a summary in any case, and findings where all is not well.

    ``unread`` are the lists without which it can't tell all that it is there for.
    """

    check: str
    summary: str
    findings: tuple[Finding, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def state(self) -> State:
        if self.findings:
            return State.LOOK
        return State.UNREAD if self.unread else State.OK


Told = Iterator[str | Finding]
"""What a check tells: parts of its summary, and findings."""


def some(count: int, one: str, more: str | None = None) -> str:
    """``1 node``, ``2 nodes``; ``more`` where an s does not make it."""
    return f"{count} {one if count == 1 else more or f'{one}s'}"


def first(names: list[str], most: int = 3) -> str:
    """All of a few, or the first and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
