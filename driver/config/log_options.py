"""The options of commands that log."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from driver.logs import FORMATS, LEVELS, configure_logs


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
