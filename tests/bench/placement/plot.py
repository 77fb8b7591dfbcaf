"""The picture of a comparison on the real scheduler: memory slices over time, acceptance by profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

if TYPE_CHECKING:
    from tests.bench.placement.real import RealResult

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "tessera"  # the same picture is the same file

COLOURS = ("#9aa0a6", "#f4a261", "#2a6f97")
SMOOTH_S = 5.0


def draw(results: Sequence[RealResult], path: Path) -> None:
    """Writes ``path`` with the suffixes .png and .svg."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.2), width_ratios=(3, 2), layout="constrained")
    for result, colour in zip(results, COLOURS, strict=False):
        _held(left, result, colour)
    _acceptance(right, results)
    figure.suptitle(
        f"{results[0].mix}: the same {results[0].arrivals} arrivals on the stock kube-scheduler, by what is offered"
    )
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Writes ``figure`` as ``path`` with the suffixes .png and .svg, and lets it go."""
    from matplotlib import pyplot

    for suffix, metadata in (("png", None), ("svg", {"Date": None})):
        figure.savefig(path.with_suffix(f".{suffix}"), dpi=120, metadata=metadata)
    pyplot.close(figure)


def _held(axes: Any, result: RealResult, colour: str) -> None:
    times = [at for at, _ in result.slices_over_time]
    values = [_around(result.slices_over_time, at) for at in times]
    axes.plot(times, values, color=colour, label=f"{result.mode}: {result.held:.1%} on average")
    axes.set(xlabel="seconds", ylabel="memory slices allocated", ylim=(0.5, 1.0))
    axes.legend(loc="lower right", frameon=False)
    axes.grid(alpha=0.3)


def _around(steps: Sequence[tuple[float, float]], at: float) -> float:
    near = [value for when, value in steps if abs(when - at) <= SMOOTH_S / 2]
    return sum(near) / len(near)


def _acceptance(axes: Any, results: Sequence[RealResult]) -> None:
    names = [*results[0].by_request, "all"]
    width = 0.8 / len(results)
    for number, (result, colour) in enumerate(zip(results, COLOURS, strict=False)):
        values = [*result.by_request.values(), result.acceptance]
        axes.bar(
            [at + (number - (len(results) - 1) / 2) * width for at in range(len(names))], values, width, color=colour
        )
    axes.set(ylabel="claims admitted", ylim=(0.4, 1.0))
    axes.set_xticks(range(len(names)), names, rotation=30)
    axes.grid(axis="y", alpha=0.3)
