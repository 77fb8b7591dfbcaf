"""The simulated machine behind the NVML functions: the GPUs, their states on disk, and the latency of operations.

Each GPU has one state file, ``<root>/sim/gpu-<minor>.json``, which is replaced as a whole: a reader sees the state
before or after a change, never a mixture, even if the writer is killed. Writers of one GPU take turns with ``flock``
on ``gpu-<minor>.lock``, which the kernel releases when its holder dies; readers take no lock. Nothing is fsynced: a
power cut also ends the MIG instances of a real GPU.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import pynvml

from driver.errors import StateError, UsageError
from driver.simulator.description import GpuDescription, NodeDescription
from driver.simulator.faults import NO_FAULTS, RECOVERY_SINCE, FaultFile, InjectedFaults, SimulatedEvent
from driver.simulator.tree import Capabilities, swap_in


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds that each operation takes on the simulated GPU.

    Only operations that reconfigure the GPU take time: real NVML queries answer in microseconds. Sources: public logs
    of an A100 (enabling MIG mode 6.5 s; creating seven 1g partitions 2.5 s, destroying them 4.4 s). How these times
    divide between the two kinds of instance, and the mode switch of Hopper, are estimates.
    """

    mode_with_reset: float = 6.5
    """MIG mode switch of Ampere, GPU reset included (public log, A100)."""
    mode_without_reset: float = 1.0
    """MIG mode switch of Hopper and newer (an estimate: a sixth of the reset)."""
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
    """Parse the name of a set of latencies: "default" like hardware, "zero" for tests and benchmarks.

    :raises UsageError: any other name
    """
    if text not in _NAMED:
        raise UsageError(f"no latency {text!r}; known: {', '.join(_NAMED)}")
    return _NAMED[text]


# Enough that a listener which polls every few milliseconds misses none.
_KEPT_EVENTS = 16


class Process(msgspec.Struct, frozen=True, rename="camel"):
    """A process that uses a GPU or a MIG device: pid and bytes of GPU memory."""

    pid: int
    memory: int


class ComputeInstance(msgspec.Struct, frozen=True, rename="camel"):
    """A compute instance: one MIG device. ``start`` and ``size`` count compute slices of its GPU instance.

    ``index`` is the MIG device's NVML index on its GPU. It does not change, so destroying others leaves gaps.
    """

    id: int
    profile: int
    start: int
    size: int
    uuid: str
    index: int
    processes: tuple[Process, ...] = ()


class GpuInstance(msgspec.Struct, frozen=True, rename="camel"):
    """A GPU instance on memory slices [start, start + size). ``serial`` distinguishes it from a later one
    with the same id."""

    id: int
    serial: int
    profile: int
    start: int
    size: int
    compute: tuple[ComputeInstance, ...] = ()


class SimulatedGpuState(msgspec.Struct, frozen=True, rename="camel"):
    """The variable state of one GPU. ``events`` are the most recent ones, oldest first.

    ``compute_mode`` and ``time_slice`` are NVML's and nvidia-smi's numbers, 0 the default; ``recovery_action`` is
    NVML's number of what the GPU needs to recover, 0 nothing.
    """

    mig_enabled: bool = False
    mig_pending: bool = False
    compute_mode: int = 0
    time_slice: int = 0
    next_serial: int = 1
    instances: tuple[GpuInstance, ...] = ()
    processes: tuple[Process, ...] = ()
    next_event: int = 1
    events: tuple[SimulatedEvent, ...] = ()
    recovery_action: int = 0

    @property
    def instance_ids(self) -> dict[int, tuple[int, ...]]:
        """Ids of the compute instances, by id of their GPU instance."""
        return {gi.id: tuple(ci.id for ci in gi.compute) for gi in self.instances}

    def with_event(self, event: SimulatedEvent) -> SimulatedGpuState:
        """Return the state with the event appended under the next event number."""
        numbered = msgspec.structs.replace(event, number=self.next_event)
        kept = (*self.events, numbered)[-_KEPT_EVENTS:]
        return msgspec.structs.replace(self, events=kept, next_event=self.next_event + 1)


_STATE = msgspec.json.Decoder(SimulatedGpuState)


