"""The results as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from tessera.tables_and_drawings import columns
from tests.bench.placement.trace import Request
from tests.bench.public_trace.replays import Churning, Filling


def fillings(results: Mapping[str, Sequence[Filling]]) -> str:
    """A line for each way to decide; means over the seeds."""
    rows = [
        [
            name,
            f"{mean(seed.before_refusal for seed in seeds):.3f}",
            f"{mean(seed.end for seed in seeds):.3f}",
            f"{mean(seed.refused for seed in seeds):.1f}",
        ]
        for name, seeds in results.items()
    ]
    return columns(["WHO DECIDES", "HELD AT FIRST REFUSAL", "HELD AT THE END", "REFUSED"], rows)


def churnings(results: Mapping[str, Sequence[Churning]]) -> str:
    """A line for each way to decide; means over the seeds, with the admitted part of each size of request."""
    sizes = sizes_of(results)
    rows = [
        [
            name,
            f"{mean(seed.held for seed in seeds):.3f}",
            f"{mean(seed.admitted for seed in seeds):.4f}",
            *(f"{admitted(seeds, size):.3f}" for size in sizes),
        ]
        for name, seeds in results.items()
    ]
    return columns(["WHO DECIDES", "HELD", "ADMITTED", *map(str, sizes)], rows)


def sizes_of(results: Mapping[str, Sequence[Churning]]) -> list[Request]:
    """The requests of all results, partitions first."""
    requests = {request for seeds in results.values() for seed in seeds for request in seed.by_request}
    return sorted(requests, key=lambda request: (request.count, request.key.profile is None, str(request.key)))


def admitted(seeds: Sequence[Churning], size: Request) -> float:
    """The admitted part of the requests of one size, on average over the seeds in which there were any."""
    return mean(seed.by_request[size] for seed in seeds if size in seed.by_request)
