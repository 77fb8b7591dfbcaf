"""Output of commands: tables, counted words, drawings of a GPU's memory slices, and documents.

click removes colours if the output is not a terminal. A drawing: ``[1g.10gb|.......|3g.40gb------------------------]``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any, NamedTuple, TypeVar

import click
import yaml

F = TypeVar("F", bound=Callable[..., Any])

CUT = "~"
"""The last character of a label in a drawing that continues; no name of an object has it."""


def with_output(*formats: str) -> Callable[[F], F]:
    """The option --output; the first format is the default."""
    choice = click.Choice(formats)
    return click.option("-o", "--output", type=choice, default=formats[0], show_default=True, help="Format.")


def show(output: str, content: object, text: str) -> None:
    """Print ``content`` as JSON, or the text that says the same."""
    click.echo(json.dumps(content, indent=2) if output == "json" else text)


def as_documents(documents: Sequence[Any], output: str) -> str:
    """Plain objects as YAML documents or as a JSON list."""
    as_json = json.dumps(documents, indent=2)
    if output == "json":
        return as_json
    plain = json.loads(as_json)  # values that occur twice would become aliases
    return yaml.dump_all(plain, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False).rstrip()


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with aligned columns and a bold header, as of ``kubectl get``."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(click.unstyle(row[i])) for row in table) for i in range(len(header))]
    lines = []
    for row in table:
        cells = [cell + " " * (width - len(click.unstyle(cell))) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([click.style(lines[0], bold=True), *lines[1:]])


def counted(count: int, one: str, more: str | None = None) -> str:
    """``1 node``, ``2 nodes``; ``more`` is the plural if it is irregular."""
    return f"{count} {one if count == 1 else more or f'{one}s'}"


def printable(text: str) -> str:
    """Replace control characters: parts of the text come from tenants."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def broken(text: str, width: int | None, indent: str = "", first_indent: str = "") -> list[str]:
    """``text`` in lines of at most ``width`` characters, None: in one. Words that are longer than a line are broken."""
    if width is None:
        return [first_indent + text]
    return wrap(text, width, initial_indent=first_indent, subsequent_indent=indent, break_on_hyphens=False)


def flowed(parts: Iterable[str], width: int | None, gap: str, indent: str) -> list[str]:
    """``parts`` in lines of at most ``width`` characters, all but the first indented.

    A part that is longer than a line loses its style and is broken itself.
    """
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}{gap}{part}" if lines[-1] else part
        if width is None or len(click.unstyle(joined)) <= width:
            lines[-1] = joined
        elif len(indent + click.unstyle(part)) <= width:
            lines.append(indent + part)
        else:
            lines += broken(click.unstyle(part), width, indent, indent if lines[-1] else "")
    return [line for line in lines if line]


class Span(NamedTuple):
    """A labelled range of memory slices: [start, start + size). ``style`` are arguments of click.style."""

    start: int
    size: int
    label: str
    fill: str = "-"
    style: Mapping[str, Any] = {}


def cell_width(spans: Iterable[Span]) -> int:
    """Characters per slice so that every label fits, at least 4."""
    # A span of n slices also has the n - 1 separators it covers.
    return max([4, *(-(-(len(span.label) - span.size + 1) // span.size) for span in spans)])


def draw_slices(slices: int, spans: Iterable[Span], width: int) -> str:
    """One line, ``width`` characters per slice: labels padded with the fills of the spans, ``.`` for free slices.

    A label that does not fit ends with CUT.
    """
    by_start = {span.start: span for span in spans}
    cells, position = [], 0
    while position < slices:
        span = by_start.get(position)
        size = span.size if span else 1
        room = size * width + size - 1
        label = span.label if span else ""
        label = label if len(label) <= room else label[: room - 1] + CUT
        text = label.ljust(room, span.fill if span else ".")
        cells.append(click.style(text, **span.style) if span and span.style else text)
        position += size
    return f"[{'|'.join(cells)}]"


def draw_placement(slices: int, start: int, size: int) -> str:
    """A single placement: ``....####`` for (4, 4) of eight."""
    return "." * start + "#" * size + "." * (slices - start - size)
