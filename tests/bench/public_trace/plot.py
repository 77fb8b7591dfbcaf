"""Two pictures: how full the fleet gets while tasks come, and while they come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.placement.plot import COLOURS, save
from tests.bench.public_trace.replays import BOUND, Churning, Decided, asked, first_refusal
from tests.bench.public_trace.report import admitted, sizes_of
from tests.bench.public_trace.tasks import GivenArrivals

BOUND_COLOUR = "#222222"
THINNED = 10
"""Of the thousands of moments, every so many is drawn."""


def draw_filling(scenario: GivenArrivals, steps: Mapping[str, Sequence[Decided]], path: Path) -> None:
    """Writes ``path`` with the suffixes .png and .svg: what is held by what has been asked for, and a cross at each
    first refusal."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    demand = asked(scenario)
    for (name, tasks), colour in zip(steps.items(), _colours(steps), strict=True):
        axes.plot(demand, [task.held for task in tasks], label=name, **_style(name, colour))
        first = first_refusal(tasks)
        if first is not None:
            axes.plot(demand[first], tasks[first].held, "x", color=colour)
    axes.set(xlabel="memory slices asked for, of those there are", ylabel="held", xlim=(0.4, 1.3), ylim=(0.4, 1.0))
    _finish(axes)
    figure.suptitle(f"Tasks of the public trace that never end, {scenario.nodes} nodes of 8 H100")
    save(figure, path)


def draw_churn(
    scenario: GivenArrivals,
    steps: Mapping[str, Sequence[Decided]],
    results: Mapping[str, Sequence[Churning]],
    path: Path,
) -> None:
    """Writes ``path`` with the suffixes .png and .svg: what is held over time, and who is admitted, by size."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.2), width_ratios=(3, 2), layout="constrained")
    sizes = sizes_of(results)
    width = 0.8 / len(results)
    for number, ((name, tasks), colour) in enumerate(zip(steps.items(), _colours(steps), strict=True)):
        drawn = tasks[::THINNED]
        left.plot([task.at for task in drawn], [task.held for task in drawn], label=name, **_style(name, colour))
        places = [at + (number - (len(results) - 1) / 2) * width for at in range(len(sizes))]
        right.bar(places, [admitted(results[name], size) for size in sizes], width, color=colour)
    left.axvline(scenario.trace()[scenario.warm_up].at, color="#bbbbbb", linewidth=0.8)
    left.set(xlabel="time; what is left of the line does not count", ylabel="memory slices held", ylim=(0.5, 1.0))
    _finish(left)
    right.set(ylabel="admitted")
    right.set_xticks(range(len(sizes)), list(map(str, sizes)), rotation=30)
    right.grid(axis="y", alpha=0.3)
    figure.suptitle(f"Tasks of the public trace that come and go at load {scenario.load:g}, {scenario.nodes} nodes")
    save(figure, path)


def _colours(steps: Mapping[str, Sequence[Decided]]) -> list[str]:
    others = iter(COLOURS)
    return [BOUND_COLOUR if name == BOUND else next(others) for name in steps]


def _style(name: str, colour: str) -> dict[str, Any]:
    """The bound lies below the others, so that what reaches it can be seen."""
    is_bound = name == BOUND
    return {"color": colour, "linewidth": 1.0, "linestyle": "--" if is_bound else "-", "zorder": 1 if is_bound else 2}


def _finish(axes: Any) -> None:
    axes.legend(loc="lower right", frameon=False)
    axes.grid(alpha=0.3)
