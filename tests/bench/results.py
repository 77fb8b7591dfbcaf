"""Figures: collected, shown as a table, kept as JSON."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from tessera.tables_and_drawings import columns


@dataclass(frozen=True)
class Figure:
    """One measured value. ``peer``: NVIDIA's Go driver on the same kind of machine, where it was measured."""

    name: str
    value: float
    unit: str
    target: float | None
    peer: float | None
    machine: str


def machine() -> str:
    """What the figures were measured on."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine()
    )
    return f"{os.cpu_count()} cores, {model}, Linux {platform.release()}, Python {platform.python_version()}"


def table(figures: list[Figure]) -> str:
    rows = [
        [figure.name, f"{figure.value:.2f}", figure.unit, _shown(figure.target), _shown(figure.peer), _verdict(figure)]
        for figure in figures
    ]
    return columns(["NAME", "VALUE", "UNIT", "TARGET", "PEER", ""], rows)


def write(figures: list[Figure], path: Path) -> None:
    path.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")


def _verdict(figure: Figure) -> str:
    if figure.target is None:
        return ""
    return "ok" if figure.value <= figure.target else "misses the target"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
