"""How long it takes to ask eight GPUs what they are, as at every start and rescan of the node plugin."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from driver.simulator.description import load_description
from tests.support.published import simulated_host

NODE = "dgx-h100"
RUNS = 20


def discovery_ms() -> float:
    """Median milliseconds of one look at all GPUs of a DGX H100, NVML answering at once; one look before warms up."""
    with tempfile.TemporaryDirectory() as folder, simulated_host(load_description(NODE), Path(folder)) as host:
        times = []
        for _ in range(RUNS + 1):
            began = time.perf_counter()
            found = host.discover()
            times.append((time.perf_counter() - began) * 1000)
            if found.faults or len(found.gpus) != len(load_description(NODE).gpus):
                raise RuntimeError(f"discovery found {len(found.gpus)} GPUs and {found.faults}")
    return statistics.median(times[1:])
