"""The results as a table."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.tables_and_drawings import columns
from tests.bench.scale.layouts import Layout
from tests.bench.scale.measure import Found
from tests.bench.scale.pods import Burst

RATES = ("1g.10gb/s", "MIX/s", "BESIDE PARKED/s")
COSTS = ("SCHEDULER ms/POD", "MEMORY MiB", "TESSERA ms/POD", "WRITES/POD", "SLICE UPDATES")
HEADER = ("NODES", "LAYOUT", "DEVICES", *RATES, *COSTS)


def table(results: Sequence[Found]) -> str:
    """A line for each layout; in brackets how many times the peer's, of the same run.

    ``SCHEDULER ms/POD`` is CPU of the first burst, ``TESSERA ms/POD`` that of controller and simulated fleet over all
    bursts, ``WRITES/POD`` what the API server answered to everybody over all bursts.
    """
    return columns(HEADER, [_row(each, _peer(results, each.nodes)) for each in results])


def ratio(value: float, base: float) -> float | None:
    """``value`` in terms of ``base``; None where nothing is known of that."""
    return value / base if base else None


def _peer(results: Sequence[Found], nodes: int) -> Found | None:
    return next((each for each in results if each.nodes == nodes and each.layout == Layout.PEER.value), None)


def _row(found: Found, peer: Found | None) -> list[str]:
    rates = [
        _rate(found.small, peer.small if peer else None),
        _rate(found.mix, peer.mix if peer else None),
        _rate(found.small_beside_parked, peer.small_beside_parked if peer else None),
    ]
    memory = _beside(f"{found.cost.peak_mib:.0f}", ratio(found.cost.peak_mib, peer.cost.peak_mib) if peer else None, 2)
    scheduler = _a_pod(found.small.scheduler_cpu_s * 1000, found.small.bound)
    bound = sum(burst.bound for burst in found.bursts)
    tessera = _a_pod(sum(burst.tessera_cpu_s for burst in found.bursts) * 1000, bound)
    writes = _a_pod(sum(sum(burst.writes.values()) for burst in found.bursts), bound)
    costs = [scheduler, memory, tessera, writes, str(found.slice_updates)]
    return [str(found.nodes), found.layout, str(found.devices), *rates, *costs]


def _a_pod(total: float, bound: int) -> str:
    """``total`` for each bound pod; a dash where nothing was counted."""
    return f"{total / bound:.1f}" if total and bound else "-"


def _rate(burst: Burst, peer: Burst | None) -> str:
    times = ratio(burst.pods_a_second, peer.pods_a_second) if peer else None
    return _beside(f"{burst.pods_a_second:.1f}", times, 1)


def _beside(text: str, times: float | None, digits: int) -> str:
    return text if times is None else f"{text} ({times:.{digits}f} x)"
