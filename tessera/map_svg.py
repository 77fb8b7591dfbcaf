"""The map as a self-contained SVG image, with colours for light and dark pages (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby

from controller.report.map_model import MapGpu, MapNode, MapSpan
from controller.report.map_summary import class_of, classes_of
from controller.report.slice_states import SliceState
from tessera.map_drawing import STATES, in_proportion, links, notes_of
from tessera.tables_and_drawings import printable

IMAGE_WIDTH, BAR_X, BAR_HEIGHT, LINE = 960, 62, 22, 28
CHARACTER = 6.7
"""Width of a character of 11 pixels."""

FEWEST_PIXELS = 6
"""Of what a claim has of a shared GPU."""

PER_ROW = 4
"""Entries of the legend side by side."""

HUES = (150, 205, 40, 280, 320, 100, 180, 20, 250, 0)
"""Of the colours of classes, in order of their names."""

HATCHED = "<pattern id='hatched' width='6' height='6' patternUnits='userSpaceOnUse'><path d='M0 6L6 0'/></pattern>"

UNHELD = tuple(state for state in SliceState if state is not SliceState.HELD)


def map_as_svg(nodes: Sequence[MapNode]) -> str:
    """One bar per GPU below the name of its node, and a legend. Every part has a title with what it is."""
    numbers = {name: number for number, name in enumerate(classes_of(nodes))}
    lines: list[str] = []
    y = 0
    for node in nodes:
        y += LINE
        states = ", ".join(STATES[state] for state in node.states)
        for index, (product, group) in enumerate(groupby(node.gpus, key=lambda gpu: gpu.product)):
            gpus = list(group)
            y += LINE if index else 0
            lines.append(_text(0, y - 8, " · ".join(filter(None, [node.name, product, *links(gpus), states])), "node"))
            for gpu in gpus:
                lines += _bar(gpu, y, numbers)
                y += LINE
                for note in notes_of(gpu):
                    lines.append(_text(BAR_X, y + 5, note, "note"))
                    y += LINE // 2
        if not node.gpus:
            lines.append(_text(0, y - 8, " · ".join(filter(None, [node.name, states])), "node"))
    rows = -(-(len(numbers) + len(UNHELD)) // PER_ROW)
    legend = _legend(y + LINE // 2, numbers)
    height = y + LINE // 2 + rows * LINE
    colours = (f".class-{number} {{ fill: hsl({HUES[number % len(HUES)]} 50% 36%); }}" for number in numbers.values())
    style = "\n".join([files("tessera").joinpath("map.css").read_text("ascii").rstrip(), *colours])
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {IMAGE_WIDTH} {height}'>"
    return "\n".join([head, f"<style>{style}</style><defs>{HATCHED}</defs>", *lines, *legend, "</svg>", ""])


def _legend(y: int, numbers: Mapping[str, int]) -> Iterator[str]:
    entries = [(f"held class-{number}", name) for name, number in numbers.items()]
    entries += [(str(state), str(state)) for state in UNHELD]
    wide = IMAGE_WIDTH / PER_ROW
    for place, (look, text) in enumerate(entries):
        x, top = place % PER_ROW * wide, y + place // PER_ROW * LINE
        yield _field(x, top, 24, look, text)
        yield _text(x + 30, top + 15, _clipped(text, wide - 36))


def _bar(gpu: MapGpu, y: int, numbers: Mapping[str, int]) -> Iterator[str]:
    yield _text(0, y + 15, f"gpu-{gpu.number}")
    width = (IMAGE_WIDTH - BAR_X) / max(1, len(gpu.spans) if gpu.is_divided else gpu.memory_slices)
    by_memory = in_proportion(gpu, IMAGE_WIDTH - BAR_X, FEWEST_PIXELS)
    width = 1.0 if by_memory else width
    for place, span in enumerate(gpu.spans):
        start, size = (place, 1) if gpu.is_divided else (span.start, span.size)
        if by_memory:
            start, size = sum(by_memory[:place]), by_memory[place]
        x = BAR_X + start * width
        if by_memory and span.state not in {SliceState.HELD, SliceState.OFFERED}:
            yield _field(x, y, size, str(span.state), f"{span.state}: {span.memory_gib} GiB")
        elif span.state in {SliceState.HELD, SliceState.OFFERED}:
            yield from _span(span, x, y, size * width, numbers)
        else:
            title = "partition of others" if span.foreign else str(span.state)
            yield from (_field(x + index * width, y, width, str(span.state), title) for index in range(size))
            if span.foreign:
                yield _text(x + 6, y + 15, _clipped("foreign", width - 8))


def _span(span: MapSpan, x: float, y: int, width: float, numbers: Mapping[str, int]) -> Iterator[str]:
    kinds = span.kinds if span.memory_gib is None else (f"{span.memory_gib} GiB",)
    what = f"{', '.join(span.devices)} ({', '.join(kinds)})"
    if span.state is SliceState.OFFERED:
        yield _field(x, y, width, "offered", f"offered: {what}")
        yield _text(x + 6, y + 15, _clipped(" ".join(kinds), width - 8))
        return
    look, title, label = "held", f"{what}: ?, ?", "?"
    if span.holder is not None:
        device_class, label = class_of(span.holder), str(span.holder)
        look, title = f"held class-{numbers[device_class]}", f"{what}: {label}, {device_class}"
        label = label if len(label) * CHARACTER <= width - 8 else span.holder.claim
    yield _field(x, y, width, look, title)
    yield _text(x + 6, y + 15, _clipped(label, width - 8), "of-held")


def _clipped(text: str, room: float) -> str:
    return text[: max(1, int(room / CHARACTER))]


def _field(x: float, y: int, width: float, look: str, title: str) -> str:
    place = f"x='{x + 1:.5g}' y='{y}' width='{max(1.0, width - 2):.5g}' height='{BAR_HEIGHT}'"
    return f"<rect class='{look}' {place} rx='3'><title>{escape(printable(title))}</title></rect>"


def _text(x: float, y: int, text: str, look: str = "") -> str:
    style = f" class='{look}'" if look else ""
    return f"<text x='{x:.5g}' y='{y}'{style}>{escape(printable(text))}</text>"
