"""Durations as flags: 30d, 24h."""

from __future__ import annotations

import re
from typing import NamedTuple

import click

from driver.errors import UsageError

FORM = re.compile(r"([1-9][0-9]{0,6})([smhdw])")
DAY = 86400
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": DAY, "w": 7 * DAY}
UNITS = {"s": "s", "m": "min", "h": "h", "d": "days", "w": "weeks"}
SHORTEST, LONGEST = 60, 5 * 366 * DAY


class Duration(NamedTuple):
    """Seconds, and how people read them: ``24 h``."""

    seconds: int
    text: str


def duration(_: click.Context, option: click.Parameter, value: str | None) -> Duration | None:
    """Parse the value of an option. Raises UsageError."""
    if value is None:
        return None
    found = FORM.fullmatch(value)
    if found is None or not SHORTEST <= int(found[1]) * SECONDS[found[2]] <= LONGEST:
        accepted = "a duration from 1m to 5 years, such as 90m, 24h, 30d or 4w"
        raise UsageError(f"--{option.name} {value}: must be {accepted}")
    return Duration(int(found[1]) * SECONDS[found[2]], f"{found[1]} {UNITS[found[2]]}")
