"""Findings of the checks of ``tessera status``, and words in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem: the object, what is wrong with it, what to do."""

    about: str
    message: str
    remedy: str


CheckOutput = Iterator[str | Finding]
"""Parts of a check's summary, and its findings."""


def counted(count: int, one: str, more: str | None = None) -> str:
    """``1 node``, ``2 nodes``; ``more`` is the plural if it is irregular."""
    return f"{count} {one if count == 1 else more or f'{one}s'}"


def shortened(names: list[str], most: int = 3) -> str:
    """All names if they are few, otherwise the first and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
