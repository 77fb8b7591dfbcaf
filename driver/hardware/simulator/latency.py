"""How long a simulated operation takes, in seconds. Only what reconfigures the GPU takes time: real NVML
queries answer in microseconds, and so do the simulated ones.

Sources: public logs quoted in the project's hardware reference. A100: enabling MIG mode 6.5 s; creating seven
1g partitions (GPU instance and compute instance) 2.5 s, destroying them 4.4 s. Their split between
the two kinds of instance and the mode switch of Hopper are estimates; nobody published them.
"""

from __future__ import annotations

from dataclasses import dataclass

from driver.errors import UsageError


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds each operation takes on the simulated GPU."""

    mode_with_reset: float = 6.5
    """Ampere's switch of MIG mode, GPU reset included (public log, A100)."""
    mode_without_reset: float = 1.0
    """Hopper's and newer GPUs' switch of MIG mode (an estimate: a sixth of the reset)."""
    create_gpu_instance: float = 0.307
    """2.5 s / 7 less the compute instance (public log, A100)."""
    create_compute_instance: float = 0.05
    """An estimate: the small part of a partition's 0.357 s."""
    destroy_gpu_instance: float = 0.579
    """4.4 s / 7 less the compute instance (public log, A100)."""
    destroy_compute_instance: float = 0.05
    """An estimate: the small part of a partition's 0.629 s."""


DEFAULT_LATENCY = Latency()
ZERO_LATENCY = Latency(0, 0, 0, 0, 0, 0)

_NAMED = {"default": DEFAULT_LATENCY, "zero": ZERO_LATENCY}


def parse_latency(text: str) -> Latency:
    """The latencies of that name: "default" as hardware, "zero" for tests and benchmarks.

    :raises UsageError: any other name
    """
    if text not in _NAMED:
        raise UsageError(f"no latency {text!r}; known: {', '.join(_NAMED)}")
    return _NAMED[text]
