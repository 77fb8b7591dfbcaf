"""The picture of a restart and of a lost controller: writes a second over time."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

from tests.bench.fleet.live import Storm

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "tessera"  # the same picture is the same file


def draw(storm: Storm, nodes: int, path: Path) -> None:
    """Writes ``path`` with the suffixes .png and .svg."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 4), layout="constrained")
    axes.plot([at for at, _ in storm.writes], [rate for _, rate in storm.writes], color="#2a6f97")
    top = max((rate for _, rate in storm.writes), default=1.0)
    for at, what in storm.marks:
        axes.axvline(at, color="#9aa0a6", linestyle=":")
        axes.text(at, top, f" {what}", rotation=90, va="top", fontsize=8)
    axes.set(xlabel="seconds", ylabel="writes a second", title=f"Slices, plans and the fence of {nodes} nodes")
    axes.grid(alpha=0.3)
    for suffix, metadata in (("png", None), ("svg", {"Date": None})):
        figure.savefig(path.with_suffix(f".{suffix}"), dpi=120, metadata=metadata)
    pyplot.close(figure)
