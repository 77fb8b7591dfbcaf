"""Telling a story on a terminal: acts, steps with their duration, and what there is to see."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from tests.harness.progress import duration

INDENT = "    "


class Screen:
    """Everything goes to standard output; colours only where that is a terminal."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def act(self, title: str) -> None:
        click.echo()
        click.secho(f"== {title}", fg="cyan", bold=True)

    def say(self, text: str) -> None:
        """A paragraph for people."""
        click.echo(textwrap.fill(text, width=100, initial_indent="  ", subsequent_indent="  "))

    def show(self, block: str) -> None:
        """Something as a program printed it, indented."""
        click.echo(textwrap.indent(block.rstrip(), INDENT))

    def command(self, line: str) -> None:
        """The command whose output comes next, for people to repeat."""
        click.secho(f"{INDENT}$ {line}", fg="yellow")

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Say what is happening; say how long it took when it is done."""
        click.secho(f"  > {what}", bold=True)
        began = time.monotonic()
        yield
        click.secho(f"    took {duration(time.monotonic() - began)}", dim=True)

    def end(self) -> None:
        click.echo()
        click.secho(f"The whole demo took {duration(time.monotonic() - self._began)}.", dim=True)
