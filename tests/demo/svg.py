"""The GPUs of a cluster and the pods on them as an SVG image, with colours for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from tests.demo.picture import USES, Row

BAR_X, BAR_WIDTH, BAR_HEIGHT, LINE = 130, 760, 22, 30
FILLS = {"gpu": "#2f7d4f", "mig": "#2a6f97", "share": "#a06a1c", "shared": "#a06a1c"}
TEXT = "#7d8590"
"""A grey that is legible on white and on black."""


def svg(rows: Sequence[Row]) -> str:
    """One bar a GPU below the name of its node; a coloured field is a pod, an outlined one is free."""
    lines: list[str] = []
    y = 0
    for node, gpus in groupby(rows, key=lambda row: (row.node, row.product)):
        y += LINE
        lines.append(_text(0, y - 8, " · ".join(filter(None, node)), TEXT, "font-weight='bold'"))
        for row in gpus:
            lines += _bar(row, y)
            y += LINE
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {BAR_X + BAR_WIDTH} {y}' "
    return "\n".join([f"{head}font-family='monospace' font-size='11'>", *lines, "</svg>", ""])


def _bar(row: Row, y: int) -> Iterator[str]:
    yield _text(0, y + 15, f"gpu-{row.gpu}", TEXT)
    yield _text(55, y + 15, USES[row.kind][0], FILLS[row.kind])
    width = BAR_WIDTH / row.cells
    taken = {cell for span in row.spans for cell in range(span.start, span.start + span.size)}
    for cell in sorted(set(range(row.cells)) - taken):
        yield _field(BAR_X + cell * width, y, width, f"fill='none' stroke='{TEXT}' stroke-dasharray='3'")
    for span in sorted(row.spans):
        x = BAR_X + span.start * width
        yield _field(x, y, span.size * width, f"fill='{FILLS[row.kind]}'")
        yield _text(x + 6, y + 15, span.label, "#ffffff")


def _field(x: float, y: int, width: float, style: str) -> str:
    return f"<rect x='{x + 1:g}' y='{y}' width='{width - 2:g}' height='{BAR_HEIGHT}' rx='3' {style}/>"


def _text(x: float, y: int, text: str, fill: str, style: str = "") -> str:
    return f"<text x='{x:g}' y='{y}' fill='{fill}' {style}>{escape(text)}</text>"


class UsedSpan(NamedTuple):
    """Memory slices of a GPU that a claim has, and how much of them it uses, 0 to 1."""

    node: str
    gpu: str
    start: int
    size: int
    used: float


def usage_svg(spans: Sequence[UsedSpan], cells: int = 8) -> str:
    """One bar a GPU: what is allocated is pale, what is used of it dark, the rest outlined."""
    lines: list[str] = []
    y, width = 0, BAR_WIDTH / cells
    for node, of_node in groupby(spans, key=lambda span: span.node):
        y += LINE
        lines.append(_text(0, y - 8, node, TEXT, "font-weight='bold'"))
        for gpu, of_gpu in groupby(of_node, key=lambda span: span.gpu):
            lines.append(_text(0, y + 15, gpu, TEXT))
            lines += (_field(BAR_X + n * width, y, width, f"fill='none' stroke='{TEXT}'") for n in range(cells))
            allocated = used = 0.0
            for span in of_gpu:
                x, wide = BAR_X + span.start * width, span.size * width
                lines.append(_field(x, y, wide, f"fill='{FILLS['mig']}' fill-opacity='0.35'"))
                if span.used:
                    lines.append(_field(x, y, max(4.0, wide * span.used), f"fill='{FILLS['mig']}'"))
                allocated, used = allocated + span.size, used + span.size * span.used
            lines.append(_text(60, y + 15, f"{used / allocated:.0%}", TEXT))
            y += LINE
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {BAR_X + BAR_WIDTH} {y}' "
    return "\n".join([f"{head}font-family='monospace' font-size='11'>", *lines, "</svg>", ""])
