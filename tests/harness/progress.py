"""Telling a person how far a long piece of work is, on a terminal and in the log of a CI run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

LOG_INTERVAL_S = 20.0
"""Where no terminal shows the line being updated: a line this often, so that a CI log shows life and stays short."""


def duration(seconds: float) -> str:
    """Seconds as people say them: "4.2 s", "3 min 05 s", "1 h 02 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class Part:
    """One piece of work under way. ``tick`` as often as you like: what is shown is limited here."""

    def __init__(self, progress: Progress, what: str, usual_s: float | None) -> None:
        self._progress = progress
        self._what = what
        self._usual = f", usually about {duration(usual_s)}" if usual_s else ""
        self._begun = progress.clock()
        self._shown = self._begun

    def tick(self, detail: str = "") -> None:
        """Show the time so far, the usual time and ``detail``, if it is time to."""
        now = self._progress.clock()
        if not self._progress.terminal and now - self._shown < LOG_INTERVAL_S:
            return
        self._shown = now
        more = f" ({detail})" if detail else ""
        self._progress.update(f"{self._what}: {duration(now - self._begun)} so far{self._usual}{more}")

    def finish(self, word: str) -> None:
        """Close the part with one line: ``word`` is "done" or "failed"."""
        self._progress.say(f"{self._what}: {word} after {duration(self._progress.clock() - self._begun)}")


class Progress:
    """Writes progress to ``stream`` (standard error by default); ``None`` keeps silent.

    On a terminal the line of the part under way is rewritten in place.
    """

    def __init__(
        self,
        stream: TextIO | None = sys.stderr,
        clock: Callable[[], float] = time.monotonic,
        terminal: bool | None = None,
    ) -> None:
        self._stream = stream
        self.clock = clock
        self.terminal = (stream is not None and stream.isatty()) if terminal is None else terminal

    def say(self, text: str) -> None:
        """One lasting line."""
        self._write(f"\r\x1b[K{text}\n" if self.terminal else f"{text}\n")

    def update(self, text: str) -> None:
        """A line that the next one replaces, on a terminal; a lasting one elsewhere."""
        self._write(f"\r\x1b[K{text}" if self.terminal else f"{text}\n")

    @contextmanager
    def part(self, what: str, usual_s: float | None = None) -> Iterator[Part]:
        """A piece of work called ``what`` that usually takes ``usual_s`` seconds; ends with "done" or "failed"."""
        part = Part(self, what, usual_s)
        self.update(f"{what} ..." + (f" usually about {duration(usual_s)}" if usual_s else ""))
        try:
            yield part
        except BaseException:
            part.finish("failed")
            raise
        part.finish("done")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()


SILENT = Progress(stream=None)
