"""The figures of the parts, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from tessera.tables_and_drawings import columns
from tests.bench.results import machine

MISSED = "misses the target"


class Measured(NamedTuple):
    """``target``: the most that it may be; ``baseline``: the same without preemption, measured in the same run."""

    name: str
    value: float
    unit: str
    target: float | None
    baseline: float | None


class Results:
    """Written to ``output`` after each part, before its cluster ends."""

    def __init__(self, output: Path, seed: int) -> None:
        self._output, self._figures = output, list[Measured]()
        self._contents: dict[str, Any] = {"machine": machine(), "seed": seed, "figures": []}

    def add(self, part: str, figures: Sequence[Measured], details: Any) -> None:
        self._figures += figures
        self._contents["figures"] += [{"part": part, **figure._asdict()} for figure in figures]
        self._contents[part] = details
        self._output.write_text(json.dumps(self._contents, indent=1) + "\n")

    def show(self) -> bool:
        """Print the table. Returns whether all targets are met."""
        click.echo(table(self._figures))
        click.echo(f"measured on {machine()}; written to {self._output}")
        return all(_verdict(figure) != MISSED for figure in self._figures)


def table(figures: Sequence[Measured]) -> str:
    rows = [
        [
            figure.name,
            _shown(figure.value),
            figure.unit,
            _shown(figure.target),
            _shown(figure.baseline),
            _verdict(figure),
        ]
        for figure in figures
    ]
    return columns(["NAME", "VALUE", "UNIT", "AT MOST", "BASELINE", ""], rows)


def _verdict(figure: Measured) -> str:
    if figure.target is None:
        return ""
    return "ok" if figure.value <= figure.target else MISSED


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
