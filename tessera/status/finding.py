"""Results of the checks of ``tessera status``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem: the object, what is wrong with it, what to do."""

    about: str
    message: str
    remedy: str


class CheckState(StrEnum):
    """State of a check, by the name that people see."""

    OK = "ok"
    PROBLEM = "look"
    UNREAD = "unread"


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one check: a summary, findings, and the lists that it needs but that can't be read (``unread``)."""

    check: str
    summary: str
    findings: tuple[Finding, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def state(self) -> CheckState:
        if self.findings:
            return CheckState.PROBLEM
        return CheckState.UNREAD if self.unread else CheckState.OK


CheckOutput = Iterator[str | Finding]
"""Parts of a check's summary, and its findings."""


def counted(count: int, one: str, more: str | None = None) -> str:
    """``1 node``, ``2 nodes``; ``more`` is the plural if it is irregular."""
    return f"{count} {one if count == 1 else more or f'{one}s'}"


def shortened(names: list[str], most: int = 3) -> str:
    """All names if they are few, otherwise the first and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
