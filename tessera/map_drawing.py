"""The map as text: one line per GPU, a legend, and a summary by product (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, groupby
from typing import Any

import click

from controller.report.map_model import Holder, MapGpu, MapNode, MapSpan, NodeState
from controller.report.map_summary import UNUSABLE, ProductSummary, class_of, classes_of, holders_of, summarize
from controller.report.slice_states import SliceState
from tessera.tables_and_drawings import CUT, Span, broken, columns, counted, draw_slices, flowed, printable

COLOURS = (
    "green", "cyan", "yellow", "magenta", "blue",
    "bright_green", "bright_cyan", "bright_yellow", "bright_magenta", "bright_blue",
)  # fmt: skip
"""Of classes, in order of their names; red is for what is wrong."""

FILLS: Mapping[SliceState, tuple[str, Mapping[str, Any]]] = {
    SliceState.OFFERED: ("+", {}),
    SliceState.FREE: (".", {"dim": True}),
    SliceState.STRANDED: ("!", {"fg": "yellow"}),
    SliceState.UNAVAILABLE: ("x", {"fg": "red"}),
}
"""The character with which slices of a state are filled, and its style."""

LEGEND = (
    "+ offered",
    ". free",
    "! stranded: free, but too small or badly placed for what is requested",
    "x unavailable",
)
CUT_LABEL = f"{CUT} name cut off: -o json has it"

STATES: Mapping[NodeState, str] = {
    NodeState.CORDONED: "cordoned",
    NodeState.NOT_READY: "not ready",
    NodeState.PAUSED: "plan paused",
    NodeState.UNREPORTED: "has not reported its GPUs",
    NodeState.INCOMPLETE: "slices incomplete: the scheduler skips it",
    NodeState.STANDALONE: "standalone",
    NodeState.COMPLETE: "publishes every device",
}

PREFIX = " " * 8
"""What is before a bar, and before the second line of a text."""

UNLIMITED_WIDTH = 120
"""Characters of the line of a bar where no width is given."""

MIN_CELL = 3


def draw_map(nodes: Sequence[MapNode], width: int | None) -> str:
    """All GPUs and the legend in lines of at most ``width`` characters, where that is at least 60; None: any length."""
    if not any(node.gpus or node.lost_devices or node.states for node in nodes):
        return "No GPU."
    marks = {name: (_mark(place), COLOURS[place % len(COLOURS)]) for place, name in enumerate(classes_of(nodes))}
    lines = [line for node in nodes for line in _node(node, width, marks)]
    legend = [*LEGEND, CUT_LABEL] if any(CUT in line for line in lines) else LEGEND
    lines.append("")
    if marks:
        held = [click.style(f" {mark} ", fg=colour, reverse=True) + " " + printable(name)
                for name, (mark, colour) in marks.items()]  # fmt: skip
        lines += flowed([f"held, by class: {held[0]}", *held[1:]], width, "   ", PREFIX)
    return "\n".join([*lines, *flowed(legend, width, "   ", "  ")])


def _mark(place: int) -> str:
    """A letter, so that classes differ without colours, too."""
    return chr(ord("A") + place) if place < 26 else str(place)


def _node(node: MapNode, width: int | None, marks: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    states = [click.style(STATES[state], fg="red" if state in UNUSABLE else "yellow") for state in node.states]
    name = click.style(printable(node.name), bold=True)
    for product, gpus in groupby(node.gpus, key=lambda gpu: gpu.product):
        of_product = list(gpus)
        head = [name, printable(product), *map(printable, links(of_product)), *states]
        yield from flowed(head, width, "  ", PREFIX)
        for gpu in of_product:
            bars = _bars(gpu, (width or UNLIMITED_WIDTH) - len(PREFIX) - 2, marks)
            yield from (
                (f"gpu-{gpu.number}" if row == 0 else "").ljust(len(PREFIX)) + bar for row, bar in enumerate(bars)
            )
            yield from _notes(notes_of(gpu), width)
    if not node.gpus:
        yield from flowed([name, *states], width, "  ", PREFIX)
    lost = (f"{lost.device} is held by {lost.holder}, but the node reports no such GPU" for lost in node.lost_devices)
    yield from _notes(chain(lost, (f"claim {holder}: {holder.problem}" for holder in node.failed_monitors)), width)


def _notes(texts: Iterable[str], width: int | None) -> Iterator[str]:
    for text in texts:
        yield from (click.style(line, fg="red") for line in broken(printable(text), width, PREFIX, PREFIX))


def notes_of(gpu: MapGpu) -> Iterator[str]:
    """Sentences about what is wrong with a GPU."""
    if gpu.fault is not None:
        yield gpu.fault
    elif gpu.cordon is not None:
        yield f"cordon requested: {gpu.cordon}"
    for device, other in gpu.overlaps:
        what = f"{device} and {other} are both held, but overlap"
        yield what if device != other else f"the claims of {device} have more than its memory"
    for holder in dict.fromkeys(holders_of(gpu)):
        if holder.problem is not None:
            yield f"claim {holder}: {holder.problem}"


def links(gpus: Iterable[MapGpu]) -> Iterator[str]:
    """The GPUs that NVLink joins, by number, and the fabric cliques."""
    cliques: dict[str, list[int]] = {}
    fabrics: dict[str, None] = {}
    for gpu in gpus:
        if gpu.nvlink_clique is not None:
            cliques.setdefault(gpu.nvlink_clique, []).append(gpu.number)
        if gpu.fabric_clique is not None:
            fabrics[gpu.fabric_clique] = None
    if joined := [_ranges(numbers) for numbers in cliques.values() if len(numbers) > 1]:
        yield f"NVLink {' '.join(joined)}"
    if fabrics:
        yield f"fabric {' '.join(fabrics)}"


def _ranges(numbers: Iterable[int]) -> str:
    """``0-3,5`` for 0, 1, 2, 3 and 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _bars(gpu: MapGpu, room: int, marks: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """The bar of a GPU; of many shares in several lines."""
    by_memory = in_proportion(gpu, (room + 1) // 2, 2)
    cells = sum(by_memory) or (len(gpu.spans) if gpu.is_divided else gpu.memory_slices)
    lines = -(-cells // max(1, (room + 1) // (MIN_CELL + 1))) if gpu.is_divided and not by_memory else 1
    of_line = -(-cells // max(1, lines))
    width = 1 if by_memory else max(MIN_CELL, (room - of_line + 1) // max(1, of_line))
    spans: list[Span] = []
    for place, span in enumerate(gpu.spans):
        start, size = (place, 1) if gpu.is_divided else (span.start, span.size)
        if by_memory:
            start, size = sum(by_memory[:place]), by_memory[place]
        if span.state is SliceState.HELD:
            mark, colour = marks[class_of(span.holder)] if span.holder is not None else ("?", "red")
            amount = mark if span.memory_gib is None else f"{mark} {span.memory_gib}Gi"
            label = _label(amount, span.holder, size * width + size - 1)
            spans.append(Span(start, size, label, "-", {"fg": colour, "reverse": True}))
        else:
            spans += _unheld(span, start, size)
    for first in range(0, max(1, cells), max(1, of_line)):
        of_this = (span._replace(start=span.start - first) for span in spans)
        yield draw_slices(min(of_line, cells - first), of_this, width)


def in_proportion(gpu: MapGpu, cells: int, fewest: int) -> list[int]:
    """The cells of each span of a shared GPU, by its memory, ``cells`` in all; none if one would have too few."""
    amounts = [span.memory_gib or 0 for span in gpu.spans]
    if not gpu.is_divided or not any(amounts):
        return []
    ends = [round(cells * amount / sum(amounts)) for amount in accumulate(amounts)]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return sizes if min(sizes) >= fewest else []


def _label(mark: str, holder: Holder | None, room: int) -> str:
    """The claim with its namespace if both fit."""
    if holder is None:
        return mark
    whole = f"{mark} {printable(str(holder))}"
    return whole if len(whole) <= room else f"{mark} {printable(holder.claim)}"


def _unheld(span: MapSpan, start: int, size: int) -> Iterator[Span]:
    """Offered slices as one cell with the kinds, others as a cell each."""
    fill, style = FILLS[span.state]
    if span.state is SliceState.OFFERED:
        what = printable(" ".join(span.kinds)) if span.memory_gib is None else f"{span.memory_gib} GiB"
        yield Span(start, size, f"+{what}", fill, style)
    elif span.memory_gib is not None:
        yield Span(start, size, f"{span.memory_gib} GiB", fill, style)
    else:
        label = "foreign" if span.foreign else ""
        yield from (Span(start + place, 1, label if place == 0 else "", fill, style) for place in range(size))


def draw_summary(nodes: Sequence[MapNode], width: int | None = None) -> str:
    """A table with a row per product, and the number of nodes in each state.

    Where the table is wider than ``width``, each product has a paragraph with the same figures.
    """
    gpus = [gpu for node in nodes for gpu in node.gpus]
    states = [(sum(state in node.states for node in nodes), text) for state, text in STATES.items()]
    unusable = sum(gpu.fault is not None for gpu in gpus)
    parts = [counted(len(nodes), "node"), *(f"{count} {text}" for count, text in states if count)]
    about_gpus = [counted(len(gpus), "GPU"), *([f"{unusable} cordoned or faulty"] if unusable else [])]
    header = ["PRODUCT", "NODES", "FREE NODES", "GPUS", "FREE GPUS", "SLICES", *(state.upper() for state in SliceState)]
    header.append("LARGEST FREE PARTITION")
    rows = list(map(_row, summarize(nodes)))
    table = columns(header, rows).splitlines()
    if width is not None and max(len(click.unstyle(line)) for line in table) > width:
        table = [line for row in rows for line in _paragraph(header, row, width)]
    return "\n".join([*broken(f"{', '.join(parts)}; {', '.join(about_gpus)}", width), "", *table])


def _paragraph(header: Sequence[str], row: Sequence[str], width: int) -> Iterator[str]:
    yield from (click.style(line, bold=True) for line in broken(row[0], width))
    figures = [f"{name} {value}" for name, value in zip(header[1:], row[1:], strict=True)]
    yield from flowed([PREFIX + figures[0], *figures[1:]], width, "   ", PREFIX)


def _row(product: ProductSummary) -> list[str]:
    largest, on = product.largest_partition, counted(product.largest_partition_gpus, "GPU")
    slices = [f"{product.slices[state]:.4g}" if product.slices[state] % 1 else f"{product.slices[state]:.0f}"
              for state in SliceState]  # fmt: skip
    return [
        printable(product.product),
        *map(str, (product.nodes, product.free_nodes, product.gpus, product.free_gpus)),
        f"{sum(product.slices.values()):.0f}",
        *slices,
        f"{printable(largest.profile)} on {on}" if largest is not None else "-",
    ]
