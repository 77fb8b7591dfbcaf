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
            f"{mean(each.before_refusal for each in found):.3f}",
            f"{mean(each.end for each in found):.3f}",
            f"{mean(each.refused for each in found):.1f}",
        ]
        for name, found in results.items()
    ]
    return columns(["WHO DECIDES", "HELD AT FIRST REFUSAL", "HELD AT THE END", "REFUSED"], rows)


def churnings(results: Mapping[str, Sequence[Churning]]) -> str:
    """A line for each way to decide; means over the seeds, with the admitted part of each size of request."""
    sizes = sizes_of(results)
    rows = [
        [
            name,
            f"{mean(each.held for each in found):.3f}",
            f"{mean(each.admitted for each in found):.4f}",
            *(f"{admitted(found, size):.3f}" for size in sizes),
        ]
        for name, found in results.items()
    ]
    return columns(["WHO DECIDES", "HELD", "ADMITTED", *map(str, sizes)], rows)


def sizes_of(results: Mapping[str, Sequence[Churning]]) -> list[Request]:
    """The requests of all results, partitions first."""
    requests = {request for found in results.values() for each in found for request in each.by_request}
    return sorted(requests, key=lambda request: (request.count, request.key.profile is None, str(request.key)))


def admitted(found: Sequence[Churning], size: Request) -> float:
    """The admitted part of the requests of one size, on average over the seeds in which there were any."""
    return mean(each.by_request[size] for each in found if size in each.by_request)
