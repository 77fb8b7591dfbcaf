"""The picture: pods a second by layout and fleet, and the scheduler's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.bench.placement.plot import COLOURS, save
from tests.bench.scale.layouts import Layout
from tests.bench.scale.measure import Found

PANELS: tuple[tuple[str, Callable[[Found], float]], ...] = (
    ("pods/s, 1g.10gb", lambda found: found.small.pods_a_second),
    ("pods/s, a mix of profiles", lambda found: found.mix.pods_a_second),
    ("pods/s, 1g.10gb beside parked pods", lambda found: found.small_beside_parked.pods_a_second),
    ("kube-scheduler's memory, MiB", lambda found: found.cost.peak_mib),
)


def draw(results: Sequence[Found], path: Path) -> None:
    """Writes ``path`` with the suffixes .png and .svg."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(14, 3.8), layout="constrained")
    for axes, (title, value) in zip(panels, PANELS, strict=True):
        _bars(axes, title, results, value)
    panels[0].legend(frameon=False, fontsize="small")
    figure.suptitle("The stock kube-scheduler by what nodes of 8 H100 publish, three quarters given out")
    save(figure, path)


def _bars(axes: Any, title: str, results: Sequence[Found], value: Callable[[Found], float]) -> None:
    fleets = list(dict.fromkeys(found.nodes for found in results))
    layouts = [layout.value for layout in Layout if any(found.layout == layout.value for found in results)]
    width = 0.8 / len(layouts)
    for number, (layout, colour) in enumerate(zip(layouts, COLOURS, strict=False)):
        of_layout = {found.nodes: value(found) for found in results if found.layout == layout}
        places = [at + (number - (len(layouts) - 1) / 2) * width for at in range(len(fleets))]
        bars = axes.bar(places, [of_layout.get(nodes, 0.0) for nodes in fleets], width, color=colour, label=layout)
        axes.bar_label(bars, fmt="%.3g", fontsize="x-small")
    axes.set(title=title, ylabel="")
    axes.set_xticks(range(len(fleets)), [f"{nodes} nodes" for nodes in fleets])
    axes.grid(axis="y", alpha=0.3)
