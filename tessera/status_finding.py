"""What a check of ``tessera status`` says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to be dealt with: what it is about, what is the case, what to do."""

    about: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Result:
    """What one check found: a summary in any case, and findings where all is not well."""

    check: str
    summary: str
    findings: tuple[Finding, ...] = ()


Told = Iterator[str | Finding]
"""What a check tells: parts of its summary, and findings."""
