"""How much of its GPU a claim uses: what NVML says at one moment, and what adds up over time.

Ratios are 0 to 1, times seconds, memory bytes. None is unknown, never zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

ACTIVE_RATIO = 0.01
"""A device is idle as long as neither its SMs nor its memory bandwidth are used more than this."""

FULL_RATIO = 0.97
"""From this share of its memory on, a partition counts as full."""


@dataclass(frozen=True, slots=True)
class UsageTarget:
    """What NVML measures: a GPU, or one of its GPU instances with the UUID of its MIG device.

    A later instance with the same id has another UUID, so samples of the two are never compared.
    """

    gpu_uuid: str
    gpu_instance_id: int | None = None
    mig_uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Activity:
    """Averages between two samples, ``seconds`` apart; NVLink and PCIe in bytes per second, both directions."""

    seconds: float
    sm: float | None = None
    occupancy: float | None = None
    tensor: float | None = None
    dram: float | None = None
    nvlink: float | None = None
    pcie: float | None = None

    @property
    def busiest(self) -> float | None:
        """The larger of SM and memory-bandwidth activity."""
        ratios = [ratio for ratio in (self.sm, self.dram) if ratio is not None]
        return max(ratios) if ratios else None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with GPU memory; ``memory`` is None where the driver does not tell it."""

    pid: int
    memory: int | None


@dataclass(frozen=True, slots=True)
class UsageReading:
    """One reading of a target. ``utilization`` is the share of the driver's last sampling period (at most a second)
    in which any kernel ran; it is read only where there is no activity."""

    memory_used: int | None = None
    memory_total: int | None = None
    processes: Sequence[GpuProcess] | None = None
    activity: Activity | None = None
    utilization: float | None = None

    @property
    def full(self) -> bool:
        return bool(self.memory_total) and (self.memory_used or 0) >= FULL_RATIO * (self.memory_total or 0)


class UsageTotals(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What one device of a claim has used so far. ``counted_at`` and ``active_at`` are seconds since boot.

    ``allocated``, ``measured`` and ``used`` are slice-seconds: memory slices x seconds. ``measured`` counts the time of
    known activity, ``used`` the same x the larger of SM and memory-bandwidth activity. ``nvlink``, ``pcie`` are bytes.
    """

    slices: float
    counted_at: float
    active_at: float
    allocated: float = 0.0
    measured: float | None = None
    used: float | None = None
    nvlink: float | None = None
    pcie: float | None = None

    def counted(self, now: float) -> UsageTotals:
        """With the time until ``now`` counted as allocated; a time before the last one changes nothing."""
        seconds = max(0.0, now - self.counted_at)
        return replace(self, counted_at=self.counted_at + seconds, allocated=self.allocated + self.slices * seconds)

    def with_activity(self, activity: Activity, now: float) -> UsageTotals:
        """With ``activity`` added, which ended at ``now``. Where it is unknown, the device does not count as idle."""
        busiest = activity.busiest
        return replace(
            self,
            measured=_sum(self.measured, None if busiest is None else 1.0, self.slices * activity.seconds),
            used=_sum(self.used, busiest, self.slices * activity.seconds),
            nvlink=_sum(self.nvlink, activity.nvlink, activity.seconds),
            pcie=_sum(self.pcie, activity.pcie, activity.seconds),
            active_at=now if busiest is None or busiest > ACTIVE_RATIO else self.active_at,
        )

    def resumed(self, now: float) -> UsageTotals:
        """Going on at ``now``, without the time between: its claim was not prepared, or the clock started over."""
        return replace(self, counted_at=now, active_at=now)


def _sum(total: float | None, rate: float | None, factor: float) -> float | None:
    return total if rate is None else (total or 0.0) + rate * factor
