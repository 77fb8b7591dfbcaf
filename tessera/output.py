"""Tables and words for people. click removes colours if the output is not a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

with_output = click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Format."
)


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with aligned columns and a bold header, as of ``kubectl get``."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(click.unstyle(line[i])) for line in lines) for i in range(len(header))]
    first, *rest = ("  ".join(padded(cell, width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join([click.style(first.rstrip(), bold=True), *(line.rstrip() for line in rest)])


def padded(cell: str, width: int) -> str:
    """``cell`` padded with spaces to ``width`` visible characters."""
    return cell + " " * (width - len(click.unstyle(cell)))


def counted(count: int, one: str, more: str | None = None) -> str:
    """``1 node``, ``2 nodes``; ``more`` is the plural if it is irregular."""
    return f"{count} {one if count == 1 else more or f'{one}s'}"


def shortened(names: list[str], most: int = 3) -> str:
    """All names if they are few, otherwise the first and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
