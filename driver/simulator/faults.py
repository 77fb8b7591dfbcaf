"""Fault injection for a simulated node: calls that fail or are slow, lost and added GPUs, XIDs and other events.

Any process with access to the directory may inject faults (``SimulatedNode.faults``, ``tessera sim fault``) while
others use the node; they take effect at the next call.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import msgspec
import pynvml
from msgspec.structs import replace

from driver.errors import UsageError
from driver.model.xid import FALLEN_OFF_THE_BUS, Meaning, meaning_of
from driver.simulator import tree
from driver.simulator.description import MAX_GPUS, GpuDescription
from driver.simulator.machine import (
    ANY_INSTANCE,
    EVERY_CALL,
    RECOVERY_SINCE,
    InjectedFault,
    InjectedFaults,
    Machine,
    SimulatedEvent,
    SimulatedGpuState,
)
from driver.simulator.nvml import is_simulated


def _constants(prefix: str) -> dict[int, str]:
    """pynvml's numbers of that prefix, ascending, with their names without it."""
    named = ((name, value) for name, value in vars(pynvml).items() if name.startswith(prefix))
    names = {value: name.removeprefix(prefix) for name, value in named if isinstance(value, int)}
    return dict(sorted(names.items()))


ERROR_NAMES, RECOVERY_NAMES = _constants("NVML_ERROR_"), _constants("NVML_GPU_RECOVERY_ACTION_")
"""NVML's error codes and recovery actions by number, as IN_USE and GPU_RESET."""

EVENT_NAMES = {
    bit: name.removeprefix("Type") for bit, name in _constants("nvmlEvent").items() if bit and name != "TypeAll"
}
"""NVML's event types by bit, as XidCriticalError."""


ILLEGAL_ADDRESS = 31
"""The XID of a program that uses an illegal address, as seen on an H200."""