class GpuFile:
    """The state file of one GPU. Safe to share between threads and processes."""

    def __init__(self, directory: Path, minor: int) -> None:
        self.path = directory / f"gpu-{minor}.json"
        self._lock_path = str(directory / f"gpu-{minor}.lock")
        self._text_path = str(self.path)
        self._temporary = f"{self.path}.new"
        self._cached: tuple[bytes, SimulatedGpuState] | None = None

    def read(self) -> SimulatedGpuState:
        """Read the current state; takes about 15 microseconds.

        :raises StateError: the file is missing or was damaged by someone else
        """
        try:
            content = self._content()
            cached = self._cached
            if cached is not None and cached[0] == content:
                return cached[1]
            state = _STATE.decode(content)
        except (OSError, msgspec.MsgspecError) as error:
            raise StateError(f"state of a simulated GPU, {self.path}: {error}") from error
        self._cached = (content, state)
        return state

    def write(self, state: SimulatedGpuState) -> None:
        """Replace the state. Only for the holder of :meth:`locked`."""
        content = msgspec.json.encode(state)
        # An explicit mode: the umask of a test or a container may allow everybody to write.
        descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, content)
        finally:
            os.close(descriptor)
        swap_in(self._temporary, self._text_path)
        self._cached = (content, state)

    @contextmanager
    def locked(self) -> Iterator[SimulatedGpuState]:
        """Hold the GPU's lock and yield its state; other GPUs are not affected."""
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield self.read()
        finally:
            os.close(descriptor)

    def _content(self) -> bytes:
        descriptor = os.open(self._text_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Seven instances take 2 KiB; a longer file would fail to parse.
            return os.read(descriptor, 1 << 16)
        finally:
            os.close(descriptor)


T = TypeVar("T")


class Machine:
    """The hardware of one node. GPUs are numbered by minor; NVML indices differ once a GPU was removed."""

    def __init__(
        self, description: NodeDescription, root: Path, latency: Latency, sleep: Callable[[float], None]
    ) -> None:
        self.description = description
        self.product = description.gpu_product
        self.root = root
        self.latency = latency
        self.faults = FaultFile(root / "sim")
        self._sleep = sleep
        self._capabilities = Capabilities(root)
        self._seen: InjectedFaults = NO_FAULTS
        self._gpus = description.gpus
        self._present = list(range(len(self._gpus)))
        self._refresh_lock = threading.Lock()
        self._uuids: list[str] = []
        self._files: list[GpuFile] = []
        self._open_state_files()

    @property
    def gpus(self) -> tuple[GpuDescription, ...]:
        """All GPUs by minor, removed ones included: those of the description, then those added."""
        self._refresh()
        return self._gpus

    @property
    def uuids(self) -> list[str]:
        """UUIDs by minor."""
        self._refresh()
        return self._uuids

    @property
    def present(self) -> list[int]:
        """Minors of the present GPUs, in the order of their NVML indices."""
        self._refresh()
        return self._present

    @property
    def current_description(self) -> NodeDescription:
        """The description, including added GPUs."""
        return self.description.replaced(gpus=self.gpus)

    def initialise(self) -> None:
        """Create missing state files, and repair what a killed process left incomplete."""
        for minor in range(len(self.gpus)):
            self.prepare_gpu(minor)

    def prepare_gpu(self, minor: int) -> None:
        """Do the same for one GPU."""
        file = GpuFile(self.root / "sim", minor)
        if not file.path.exists():
            file.write(SimulatedGpuState())
        self._change(minor, file, lambda state: (state, None), 0.0, None)

    def uuid(self, minor: int) -> str:
        """UUID of a GPU."""
        return self._uuids[minor]

    def state(self, minor: int) -> SimulatedGpuState:
        """The current state of a GPU."""
        return self._files[minor].read()

    def change(
        self,
        minor: int,
        rule: Callable[[SimulatedGpuState], tuple[SimulatedGpuState, T]],
        seconds: float = 0.0,
        *,
        event: SimulatedEvent | None = None,
    ) -> T:
        """Apply ``rule`` to the GPU's state and store the result; return the second value of ``rule``.

        The change takes ``seconds``, during which other writers of this GPU wait, as in the real driver; readers and
        other GPUs do not wait. If ``rule`` raises, the state does not change. ``event`` is recorded if MIG mode or
        instances change.
        """
        return self._change(minor, self._files[minor], rule, seconds, event)

    @property
    def reports_recovery_action(self) -> bool:
        """Whether the driver is new enough to report recovery actions."""
        return self.description.driver_major >= RECOVERY_SINCE

    def set_recovery_action(self, minor: int, action: int) -> None:
        """Set NVML's recovery action of a GPU; a change is an event."""
        event = SimulatedEvent(0, pynvml.nvmlEventTypeGpuRecoveryAction)

        def rule(state: SimulatedGpuState) -> tuple[SimulatedGpuState, None]:
            if state.recovery_action == action:
                return state, None
            return msgspec.structs.replace(state, recovery_action=action).with_event(event), None

        self.change(minor, rule)

    def reconfigure(
        self, minor: int, rule: Callable[[SimulatedGpuState], tuple[SimulatedGpuState, T]], seconds: float
    ) -> T:
        """Apply a :meth:`change` that is reported as a MIG configuration event."""
        return self.change(minor, rule, seconds, event=SimulatedEvent(0, pynvml.nvmlEventMigConfigChange))

    def record_event(self, minor: int, event: SimulatedEvent) -> None:
        """Record an event on a GPU."""
        self.change(minor, lambda state: (state.with_event(event), None))

    def _change(
        self,
        minor: int,
        file: GpuFile,
        rule: Callable[[SimulatedGpuState], tuple[SimulatedGpuState, T]],
        seconds: float,
        event: SimulatedEvent | None,
    ) -> T:
        with file.locked() as state:
            changed, result = rule(state)
            if changed is not state and seconds > 0:
                self._sleep(seconds)
            if event is not None and _layout(changed) != _layout(state):
                changed = changed.with_event(event)
            # In this order a reader never sees an instance without its capability files.
            ids = changed.instance_ids
            self._capabilities.add(minor, ids)
            if changed is not state:
                file.write(changed)
            self._capabilities.remove_stale(minor, ids)
        return result

    def _refresh(self) -> InjectedFaults:
        now = self.faults.read()
        if now is not self._seen:
            with self._refresh_lock:
                added = tuple(msgspec.convert(gpu, GpuDescription) for gpu in now.added)
                self._gpus = (*self.description.gpus, *added)
                self._open_state_files()
                self._present = [minor for minor in range(len(self._gpus)) if minor not in now.removed]
                self._seen = now
        return now

    def _open_state_files(self) -> None:
        for minor in range(len(self._files), len(self._gpus)):
            self._uuids.append(self.description.gpu_uuid(minor))
            self._files.append(GpuFile(self.root / "sim", minor))


def _layout(state: SimulatedGpuState) -> tuple[object, ...]:
    return state.mig_enabled, state.instances
