"""Structured logs: a message, and facts as keys (claim, pod, gpu, device, error ...)."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Any

import click

STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What a LogRecord carries by itself; everything else came through ``extra``."""

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning")


class StructuredFormatter(logging.Formatter):
    """``text``: time, level, message, then key=value. ``json``: one object a line."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self._json = style == "json"

    def format(self, record: logging.LogRecord) -> str:
        facts = {key: value for key, value in vars(record).items() if key not in STANDARD and value not in (None, "")}
        if record.exc_info:
            facts["trace"] = self.formatException(record.exc_info)
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if self._json:
            head = {"time": time, "level": record.levelname.lower(), "message": record.getMessage()}
            return json.dumps({**head, **facts}, default=str)
        pairs = "".join(f" {key}={_shown(value)}" for key, value in facts.items())
        return f"{time} {record.levelname:<7} {record.getMessage()}{pairs}"


def configure_logs(style: str, level: str) -> None:
    """Send all logs to standard error. ``style`` is one of FORMATS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(StructuredFormatter(style))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # It logs every connection it retries; ours say what that meant.
    logging.getLogger("urllib3").setLevel(logging.ERROR)


def with_logs(level: str = "info") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add ``--log-format`` and ``--log-level`` to a command, and configure the logs before it runs."""
    log_format = click.option(
        "--log-format", type=click.Choice(FORMATS), default="text", show_default=True, help="Format of the log lines."
    )
    log_level = click.option(
        "--log-level", type=click.Choice(LEVELS), default=level, show_default=True, help="Least severe level to log."
    )

    def add(command: Callable[..., None]) -> Callable[..., None]:
        @log_format
        @log_level
        @wraps(command)
        def run(*, log_format: str, log_level: str, **options: Any) -> None:
            configure_logs(log_format, log_level)
            command(**options)

        return run

    return add


def _shown(value: Any) -> str:
    text = str(value)
    return json.dumps(text) if not text.isprintable() or any(c in text for c in ' "=') else text
