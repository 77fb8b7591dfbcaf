"""A Prometheus with what was measured just now, as if it had lasted for a day: for commands that need a day of data."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.harness.prometheus import running

HOURS = 25
STEP_S = 60
SLICES, ALLOCATED = "tessera_claim_slices", "tessera_claim_allocated_slice_seconds_total"
GAUGES = (
    SLICES,
    "tessera_claim_memory_used_bytes",
    "tessera_claim_sm_active_ratio",
    "tessera_claim_dram_active_ratio",
    "tessera_gpu_memory_slices",
)


class Measured(NamedTuple):
    """One sample of a page of metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


@contextmanager
def day_of(measured: Iterable[Measured], programs: Path, folder: Path) -> Iterator[str]:
    """The address of a Prometheus in which all ``measured`` gauges have been the same for 25 hours."""
    folder.mkdir()
    samples = folder / "samples"
    samples.write_text("\n".join(_openmetrics(list(measured), time.time())))
    command = ["tsdb", "create-blocks-from", "openmetrics", str(samples), str(folder / "data")]
    subprocess.run([str(programs / "promtool"), *command], check=True, capture_output=True)
    with running(programs, folder) as address:
        yield address


def _openmetrics(measured: list[Measured], now: float) -> Iterator[str]:
    moments = [now - HOURS * 3600 + step * STEP_S for step in range(HOURS * 3600 // STEP_S + 1)]
    for gauge in GAUGES:
        yield f"# TYPE {gauge} gauge"
        for name, labels, value in measured:
            if name == gauge:
                yield from (f"{name}{_text(labels)} {value} {at:.3f}" for at in moments)
    yield f"# TYPE {ALLOCATED.removesuffix('_total')} counter"
    for name, labels, value in measured:
        if name == SLICES:
            yield from (f"{ALLOCATED}{_text(labels)} {value * (at - moments[0])} {at:.3f}" for at in moments)
    yield from ("# EOF", "")


def _text(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in sorted(labels.items())) + "}"
