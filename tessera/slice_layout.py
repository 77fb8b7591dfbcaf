"""Drawing a GPU's memory slices as text: ``[1g.10gb|.......|3g.40gb------------------------]``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """A labelled range of memory slices: [start, start + size)."""

    start: int
    size: int
    label: str


def cell_width(spans: Iterable[Span]) -> int:
    """Characters per slice so that every label fits, at least 4."""
    # A span of n slices also has the n - 1 separators it covers.
    return max([4, *(-(-(len(span.label) - span.size + 1) // span.size) for span in spans)])


def draw_slices(slices: int, spans: Iterable[Span], width: int | None = None) -> str:
    """One line: labels padded with ``-`` for used slices, ``.`` for free ones.

    :param width: characters per slice, to align several GPUs; by default as many as the labels need
    """
    by_start = {span.start: span for span in spans}
    width = cell_width(by_start.values()) if width is None else width
    cells, position = [], 0
    while position < slices:
        span = by_start.get(position)
        size = span.size if span else 1
        room = size * width + size - 1
        cells.append(span.label[:room].ljust(room, "-") if span else "." * room)
        position += size
    return f"[{'|'.join(cells)}]"


def draw_placement(slices: int, start: int, size: int) -> str:
    """A single placement: ``....####`` for (4, 4) of eight."""
    return "." * start + "#" * size + "." * (slices - start - size)
