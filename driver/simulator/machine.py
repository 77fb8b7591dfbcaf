"""The simulated machine behind the NVML functions: the GPUs, their states on disk, and the latency of operations.

Each GPU has one state file, ``<root>/sim/gpu-<minor>.json``; the injected faults are in ``faults.json``, which exists
only while there are faults, so that a healthy node costs one file access per call. Nothing is fsynced: a power cut
also ends the MIG instances of a real GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

import msgspec
import pynvml
from msgspec.structs import replace

from driver.simulator.description import GpuDescription, NodeDescription
from driver.simulator.state.gpu_load import WHOLE_GPU, Loads
from driver.simulator.state.latency import Latency
from driver.simulator.state.memory_limits import CgroupTree, Limits
from driver.simulator.state.state_file import StateFile
from driver.simulator.tree import Capabilities

EVERY_CALL = "*"
ANY_INSTANCE = 0xFFFFFFFF
"""The instance ids of an event that concerns the whole GPU."""

RECOVERY_SINCE = 570
"""First driver branch that reports recovery actions; an estimate (NVIDIA's XID catalogue says R565)."""

# Enough that a listener which polls every few milliseconds misses none.
_KEPT_EVENTS = 16


class SimulatedEvent(msgspec.Struct, frozen=True, rename="camel"):
    """An NVML event: its type, its data, and the instances it concerns."""

    number: int
    kind: int
    data: int = 0
    gpu_instance: int = ANY_INSTANCE
    compute_instance: int = ANY_INSTANCE


MIG_CHANGED = SimulatedEvent(0, pynvml.nvmlEventMigConfigChange)


class Process(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A process: pid, bytes of GPU memory, and the UUID of the MIG device that it uses; empty: the whole GPU.

    ``mps_server``, ``mps_client``: whether it is a server of MPS or a client of one.
    """

    pid: int
    memory: int
    device: str = ""
    mps_server: bool = False
    mps_client: bool = False


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
    NVML's number of what the GPU needs to recover, 0 nothing. ``limits`` are those on the memory of cgroups.
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
    loads: Loads = Loads()
    limits: Limits = ()

    def processes_at(self, now: float) -> list[Process]:
        """All processes, those of loads included."""
        loads = (load for load in self.loads.running if load.until is None)
        of_loads = (Process(load.pid, load.memory_at(now), load.device, mps_client=load.server > 0) for load in loads)
        return [*self.processes, *of_loads]

    @property
    def mig_devices(self) -> dict[str, tuple[GpuInstance, ComputeInstance]]:
        """The instances of each MIG device, by UUID."""
        return {compute.uuid: (instance, compute) for instance in self.instances for compute in instance.compute}

    def with_event(self, event: SimulatedEvent) -> SimulatedGpuState:
        """Return the state with the event appended under the next event number."""
        numbered = replace(event, number=self.next_event)
        kept = (*self.events, numbered)[-_KEPT_EVENTS:]
        return replace(self, events=kept, next_event=self.next_event + 1)


class InjectedFault(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A fault: matching calls fail with ``code`` (0: they succeed) after ``seconds``.

    ``call`` is a pynvml function, or "*". ``gpu`` (minor) and ``device`` (UUID of a MIG device) limit it to calls
    that concern them. ``times`` is the number of remaining occurrences; None: until it is cleared.
    """

    id: int
    call: str = EVERY_CALL
    code: int = 0
    seconds: float = 0.0
    gpu: int | None = None
    device: str | None = None
    times: int | None = None

    @property
    def lost_gpu(self) -> int | None:
        """Minor of the GPU that this fault makes fall off the bus."""
        falls = self.call == EVERY_CALL and self.code == pynvml.NVML_ERROR_GPU_IS_LOST
        return self.gpu if falls else None


class InjectedFaults(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, dict=True):
    """All injected faults of a node, its removed GPUs, and added GPUs in the format of the description."""

    next_id: int = 1
    faults: tuple[InjectedFault, ...] = ()
    removed: tuple[int, ...] = ()
    added: tuple[dict[str, object], ...] = ()

    @cached_property
    def lost(self) -> frozenset[int | None]:
        """Minors of the GPUs that are lost or removed."""
        return frozenset([fault.lost_gpu for fault in self.faults]) | frozenset(self.removed)


NO_FAULTS = InjectedFaults()

S = TypeVar("S")
T = TypeVar("T")


Rule = Callable[[S], tuple[S, T]]
"""A change: the state before -> the state after, and a result."""


class Machine:
    """The hardware of one node. GPUs are numbered by minor; NVML indices differ once a GPU was removed."""

    def __init__(
        self,
        description: NodeDescription,
        root: Path,
        latency: Latency,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.description = description
        self.product = description.gpu_product
        self.root = root
        self.latency = latency
        self.cgroups = CgroupTree(root, description.cgroups)
        self.fault_file = StateFile(root / "sim" / "faults.json", InjectedFaults, NO_FAULTS)
        self.clock = clock
        self._sleep = sleep
        self._capabilities = Capabilities(root)
        self._seen = NO_FAULTS
        self._gpus = description.gpus
        self._present = list(range(len(self._gpus)))
        self._refresh_lock = threading.Lock()
        self._uuids = self._all_uuids()
        self._file = cache(lambda minor: StateFile(root / "sim" / f"gpu-{minor}.json", SimulatedGpuState))

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

    def prepare_gpu(self, minor: int) -> None:
        """Create the state file of a GPU if it is missing, and repair what a killed process left incomplete."""
        file = self._file(minor)
        if not file.exists():
            file.write(SimulatedGpuState())
        self.change(minor, lambda state: (state, None))

    def gpu_state(self, minor: int) -> SimulatedGpuState:
        """The current state, without an NVML session."""
        return self._file(minor).read()

    def change(
        self, minor: int, rule: Rule[SimulatedGpuState, T], seconds: float = 0.0, event: SimulatedEvent | None = None
    ) -> T:
        """Apply ``rule`` to the GPU's state and store the result; return the second value of ``rule``.

        The change takes ``seconds``, during which other writers of this GPU wait, as in the real driver; readers and
        other GPUs do not wait. If ``rule`` raises, the state does not change. ``event`` is recorded if MIG mode or
        instances change.
        """
        with self._file(minor).locked() as state:
            changed, result = rule(state)
            if changed is not state and seconds > 0:
                self._sleep(seconds)
            if event is not None and _layout(changed) != _layout(state):
                changed = changed.with_event(event)
            if changed.loads != Loads():
                present = changed.mig_devices.keys() if changed.mig_enabled else {WHOLE_GPU}
                loads = changed.loads.end_on_missing(present, self.clock())
                changed = changed if loads is changed.loads else replace(changed, loads=loads)
            # In this order a reader never sees an instance without its capability files.
            ids = {gi.id: tuple(ci.id for ci in gi.compute) for gi in changed.instances}
            self._capabilities.add(minor, ids)
            if changed is not state:
                self._file(minor).write(changed)
            self._capabilities.remove_stale(minor, ids)
        return result

    def change_faults(self, rule: Rule[InjectedFaults, T]) -> T:
        """Apply ``rule`` to the node's faults; return its second value."""
        with self.fault_file.locked() as before:
            changed, result = rule(before)
            if not (changed.faults or changed.removed or changed.added):
                changed = NO_FAULTS
            if changed != before:
                self.fault_file.write(changed)
            return result

    def take_fault(self, fault: InjectedFault) -> bool:
        """Count one occurrence of ``fault``; False if it was cleared or used up in the meantime."""
        return fault.times is None or self.change_faults(lambda now: _one_less(now, fault.id))

    def nvlink_peers(self, minor: int) -> list[GpuDescription]:
        """The present GPUs that bridges join to this one."""
        gpus = self.gpus
        clique = gpus[minor].nvlink_clique
        near = (gpus[other] for other in self.present if other != minor)
        return [gpu for gpu in near if clique is not None and gpu.nvlink_clique == clique]

    def has_nvlink(self, minor: int) -> bool:
        """Whether NVLink joins the GPU to a switch or to another GPU."""
        nvlink = self.description.nvlink
        return nvlink is not None and (nvlink.switched or bool(self.nvlink_peers(minor)))

    def memory_mib(self, state: SimulatedGpuState, device: str | None) -> int:
        """Memory of a GPU in ``state``, or of the MIG device with this UUID on it."""
        if not device:
            return self.product.memory_mib
        instance, _ = state.mig_devices[device]
        return self.product.by_id[instance.profile].memory_at(instance.start)

    @property
    def reports_recovery_action(self) -> bool:
        return self.description.driver_branch >= RECOVERY_SINCE

    def _all_uuids(self) -> list[str]:
        return [self.description.gpu_uuid(minor) for minor in range(len(self._gpus))]

    def _refresh(self) -> None:
        now = self.fault_file.read()
        if now is not self._seen:
            with self._refresh_lock:
                added = tuple(msgspec.convert(gpu, GpuDescription) for gpu in now.added)
                self._gpus = (*self.description.gpus, *added)
                self._uuids = self._all_uuids()
                self._present = [minor for minor in range(len(self._gpus)) if minor not in now.removed]
                self._seen = now


def _one_less(now: InjectedFaults, number: int) -> tuple[InjectedFaults, bool]:
    faults = {fault.id: fault for fault in now.faults}
    used = faults.pop(number, None)
    if used is None or used.times is None:
        return now, used is not None
    if used.times > 1:
        faults[number] = replace(used, times=used.times - 1)
    return replace(now, faults=tuple(faults.values())), True


def _layout(state: SimulatedGpuState) -> tuple[object, ...]:
    return state.mig_enabled, state.instances