class FaultControl:
    """Injects faults into one node. GPUs are named by minor, MIG devices by UUID."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

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
        if code not in ERROR_NAMES:
            raise UsageError(f"code: {code} is no NVML error; known: {', '.join(map(str, ERROR_NAMES))}")
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
        self._machine.change_faults(lambda now: (replace(now, removed=tuple(sorted({*now.removed, gpu}))), None))
        tree.remove_gpu(self._machine.gpus[gpu], self._machine.root)

    def return_gpu(self, gpu: int) -> None:
        """Bring a lost or removed GPU back, with its instances."""
        self._require_gpu(gpu)
        tree.build(self._machine.current_description, self._machine.root)
        self._machine.change_faults(lambda now: (_returned(now, gpu), None))

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
        self._machine.change_faults(lambda now: (replace(now, added=(*now.added, added)), None))
        return len(present.gpus)

    def xid(self, gpu: int, number: int, device: str | None = None) -> None:
        """Report an XID, as the kernel module does: an event for the listeners of that GPU.

        An XID after which the whole GPU needs a reset also sets NVML's recovery action, if the driver reports it. The
        exception is the XID of a GPU that fell off the bus: it is reset before it answers again. An illegal address
        ends the MPS servers of the GPU, and with them all their clients.

        :param device: MIG device it happened on; None: the whole GPU
        """
        if number < 0:
            raise UsageError(f"xid: {number} is not accepted; a number from 0")
        self.event(gpu, pynvml.nvmlEventTypeXidCriticalError, number, device)
        servers = [process.pid for process in self._machine.gpu_state(gpu).processes if process.mps_server]
        for pid in servers if number == ILLEGAL_ADDRESS else ():
            with suppress(ProcessLookupError):  # it was killed together with its daemon
                os.kill(pid, signal.SIGTERM)
        needs_reset = meaning_of(number).meaning is Meaning.FATAL and number != FALLEN_OFF_THE_BUS
        if device is None and needs_reset and self._machine.reports_recovery_action:
            self._set_recovery_action(gpu, pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET)

    def recovery(self, gpu: int, action: int) -> None:
        """Set the recovery action that NVML reports for a GPU; a reset or a reboot clears it.

        :raises UsageError: no such GPU or action, or a driver that does not report them
        """
        self._require_gpu(gpu)
        if action not in RECOVERY_NAMES:
            raise UsageError(f"action: {action} is no recovery action; known: {', '.join(map(str, RECOVERY_NAMES))}")
        if not self._machine.reports_recovery_action:
            raise UsageError(
                f"driver {self._machine.description.driver_version} does not report recovery actions;"
                f" {RECOVERY_SINCE} and newer do"
            )
        self._set_recovery_action(gpu, action)

    def event(self, gpu: int, kind: int, data: int = 0, device: str | None = None) -> None:
        """Raise an NVML event (``nvmlEventType*``, ``nvmlEventMigConfigChange``) on a GPU.

        :raises UsageError: no such GPU, MIG device or kind
        """
        self._require_gpu(gpu)
        if kind not in EVENT_NAMES:
            raise UsageError(f"event: {kind:#x} is unknown; known: {', '.join(map(hex, EVENT_NAMES))}")
        instances = _instance_ids(self._machine.gpu_state(gpu), device)
        event = SimulatedEvent(0, kind, data, *instances)
        self._machine.change(gpu, lambda state: (state.with_event(event), None))

    def current(self) -> InjectedFaults:
        return self._machine.fault_file.read()

    def clear(self, *ids: int) -> None:
        """Clear these faults; without ids all of them, and bring removed GPUs back. Added GPUs stay.

        :raises UsageError: no such fault
        """
        present = self.current()
        unknown = [number for number in ids if number not in {fault.id for fault in present.faults}]
        if unknown:
            numbers = ", ".join(str(fault.id) for fault in present.faults) or "none"
            raise UsageError(f"fault: {unknown[0]} is unknown; known: {numbers}")
        for gpu in () if ids else present.removed:
            self.return_gpu(gpu)
        self._machine.change_faults(lambda now: (_cleared(now, ids), None))

    def _add(self, fault: InjectedFault) -> int:
        if fault.call != EVERY_CALL and not is_simulated(fault.call):
            raise UsageError(
                f"call: {fault.call!r} is not simulated; accepted: '*', 'nvidia-smi' or a pynvml function that is"
            )
        if fault.gpu is not None:
            self._require_gpu(fault.gpu)
        if fault.device is not None and not fault.device.startswith("MIG-"):
            raise UsageError(f"device: {fault.device!r} is not accepted; the UUID of a MIG device, MIG-...")
        if fault.times is not None and fault.times < 1:
            raise UsageError(f"times: {fault.times} is not accepted; 1 or more")
        return self._machine.change_faults(lambda now: _with(now, fault))

    def _set_recovery_action(self, gpu: int, action: int) -> None:
        event = SimulatedEvent(0, pynvml.nvmlEventTypeGpuRecoveryAction)

        def rule(state: SimulatedGpuState) -> tuple[SimulatedGpuState, None]:
            if state.recovery_action == action:
                return state, None
            return replace(state, recovery_action=action).with_event(event), None

        self._machine.change(gpu, rule)

    def _require_gpu(self, gpu: int) -> None:
        gpus = len(self._machine.gpus)
        if not 0 <= gpu < gpus:
            raise UsageError(f"gpu: {gpu} is not on this node; accepted: 0 to {gpus - 1}")


def _instance_ids(state: SimulatedGpuState, device: str | None) -> tuple[int, int]:
    if device is None:
        return ANY_INSTANCE, ANY_INSTANCE
    if device not in state.mig_devices:
        raise UsageError(f"device: {device!r} is not on this GPU; accepted: the UUID of one of its MIG devices")
    instance, compute = state.mig_devices[device]
    return instance.id, compute.id


def _with(now: InjectedFaults, fault: InjectedFault) -> tuple[InjectedFaults, int]:
    added = replace(fault, id=now.next_id)
    return replace(now, next_id=now.next_id + 1, faults=(*now.faults, added)), added.id


def _returned(now: InjectedFaults, gpu: int) -> InjectedFaults:
    faults = tuple(fault for fault in now.faults if fault.lost_gpu != gpu)
    return replace(now, faults=faults, removed=tuple(minor for minor in now.removed if minor != gpu))


def _cleared(now: InjectedFaults, ids: tuple[int, ...]) -> InjectedFaults:
    faults = tuple(fault for fault in now.faults if ids and fault.id not in ids)
    return replace(now, faults=faults, removed=now.removed if ids else ())
