"""The results as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tests.bench.placement.experiment import REFERENCE, Result
from tests.bench.placement.trace import MIXES

if TYPE_CHECKING:
    from tests.bench.placement.real import RealResult

NAME = 34


def overall(results: Sequence[Result]) -> str:
    """Acceptance by policy and mix, with its standard error, the reference's beside it."""
    mixes = [mix.name for mix in MIXES]
    lines = [f"{'acceptance (reference)':{NAME}}" + "".join(f"{mix:>26}" for mix in mixes)]
    found = {(result.policy, result.mix): result for result in results}
    for policy in dict.fromkeys(result.policy for result in results):
        references = REFERENCE.get(policy, (None,) * len(mixes))
        cells = [_cell(found.get((policy, mix)), known) for mix, known in zip(mixes, references, strict=True)]
        lines.append(f"{policy:{NAME}}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


def by_request(results: Sequence[Result], mix: str) -> str:
    """What each request of one mix got, and what curation cost."""
    chosen = [result for result in results if result.mix == mix]
    requests = list(chosen[0].by_request)
    titles = [*requests, "all", "slices held", "exchanged", "updates"]
    lines = [f"{mix:{NAME}}" + "".join(f"{title:>12}" for title in titles)]
    for result in chosen:
        shares = [*(result.by_request[request] for request in requests), result.acceptance, result.held]
        costs = ["-" if cost is None else f"{cost:.2f}" for cost in (result.exchanged, result.updates)]
        cells = [*(f"{share:.3f}" for share in shares), *costs]
        lines.append(f"{result.policy:{NAME}}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def _cell(result: Result | None, reference: float | None) -> str:
    if result is None:
        return "-"
    known = "-" if reference is None else f"{reference:.3f}"
    return f"{result.acceptance:.4f} ±{result.deviation:.4f} ({known})"


PROTOTYPE: Mapping[str, Sequence[str]] = {
    "everything, lowest start first": (".919", ".869", "56 / 1432", "65.6", "0", "-", "-", "-", "0", "-"),
    "curated, K=2": (".950", ".914", "20 / 1835", "16.1", "3.1", "-", "-", "58", "9", "-"),
}
"""What the reference's rough prototype found on the real scheduler (placement.md, last section), uniform mix."""


def real(results: Sequence[RealResult]) -> str:
    """The modes side by side; in brackets the reference's prototype, for the mix that it ran."""
    titles = ["slices held", "p50 / p99 ms", "scheduler CPU s", "slice updates", "plan writes", "plan statuses"]
    titles = ["acceptance", *titles, "refused by fence", "overlaps", "rejected though it fits"]
    cells = [_real_cells(result) for result in results]
    lines = [f"{results[0].mix:{NAME}}" + "".join(f"{result.mode:>34}" for result in results)]
    for number, title in enumerate(titles):
        lines.append(f"{title:{NAME}}" + "".join(f"{column[number]:>34}" for column in cells))
    for request in results[0].by_request:
        shares = "".join(f"{result.by_request[request]:34.3f}" for result in results)
        lines.append(f"{'acceptance of ' + request:{NAME}}{shares}")
    for title in ("kube-apiserver", "tessera-controller"):
        shares = "".join(f"{result.cpu_s.get(title, 0.0):34.1f}" for result in results)
        lines.append(f"{'CPU s of ' + title:{NAME}}{shares}")
    simulated = ("-" if each.simulated is None else f"{each.simulated:.3f}" for each in results)
    lines.append(f"{'acceptance in the simulation':{NAME}}" + "".join(f"{cell:>34}" for cell in simulated))
    lines.append(f"{results[0].arrivals} arrivals, {results[0].counted} counted; updates and writes are per allocation")
    return "\n".join(lines)


def _real_cells(result: RealResult) -> list[str]:
    refused = f"{result.fence_refusals} ({result.fence_refusals / max(result.allocations, 1):.2%})"
    cells = [
        f"{result.acceptance:.3f}",
        f"{result.held:.3f}",
        f"{result.p50_ms:.0f} / {result.p99_ms:.0f}",
        f"{result.cpu_s['kube-scheduler']:.1f}",
        f"{result.slice_updates:.2f}",
        f"{result.plan_writes:.2f}",
        f"{result.plan_statuses:.2f}",
        refused,
        str(len(result.overlaps)),
        str(result.fitted),
    ]
    known = PROTOTYPE.get(result.mode) if result.mix == "uniform" else None
    return [f"{cell} ({other})" for cell, other in zip(cells, known, strict=True)] if known else cells
