"""Structured logs: a message, and facts as keys (claim, pod, gpu, device, error ...)."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

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


def _shown(value: Any) -> str:
    text = str(value)
    return json.dumps(text) if not text.isprintable() or any(c in text for c in ' "=') else text
