"""Injected faults of a simulated node, kept in ``<root>/sim/faults.json``.

Any process with access to the directory may inject faults (``SimulatedNode.faults``, ``tessera sim fault``) while
others use the node; they take effect at the next call. The file exists only while there are faults, so that a healthy
node costs one file access per call.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pynvml

from driver.errors import StateError, UsageError
from driver.model.xid import FALLEN_OFF_THE_BUS, Meaning, meaning_of
from driver.simulator import tree
from driver.simulator.description import MAX_GPUS, GpuDescription
from driver.simulator.tree import write_file

if TYPE_CHECKING:
    from driver.simulator.machine import Machine, SimulatedGpuState

T = TypeVar("T")

EVERY_CALL = "*"


RECOVERY_SINCE = 570
"""First driver branch that reports recovery actions; an estimate (NVIDIA's XID catalogue says R565)."""

ANY_INSTANCE = 0xFFFFFFFF
"""The instance ids of an event that concerns the whole GPU."""


class SimulatedEvent(msgspec.Struct, frozen=True, rename="camel"):
    """An NVML event: its type, its data, and the instances it concerns."""

    number: int
    kind: int
    data: int = 0
    gpu_instance: int = ANY_INSTANCE
    compute_instance: int = ANY_INSTANCE


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

    def concerns(self, call: str, gpus: set[int], devices: set[str]) -> bool:
        """Whether the fault matches a call of that function on these GPUs and MIG devices."""
        return (
            self.call in (EVERY_CALL, call)
            and (self.gpu is None or self.gpu in gpus)
            and (self.device is None or self.device in devices)
        )


class InjectedFaults(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, dict=True):
    """All injected faults of a node, its removed GPUs, and added GPUs in the format of the description."""

    next_id: int = 1
    faults: tuple[InjectedFault, ...] = ()
    removed: tuple[int, ...] = ()
    added: tuple[dict[str, object], ...] = ()

    @cached_property
    def lost(self) -> frozenset[int]:
        """Minors of the GPUs that are lost or removed."""
        fallen = {f.gpu for f in self.faults if f.call == EVERY_CALL and f.code == pynvml.NVML_ERROR_GPU_IS_LOST}
        return frozenset(gpu for gpu in fallen if gpu is not None) | frozenset(self.removed)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to store."""
        return not (self.faults or self.removed or self.added)


NO_FAULTS = InjectedFaults()

_INJECTED_FAULTS = msgspec.json.Decoder(InjectedFaults)


class FaultFile:
    """The fault file of one node. Safe to share between threads and processes."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "faults.json"
        self._text_path = str(self.path)
        self._lock_path = str(directory / "faults.lock")
        self._known: tuple[bytes, InjectedFaults] = (b"", NO_FAULTS)

    def read(self) -> InjectedFaults:
        """Read the current faults. Without a file this takes 1 to 2 microseconds.

        :raises StateError: the file was damaged by someone else
        """
        if not os.access(self._text_path, os.F_OK):
            return NO_FAULTS
        try:
            content, (known, current) = self.path.read_bytes(), self._known
            if content != known:
                current = _INJECTED_FAULTS.decode(content)
                self._known = (content, current)
        except FileNotFoundError:
            return NO_FAULTS
        except (OSError, msgspec.MsgspecError) as error:
            raise StateError(f"faults of a simulated node, {self.path}: {error}") from error
        return current

    def change(self, rule: Callable[[InjectedFaults], tuple[InjectedFaults, T]]) -> T:
        """Apply ``rule`` to the current faults under the lock; return its second value."""
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            before = self.read()
            changed, result = rule(before)
            if changed.is_empty:
                self.path.unlink(missing_ok=True)
            elif changed != before:
                write_file(self.path, msgspec.json.format(msgspec.json.encode(changed), indent=2).decode() + "\n")
            return result
        finally:
            os.close(descriptor)

    def take(self, fault: InjectedFault) -> bool:
        """Count one occurrence of ``fault``; False if it was cleared or used up in the meantime."""
        return fault.times is None or self.change(lambda present: _one_less(present, fault.id))


def _one_less(present: InjectedFaults, number: int) -> tuple[InjectedFaults, bool]:
    found = next((fault for fault in present.faults if fault.id == number), None)
    if found is None or found.times is None:
        return present, found is not None
    left = () if found.times <= 1 else (msgspec.structs.replace(found, times=found.times - 1),)
    faults = tuple(kept for fault in present.faults for kept in (left if fault is found else (fault,)))
    return msgspec.structs.replace(present, faults=faults), True


class FaultControl:
    """Injects faults into one node. GPUs are named by minor, MIG devices by UUID."""

    def __init__(self, machine: Machine, known_call: Callable[[str], bool]) -> None:
        self._machine = machine
        self._known_call = known_call

    def fail(
        self,
        call: str = EVERY_CALL,
        *,
        code: int,
        gpu: int | None = None,
        device: str | None = None,
        times: int | None = None,
    ) -> int:
        """Make calls of a function ("*": any) fail with an NVML code, ``times`` times or until cleared.

        :param gpu: only calls about this GPU or what is on it
        :param device: only calls about this MIG device or its instances
        :returns: the fault's id
        :raises UsageError: no such function, code, GPU or number of times
        """
        if code not in error_names():
            raise UsageError(f"code: {code} is no NVML error; known: {', '.join(map(str, error_names()))}")
        return self._add(InjectedFault(0, call, code, 0.0, gpu, device, times))

    def slow(
        self,
        seconds: float,
        call: str = EVERY_CALL,
        *,
        gpu: int | None = None,
        device: str | None = None,
        times: int | None = None,
    ) -> int:
        """Make calls of a function slower; parameters, result and errors as in :meth:`fail`."""
        if not 0 < seconds <= 3600:
            raise UsageError(f"seconds: {seconds:g} is not accepted; more than 0, up to 3600")
        return self._add(InjectedFault(0, call, 0, seconds, gpu, device, times))

    def keep_busy(self, device: str) -> tuple[int, ...]:
        """Make the instances of a MIG device impossible to destroy (IN_USE) until cleared, as with a leaked handle."""
        calls = ("nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy")
        return tuple(self.fail(call, code=pynvml.NVML_ERROR_IN_USE, device=device) for call in calls)

    def lose_gpu(self, gpu: int) -> int:
        """Make a GPU fall off the bus: XID 79, then GPU_IS_LOST from every call. Returns the fault's id."""
        self.xid(gpu, FALLEN_OFF_THE_BUS)
        return self.fail(code=pynvml.NVML_ERROR_GPU_IS_LOST, gpu=gpu)

    def remove_gpu(self, gpu: int) -> None:
        """Remove a GPU: from the device count and indices, from sysfs and procfs.

        Its state stays for :meth:`return_gpu`; calls with a handle of it say GPU_IS_LOST.
        """
        self._require_gpu(gpu)
        self._machine.faults.change(lambda now: (_without(now, gpu), None))
        tree.remove_gpu(self._machine.gpus[gpu], self._machine.root)

    def return_gpu(self, gpu: int) -> None:
        """Bring a lost or removed GPU back, with its instances."""
        self._require_gpu(gpu)
        tree.build(self._machine.current_description, self._machine.root)
        self._machine.faults.change(lambda now: (_returned(now, gpu), None))

    def add_gpu(self, gpu: GpuDescription) -> int:
        """Add a GPU of the node's product permanently. Returns its minor.

        :raises UsageError: its bus id is taken, or the node is full
        """
        present = self._machine.current_description
        taken = {place.pci_bus_id for place in (*present.gpus, *present.nics)}
        if gpu.pci_bus_id in taken:
            raise UsageError(f"pciBusId: {gpu.pci_bus_id} is taken; on this node: {', '.join(sorted(taken))}")
        if len(present.gpus) >= MAX_GPUS:
            raise UsageError(f"the node has {len(present.gpus)} GPUs; accepted: up to {MAX_GPUS}")
        added = msgspec.to_builtins(gpu)
        self._machine.prepare_gpu(len(present.gpus))
        tree.build(present.replaced(gpus=(*present.gpus, gpu)), self._machine.root)
        self._machine.faults.change(lambda now: (msgspec.structs.replace(now, added=(*now.added, added)), None))
        return len(present.gpus)

    def xid(self, gpu: int, number: int, device: str | None = None) -> None:
        """Report an XID, as the kernel module does: an event for the listeners of that GPU.

        An XID after which the whole GPU needs a reset also sets NVML's recovery action, if the driver reports it. The
        exception is the XID of a GPU that fell off the bus: it is reset before it answers again.

        :param device: MIG device it happened on; None: the whole GPU
        """
        if number < 0:
            raise UsageError(f"xid: {number} is not accepted; a number from 0")
        self.event(gpu, pynvml.nvmlEventTypeXidCriticalError, number, device)
        needs_reset = meaning_of(number).meaning is Meaning.FATAL and number != FALLEN_OFF_THE_BUS
        if device is None and needs_reset and self._machine.reports_recovery_action:
            self._machine.set_recovery_action(gpu, pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET)

    def recovery(self, gpu: int, action: int) -> None:
        """Set the recovery action that NVML reports for a GPU; a reset or a reboot clears it.

        :raises UsageError: no such GPU or action, or a driver that does not report them
        """
        self._require_gpu(gpu)
        if action not in recovery_names():
            raise UsageError(f"action: {action} is no recovery action; known: {', '.join(map(str, recovery_names()))}")
        if not self._machine.reports_recovery_action:
            raise UsageError(
                f"driver {self._machine.description.driver_version} does not report recovery actions;"
                f" {RECOVERY_SINCE} and newer do"
            )
        self._machine.set_recovery_action(gpu, action)

    def event(self, gpu: int, kind: int, data: int = 0, device: str | None = None) -> None:
        """Raise an NVML event (``nvmlEventType*``, ``nvmlEventMigConfigChange``) on a GPU.

        :raises UsageError: no such GPU, MIG device or kind
        """
        self._require_gpu(gpu)
        if kind not in event_names():
            raise UsageError(f"event: {kind:#x} is unknown; known: {', '.join(map(hex, event_names()))}")
        instances = _instance_ids(self._machine.state(gpu), device)
        self._machine.record_event(gpu, SimulatedEvent(0, kind, data, *instances))

    def current(self) -> InjectedFaults:
        """The current faults."""
        return self._machine.faults.read()

    def clear(self, *ids: int) -> None:
        """Clear these faults; without ids all of them, and bring removed GPUs back. Added GPUs stay.

        :raises UsageError: no such fault
        """
        present = self.current()
        unknown = [number for number in ids if number not in {fault.id for fault in present.faults}]
        if unknown:
            known = ", ".join(str(fault.id) for fault in present.faults) or "none"
            raise UsageError(f"fault: {unknown[0]} is unknown; known: {known}")
        for gpu in () if ids else present.removed:
            self.return_gpu(gpu)
        self._machine.faults.change(lambda now: (_cleared(now, ids), None))

    def _add(self, fault: InjectedFault) -> int:
        if fault.call != EVERY_CALL and not self._known_call(fault.call):
            raise UsageError(
                f"call: {fault.call!r} is not simulated; accepted: '*', 'nvidia-smi' or a pynvml function that is"
            )
        if fault.gpu is not None:
            self._require_gpu(fault.gpu)
        if fault.device is not None and not fault.device.startswith("MIG-"):
            raise UsageError(f"device: {fault.device!r} is not accepted; the UUID of a MIG device, MIG-...")
        if fault.times is not None and fault.times < 1:
            raise UsageError(f"times: {fault.times} is not accepted; 1 or more")
        return self._machine.faults.change(lambda now: _with(now, fault))

    def _require_gpu(self, gpu: int) -> None:
        gpus = len(self._machine.gpus)
        if not 0 <= gpu < gpus:
            raise UsageError(f"gpu: {gpu} is not on this node; accepted: 0 to {gpus - 1}")


def error_names() -> dict[int, str]:
    """NVML's error codes by number, as IN_USE."""
    found = {value: name for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}
    return {code: found[code].removeprefix("NVML_ERROR_") for code in sorted(found)}


def recovery_names() -> dict[int, str]:
    """NVML's recovery actions by number, as GPU_RESET."""
    prefix = "NVML_GPU_RECOVERY_ACTION_"
    return {value: name.removeprefix(prefix) for name, value in vars(pynvml).items() if name.startswith(prefix)}


def event_names() -> dict[int, str]:
    """NVML's event types by bit, as XidCriticalError."""
    found = {
        value: name.removeprefix("nvmlEventType").removeprefix("nvmlEvent")
        for name, value in vars(pynvml).items()
        if name.startswith("nvmlEvent") and isinstance(value, int) and name not in ("nvmlEventTypeAll",)
    }
    return {bit: found[bit] for bit in sorted(found) if bit}


def _instance_ids(state: SimulatedGpuState, device: str | None) -> tuple[int, int]:
    if device is None:
        return ANY_INSTANCE, ANY_INSTANCE
    for instance in state.instances:
        for compute in instance.compute:
            if compute.uuid == device:
                return instance.id, compute.id
    raise UsageError(f"device: {device!r} is not on this GPU; accepted: the UUID of one of its MIG devices")


def _with(now: InjectedFaults, fault: InjectedFault) -> tuple[InjectedFaults, int]:
    added = msgspec.structs.replace(fault, id=now.next_id)
    return msgspec.structs.replace(now, next_id=now.next_id + 1, faults=(*now.faults, added)), added.id


def _without(now: InjectedFaults, gpu: int) -> InjectedFaults:
    return msgspec.structs.replace(now, removed=tuple(sorted({*now.removed, gpu})))


def _returned(now: InjectedFaults, gpu: int) -> InjectedFaults:
    lost = pynvml.NVML_ERROR_GPU_IS_LOST
    faults = tuple(f for f in now.faults if not (f.gpu == gpu and f.call == EVERY_CALL and f.code == lost))
    removed = tuple(minor for minor in now.removed if minor != gpu)
    return msgspec.structs.replace(now, faults=faults, removed=removed)


def _cleared(now: InjectedFaults, ids: tuple[int, ...]) -> InjectedFaults:
    faults = tuple(fault for fault in now.faults if ids and fault.id not in ids)
    return msgspec.structs.replace(now, faults=faults, removed=now.removed if ids else ())
