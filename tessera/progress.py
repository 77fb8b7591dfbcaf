"""What a command that waits shows meanwhile, on stderr."""

from __future__ import annotations

import math
import shutil
import sys
import time

import click

from tessera.tables_and_drawings import printable


class Progress:
    """Lines on stderr about what happens; on a terminal the current state is a line that is replaced.

    Elsewhere a state is a line of its own: one in ``interval_s`` at most.
    """

    def __init__(self, interval_s: float = 0.0) -> None:
        self._shown, self._in_place = "", sys.stderr.isatty()
        self._interval_s, self._shown_at = interval_s, -math.inf

    def log(self, text: str) -> None:
        self.clear()
        click.echo(printable(text), err=True)

    def show(self, text: str) -> None:
        """Show the current state, if it is another."""
        is_early = not self._in_place and time.monotonic() - self._shown_at < self._interval_s
        if text != self._shown and not is_early:
            self.clear()
            self._shown, self._shown_at = text, time.monotonic()
            width = shutil.get_terminal_size().columns - 1 if self._in_place else None
            click.echo(printable(text)[:width], err=True, nl=not self._in_place)

    def clear(self) -> None:
        if self._shown and self._in_place:
            click.echo("\r\x1b[K", err=True, nl=False)
        self._shown = ""
