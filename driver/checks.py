"""Whether a process is alive and ready, as named checks.

Alive: a restart would not help, for the process does its work. Ready: others may rely on what it says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Check:
    """``look`` says why all is not well, or None. It is called at each request, by a thread of its own."""

    name: str
    look: Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Result:
    """What a check found: a reason where it failed."""

    name: str
    reason: str | None

    def __str__(self) -> str:
        return f"[+]{self.name} ok" if self.reason is None else f"[-]{self.name} failed: {self.reason}"


def look_at(checks: Iterable[Check]) -> list[Result]:
    """All of them, in order; a defect in one is its reason."""
    return [Result(check.name, _reason(check)) for check in checks]


def _reason(check: Check) -> str | None:
    try:
        return check.look()
    except Exception as error:
        log.exception("defect in a health check", extra={"check": check.name})
        return f"internal error, please report it: {type(error).__name__}: {error}"
