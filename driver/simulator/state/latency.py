"""How long operations and NVML calls take on a simulated GPU: the sets that ``--sim-latency`` names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from driver.errors import UsageError

H200_CALLS = {
    "nvmlInit": 9_100e-6,
    "nvmlDeviceGetMigMode": 159e-6,
    "nvmlDeviceGetEccMode": 151e-6,
    "nvmlDeviceGetMaxClockInfo": 1_400e-6,
    "nvmlDeviceGetMemoryBusWidth": 181e-6,
    "nvmlDeviceGetGpuInstanceProfileInfo": 490e-6,
    "nvmlDeviceGetGpuInstancePossiblePlacements": 415e-6,
    "nvmlDeviceGetGpuInstances": 332e-6,
    "nvmlGpmMetricsGet": 3_600e-6,
    # Estimates, after the same calls for a whole GPU: the machine that was measured was not cut.
    "nvmlGpuInstanceGetComputeInstanceProfileInfo": 490e-6,
    "nvmlGpuInstanceGetComputeInstances": 332e-6,
}
"""Seconds of calls that reach the GPU's firmware, on an H200 with driver 580 (best of 5). Others take microseconds."""

SLEEP_OVERSHOOT_SECONDS = 60e-6
"""How much longer than asked a short sleep takes: the kernel's timer slack."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds that each operation takes on the simulated GPU; ``calls``: those of NVML calls, by name.

    Sources: public logs of an A100 (enabling MIG mode 6.5 s, reset included; creating seven 1g partitions 2.5 s,
    destroying them 4.4 s). How these times divide between the two kinds of instance, and the mode switch of Hopper, are
    estimates.
    """

    mode_with_reset: float = 6.5
    mode_without_reset: float = 1.0
    create_gpu_instance: float = 0.307
    create_compute_instance: float = 0.05
    destroy_gpu_instance: float = 0.579
    destroy_compute_instance: float = 0.05
    calls: Mapping[str, float] = field(default_factory=dict)


DEFAULT_LATENCY = Latency()
ZERO_LATENCY = Latency(0, 0, 0, 0, 0, 0)
MEASURED_LATENCY = replace(DEFAULT_LATENCY, calls=H200_CALLS)

_NAMED = {"default": DEFAULT_LATENCY, "zero": ZERO_LATENCY, "measured": MEASURED_LATENCY}


def parse_latency(text: str) -> Latency:
    """Parse the name of a set of latencies.

    "default": operations that reconfigure a GPU take as long as on hardware. "zero": nothing takes time, for tests and
    benchmarks. "measured": like "default", and NVML calls take as long as on an H200.

    :raises UsageError: any other name
    """
    if text not in _NAMED:
        raise UsageError(f"no latency {text!r}; known: {', '.join(_NAMED)}")
    return _NAMED[text]


def take(seconds: float) -> None:
    """Let ``seconds`` pass, to a few microseconds."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - SLEEP_OVERSHOOT_SECONDS))
    while time.perf_counter() < end:
        pass
