"""The scheduler's process: what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.bench.usage import cpu_s, memory_mb
from tests.harness.processes import ProcessRecord

CLIENT_LIMITS = ("--kube-api-qps=2000", "--kube-api-burst=4000")
"""With the defaults of 50 and 100 requests a second it can't bind more than 13 pods with a claim each."""

EXTRA_ARGS: Mapping[str, Sequence[str]] = {
    "kube-scheduler": CLIENT_LIMITS,
    "etcd": ("--quota-backend-bytes=8589934592",),
    "kube-apiserver": ("--max-requests-inflight=800", "--max-mutating-requests-inflight=400"),
    "kube-controller-manager": ("--kube-api-qps=1000", "--kube-api-burst=2000"),
}


@dataclass(frozen=True)
class Cost:
    """CPU in seconds since its start; memory in MiB, now and at most."""

    cpu_s: float
    resident_mib: float
    peak_mib: float


def cost(scheduler: ProcessRecord) -> Cost:
    """What the process has used so far (``/proc``)."""
    pid = scheduler.pid
    return Cost(cpu_s(pid), memory_mb(pid), memory_mb(pid, "VmHWM"))
