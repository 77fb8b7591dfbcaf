"""The load of one simulated GPU and its MIG devices, and the counters that it drives.

A load repeats its phases from the moment when it was set. A counter at time t is the integral of the activity until t,
in closed form: nothing runs between two calls, and any number of processes read the same values. What ended loads
contributed is kept, so that counters never go back.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import pairwise
from math import floor
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from driver.errors import UsageError

WHOLE_GPU = ""
"""The device of a load on the GPU as a whole; others are UUIDs of MIG devices."""

LOAD_PID = (1 << 22) + 1
"""Default process id of a load: above the highest that Linux gives."""


RATIOS = ("sm", "occupancy", "tensor", "dram")


class SimulatedActivity(NamedTuple):
    """Activity at one moment, or its integral over time.

    Ratios (0 to 1) are those of the device; ``busy``: some kernel runs. NVLink and PCIe count bytes per second, both
    directions together.
    """

    busy: float = 0.0
    sm: float = 0.0
    occupancy: float = 0.0
    tensor: float = 0.0
    dram: float = 0.0
    nvlink: float = 0.0
    pcie: float = 0.0

    @classmethod
    def of(cls, sm: float = 0.0, *, dram: float = 0.0, **others: float) -> SimulatedActivity:
        """The activity of a program, which keeps the device busy with its SMs or its memory."""
        return cls(float(sm > 0 or dram > 0), sm, dram=dram, **others)

    def plus(self, other: SimulatedActivity, factor: float = 1.0) -> SimulatedActivity:
        """This activity and ``factor`` times the other."""
        return SimulatedActivity(*(mine + factor * its for mine, its in zip(self, other, strict=True)))

    def part(self, compute: float, memory: float) -> SimulatedActivity:
        """The activity as a part of a larger device, of which this one has these parts of compute and memory."""
        ratios = (self.busy * compute, self.sm * compute, self.occupancy * compute, self.tensor * compute)
        return SimulatedActivity(*ratios, self.dram * memory, self.nvlink, self.pcie)


class Phase(msgspec.Struct, frozen=True, rename="camel"):
    """A constant load for some seconds."""

    seconds: float
    activity: SimulatedActivity
    memory: int = 0


class Load(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A process that loads a device since some time (seconds since the epoch), repeating its phases.

    ``compute`` and ``memory`` are the device's parts of the GPU: of its compute slices and its memory slices.
    ``cgroup`` is the directory of the process's cgroup; empty: no limit on memory holds it.
    ``server`` is the process id of the MPS server whose client the process is, 0: none; ``until`` when the process
    ended with it, None: it runs.
    """

    phases: tuple[Phase, ...]
    device: str = WHOLE_GPU
    pid: int = LOAD_PID
    since: float = 0.0
    compute: float = 1.0
    memory: float = 1.0
    cgroup: str = ""
    server: int = 0
    until: float | None = None

    @property
    def period(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    def integral(self, now: float) -> SimulatedActivity:
        """The activity since the start of the load, in seconds and bytes."""
        repeats, seconds = self._position(now)
        total = SimulatedActivity()
        for phase in self.phases:
            inside = min(seconds, phase.seconds)
            total = total.plus(phase.activity, repeats * phase.seconds + inside)
            seconds -= inside
        return total

    def memory_at(self, now: float) -> int:
        """Bytes of GPU memory that the process uses."""
        _, seconds = self._position(now)
        for phase in self.phases:
            if seconds < phase.seconds:
                return phase.memory
            seconds -= phase.seconds
        return self.phases[0].memory

    @property
    def highest_memory(self) -> int:
        return max(phase.memory for phase in self.phases)

    def highest(self, name: str) -> float:
        """The highest value of one activity."""
        return max(float(getattr(phase.activity, name)) for phase in self.phases)

    def _position(self, now: float) -> tuple[int, float]:
        """Complete repetitions, and seconds since the last began."""
        elapsed = max(0.0, (now if self.until is None else min(now, self.until)) - self.since)
        repeats = floor(elapsed / self.period)
        return repeats, max(0.0, elapsed - repeats * self.period)


class Loads(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """All loads of one GPU. ``ended``: what loads that ended contributed to the counters, by device."""

    running: tuple[Load, ...] = ()
    ended: dict[str, SimulatedActivity] = {}

    def put(self, load: Load) -> Loads:
        """Start a load; it replaces the one of the same device and process id."""
        kept = self.end(load.device, load.since, load.pid)
        return replace(kept, running=(*kept.running, load))

    def end(self, device: str, now: float, pid: int | None = None) -> Loads:
        """End the loads of a device; with ``pid`` only that one."""
        ended = [load for load in self.running if load.device == device and pid in (None, load.pid)]
        return self._without(ended, now)

    def end_on_missing(self, present: Container[str], now: float) -> Loads:
        """End the loads of devices that do not exist any more, and drop their counters; those of the GPU stay."""
        remaining = self._without([load for load in self.running if load.device not in present], now)
        ended = {device: total for device, total in remaining.ended.items() if device in present or device == WHOLE_GPU}
        return remaining if ended == remaining.ended else replace(remaining, ended=ended)

    def on(self, device: str) -> Iterator[Load]:
        """The loads of a device that have not ended with their MPS server."""
        return (load for load in self.running if load.device == device and load.until is None)

    def counters(self, device: str, now: float) -> SimulatedActivity:
        """Integrals of a device's activity; those of the whole GPU include its MIG devices."""
        total = self.ended.get(device, SimulatedActivity())
        for load in self.running:
            if load.device == device:
                total = total.plus(load.integral(now))
            elif device == WHOLE_GPU:
                total = total.plus(load.integral(now).part(load.compute, load.memory))
        return total

    def _without(self, loads: list[Load], now: float) -> Loads:
        if not loads:
            return self
        ended = dict(self.ended)
        for load in loads:
            total = load.integral(now)
            ended[load.device] = ended.get(load.device, SimulatedActivity()).plus(total)
            if load.device != WHOLE_GPU:
                of_gpu = total.part(load.compute, load.memory)
                ended[WHOLE_GPU] = ended.get(WHOLE_GPU, SimulatedActivity()).plus(of_gpu)
        running = tuple(load for load in self.running if load not in loads)
        return Loads(running, ended)


def check_activity(loads: Sequence[Load], *, nvlink: bool) -> None:
    """Check what all loads of one device may be at once, the last one new.

    :raises UsageError: a ratio above 1 together, or NVLink on a GPU without it
    """
    *others, new = loads
    for name in RATIOS:
        value, taken = new.highest(name), sum(load.highest(name) for load in others)
        if not 0 <= value <= 1 - taken + 1e-9:
            also = f": other loads of the device take {taken:g}" if taken else ""
            raise UsageError(f"{name}: {value:g} is not accepted; 0 to {1 - taken:g}{also}")
    if new.highest("nvlink") and not nvlink:
        raise UsageError("nvlink: the GPU has no NVLink; accepted: 0")


def check_memory(new: Load, others: Sequence[Load], size: int) -> None:
    """Check that the memory of all loads of a device fits into ``size`` bytes. Raises UsageError: it does not."""
    free = size - sum(load.highest_memory for load in others)
    if new.highest_memory > free:
        also = ", which other processes and loads leave" if others else ""
        raise UsageError(f"memory: {new.highest_memory >> 20}Mi is not accepted; up to {free >> 20}Mi{also}")


def constant(activity: SimulatedActivity, memory: int = 0) -> tuple[Phase, ...]:
    """The phases of a load that does not change."""
    return (Phase(1.0, activity, memory),)


def duty(activity: SimulatedActivity, memory: int, fraction: float, period: float) -> tuple[Phase, ...]:
    """The phases of a load that is active during the first ``fraction`` of each period; its memory stays."""
    parts = ((fraction * period, activity), ((1 - fraction) * period, SimulatedActivity()))
    return tuple(Phase(seconds, what, memory) for seconds, what in parts if seconds > 0)


def steps(points: list[tuple[float, SimulatedActivity, int]]) -> tuple[Phase, ...]:
    """Phases of points (second, activity, memory); each lasts until the next, the last as long as the one before."""
    seconds = [later[0] - earlier[0] for earlier, later in pairwise(points)] or [1.0]
    return tuple(Phase(time, *point[1:]) for time, point in zip([*seconds, seconds[-1]], points, strict=False))
