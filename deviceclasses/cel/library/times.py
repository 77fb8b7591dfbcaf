"""Durations and timestamps, in whole nanoseconds. Time zones are offsets or names of the IANA database."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from fractions import Fraction
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from deviceclasses.cel.library.registry import function, method
from deviceclasses.cel.types import DURATION, INT, STRING, TIMESTAMP
from deviceclasses.cel.values import INT_MAX, INT_MIN, Duration, EvaluationError, Timestamp

SECOND = 10**9
UNITS = {"ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": SECOND, "m": 60 * SECOND, "h": 3600 * SECOND}
PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
SPAN = re.compile(rf"([+-]?)((?:{PART.pattern})+)")
MOMENT = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2}):([0-9]{2})(?:[.,]([0-9]+))?(Z|[+-][0-9]{2}:[0-9]{2})"
)
OFFSET = re.compile(r"([+-]?)([0-9]+):([0-9]+)")
EARLIEST, LATEST = -62135596800, 253402300799
"""Seconds since 1970 of the years 1 and 9999."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _duration(nanoseconds: int) -> Duration:
    if not INT_MIN <= nanoseconds <= INT_MAX:
        raise EvaluationError("duration overflow")
    return Duration(nanoseconds)


def _timestamp(nanoseconds: int, offset: int = 0) -> Timestamp:
    if not EARLIEST <= nanoseconds // SECOND <= LATEST:
        raise EvaluationError("timestamp overflow")
    return Timestamp(nanoseconds, offset)


def timestamp_of(seconds: int) -> Timestamp:
    """The timestamp of seconds since 1970. Raises EvaluationError outside the years 1 to 9999."""
    return _timestamp(seconds * SECOND)


def parse_duration(text: str) -> Duration:
    """Parse a duration such as "1h30m" or "-1.5s". Raises EvaluationError for any other text."""
    if text in ("0", "+0", "-0"):
        return Duration(0)
    match = SPAN.fullmatch(text)
    if match is None:
        raise EvaluationError(f"{text!r} is not a duration: numbers with h, m, s, ms, us or ns make one")
    total = sum(int(Fraction(f"0{number}") * UNITS[unit]) for number, unit in PART.findall(match[2]))
    return _duration(-total if match[1] == "-" else total)


def parse_timestamp(text: str) -> Timestamp:
    """Parse RFC 3339, such as "2026-01-31T12:00:00Z". Raises EvaluationError for any other text."""
    match = MOMENT.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        moment = datetime(*map(int, match.groups()[:6]), tzinfo=UTC)  # type: ignore[misc, arg-type]
    except ValueError:
        raise EvaluationError(f"{text!r} is not a timestamp: RFC 3339 is, such as 2026-01-31T12:00:00Z") from None
    fraction = int((match[7] or "")[:9].ljust(9, "0"))
    offset = _offset_seconds(match[8])
    seconds = (moment - EPOCH) // timedelta(seconds=1) - offset
    return _timestamp(seconds * SECOND + fraction, offset)


def _offset_seconds(zone: str) -> int:
    if zone == "Z":
        return 0
    hours, minutes = int(zone[1:3]), int(zone[4:6])
    if hours > 24 or minutes > 60:
        raise EvaluationError(f"{zone!r} is not an offset from UTC")
    return (hours * 3600 + minutes * 60) * (-1 if zone[0] == "-" else 1)


def duration_text(value: Duration) -> str:
    """The text of a duration in seconds, as Kubernetes writes it: "5400s", "1.5s"."""
    whole, rest = divmod(abs(value.nanoseconds), SECOND)
    fraction = f".{rest:09d}".rstrip("0") if rest else ""
    return f"{'-' if value.nanoseconds < 0 else ''}{whole}{fraction}s"


def timestamp_text(value: Timestamp) -> str:
    """The RFC 3339 text of a timestamp, in its original zone."""
    moment = EPOCH + timedelta(seconds=value.nanoseconds // SECOND + value.offset)
    rest = value.nanoseconds % SECOND
    fraction = f".{rest:09d}".rstrip("0") if rest else ""
    hours, minutes = divmod(abs(value.offset) // 60, 60)
    zone = f"{'-' if value.offset < 0 else '+'}{hours:02d}:{minutes:02d}" if value.offset else "Z"
    return f"{moment:%Y-%m-%dT%H:%M:%S}".rjust(19, "0") + fraction + zone


def _zone(name: str) -> tzinfo:
    match = OFFSET.fullmatch(name)
    if match is not None and int(match[2]) < 24 and int(match[3]) < 60:
        ahead = timedelta(hours=int(match[2]), minutes=int(match[3]))
        return timezone(-ahead if match[1] == "-" else ahead)
    try:
        return ZoneInfo(name or "UTC")
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise EvaluationError(f"unknown time zone {name}") from None


def _local(value: Timestamp, zone: str) -> datetime:
    return (EPOCH + timedelta(microseconds=value.nanoseconds // 1000)).astimezone(_zone(zone))


FIELDS: dict[str, Callable[[datetime], int]] = {
    "getFullYear": lambda moment: moment.year,
    "getMonth": lambda moment: moment.month - 1,
    "getDayOfYear": lambda moment: moment.timetuple().tm_yday - 1,
    "getDayOfMonth": lambda moment: moment.day - 1,
    "getDate": lambda moment: moment.day,
    "getDayOfWeek": lambda moment: moment.isoweekday() % 7,
    "getHours": lambda moment: moment.hour,
    "getMinutes": lambda moment: moment.minute,
    "getSeconds": lambda moment: moment.second,
    "getMilliseconds": lambda moment: moment.microsecond // 1000,
}
SPANS = {"getHours": 3600 * SECOND, "getMinutes": 60 * SECOND, "getSeconds": SECOND, "getMilliseconds": 10**6}


def _later(moment: Timestamp, nanoseconds: int) -> Timestamp:
    return _timestamp(moment.nanoseconds + nanoseconds, moment.offset)


def _towards_zero(value: int, unit: int) -> int:
    return value // unit if value >= 0 else -(-value // unit)


for _name, _field in FIELDS.items():
    method(_name, [TIMESTAMP], INT, lambda value, part=_field: part(_local(value, "UTC")))
    method(_name, [TIMESTAMP, STRING], INT, lambda value, zone, part=_field: part(_local(value, zone)))
for _name, _unit in SPANS.items():
    method(_name, [DURATION], INT, lambda value, unit=_unit: _towards_zero(value.nanoseconds, unit))

function("_+_", [DURATION, DURATION], DURATION, lambda one, other: _duration(one.nanoseconds + other.nanoseconds))
function("_+_", [DURATION, TIMESTAMP], TIMESTAMP, lambda span, moment: _later(moment, span.nanoseconds))
function("_+_", [TIMESTAMP, DURATION], TIMESTAMP, lambda moment, span: _later(moment, span.nanoseconds))
function("_-_", [DURATION, DURATION], DURATION, lambda one, other: _duration(one.nanoseconds - other.nanoseconds))
function("_-_", [TIMESTAMP, DURATION], TIMESTAMP, lambda moment, span: _later(moment, -span.nanoseconds))
function("_-_", [TIMESTAMP, TIMESTAMP], DURATION, lambda one, other: _duration(one.nanoseconds - other.nanoseconds))
