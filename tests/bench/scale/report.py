"""The results as a table."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.tables_and_drawings import columns
from tests.bench.scale.layouts import Layout
from tests.bench.scale.measure import Found
from tests.bench.scale.pods import Burst

HEADER = ("NODES", "LAYOUT", "DEVICES", "1g.10gb/s", "MIX/s", "BESIDE PARKED/s", "CPU ms/POD", "MEMORY MiB", "UPDATES")


def table(results: Sequence[Found]) -> str:
    """A line for each layout; in brackets how many times the peer's, of the same run."""
    return columns(HEADER, [_row(each, _peer(results, each.nodes)) for each in results])


def ratio(value: float, base: float) -> float | None:
    """``value`` in terms of ``base``; None where nothing is known of that."""
    return value / base if base else None


def _peer(results: Sequence[Found], nodes: int) -> Found | None:
    return next((each for each in results if each.nodes == nodes and each.layout == Layout.PEER.value), None)


def _row(found: Found, peer: Found | None) -> list[str]:
    bursts = [
        _rate(found.small, peer.small if peer else None),
        _rate(found.mix, peer.mix if peer else None),
        _rate(found.small_beside_parked, peer.small_beside_parked if peer else None),
    ]
    memory = _beside(f"{found.cost.peak_mib:.0f}", ratio(found.cost.peak_mib, peer.cost.peak_mib) if peer else None, 2)
    cpu = found.small.scheduler_ms_a_pod
    told = "-" if cpu is None else f"{cpu:.1f}"
    return [str(found.nodes), found.layout, str(found.devices), *bursts, told, memory, str(found.slice_updates)]


def _rate(burst: Burst, peer: Burst | None) -> str:
    times = ratio(burst.pods_a_second, peer.pods_a_second) if peer else None
    return _beside(f"{burst.pods_a_second:.1f}", times, 1)


def _beside(text: str, times: float | None, digits: int) -> str:
    return text if times is None else f"{text} ({times:.{digits}f} x)"
