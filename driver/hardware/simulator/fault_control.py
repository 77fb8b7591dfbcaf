"""Making things go wrong on a simulated node: what ``SimulatedNode.faults`` and ``tessera sim fault`` do.

Everything is kept in the node's directory, so that it may be done from another process while a node plugin runs.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pynvml

from driver.errors import UsageError
from driver.model.xid import FALLEN_OFF_THE_BUS, Meaning, meaning_of

from . import tree
from .description import MAX_GPUS, GpuDescription
from .faults import EVERY_CALL, Disturbances, Fault
from .machine import RECOVERY_SINCE, Machine
from .state import ANY_INSTANCE, Event, GpuState


class FaultControl:
    """One node's faults. GPUs are named by minor, MIG devices by UUID."""

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
        """Calls of a function ("*": any) fail with an NVML code: ``times`` times, or until cleared.

        :param gpu: only calls about this GPU or what is on it
        :param device: only calls about this MIG device or its instances
        :returns: the fault's id
        :raises UsageError: no such function, code, GPU or number of times
        """
        if code not in error_names():
            raise UsageError(f"code: {code} is no NVML error; known: {', '.join(map(str, error_names()))}")
        return self._add(Fault(0, call, code, 0.0, gpu, device, times))

    def slow(
        self,
        seconds: float,
        call: str = EVERY_CALL,
        *,
        gpu: int | None = None,
        device: str | None = None,
        times: int | None = None,
    ) -> int:
        """Calls of a function take so many seconds longer; parameters, result and errors as :meth:`fail`."""
        if not 0 < seconds <= 3600:
            raise UsageError(f"seconds: {seconds:g} is not accepted; more than 0, up to 3600")
        return self._add(Fault(0, call, 0, seconds, gpu, device, times))

    def keep_busy(self, device: str) -> tuple[int, ...]:
        """A MIG device's instances can't be destroyed (IN_USE) until cleared, as with a leaked handle."""
        calls = ("nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy")
        return tuple(self.fail(call, code=pynvml.NVML_ERROR_IN_USE, device=device) for call in calls)

    def lose_gpu(self, gpu: int) -> int:
        """A GPU falls off the bus: XID 79, then GPU_IS_LOST from every call about it. Returns the fault's id."""
        self.xid(gpu, FALLEN_OFF_THE_BUS)
        return self.fail(code=pynvml.NVML_ERROR_GPU_IS_LOST, gpu=gpu)

    def remove_gpu(self, gpu: int) -> None:
        """A GPU disappears: from the count and the indices of the others, from sysfs and procfs.

        Its state stays for :meth:`return_gpu`; calls with a handle of it say GPU_IS_LOST.
        """
        self._require_gpu(gpu)
        self._machine.faults.change(lambda now: (_without(now, gpu), None))
        tree.remove_gpu(self._machine.gpus[gpu], self._machine.root)

    def return_gpu(self, gpu: int) -> None:
        """A lost or removed GPU is there again, with what it held."""
        self._require_gpu(gpu)
        tree.build(self._machine.current_description, self._machine.root)
        self._machine.faults.change(lambda now: (_returned(now, gpu), None))

    def add_gpu(self, gpu: GpuDescription) -> int:
        """One more GPU of the node's product; it stays. Returns its minor.

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
        """The kernel module reports an XID: an event for whoever listens to that GPU.

        One after which the whole GPU needs a reset makes NVML say so, where the driver tells such things. Not the
        XID of a GPU that fell off the bus: it can't be asked, and is reset before it is there again.

        :param device: MIG device it happened on; None: the whole GPU
        """
        if number < 0:
            raise UsageError(f"xid: {number} is not accepted; a number from 0")
        self.event(gpu, pynvml.nvmlEventTypeXidCriticalError, number, device)
        needs_reset = meaning_of(number).meaning is Meaning.FATAL and number != FALLEN_OFF_THE_BUS
        if device is None and needs_reset and self._machine.tells_recovery:
            self._machine.need_recovery(gpu, pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET)

    def recovery(self, gpu: int, action: int) -> None:
        """NVML says from now on that the GPU needs this to recover; a reset and a reboot end it.

        :raises UsageError: no such GPU or action, or a driver that can't tell
        """
        self._require_gpu(gpu)
        if action not in recovery_names():
            raise UsageError(f"action: {action} is no recovery action; known: {', '.join(map(str, recovery_names()))}")
        if not self._machine.tells_recovery:
            raise UsageError(
                f"driver {self._machine.description.driver_version} does not tell recovery actions;"
                f" {RECOVERY_SINCE} and newer do"
            )
        self._machine.need_recovery(gpu, action)

    def event(self, gpu: int, kind: int, data: int = 0, device: str | None = None) -> None:
        """An NVML event (``nvmlEventType*``, ``nvmlEventMigConfigChange``) on a GPU.

        :raises UsageError: no such GPU, MIG device or kind
        """
        self._require_gpu(gpu)
        if kind not in event_names():
            raise UsageError(f"event: {kind:#x} is unknown; known: {', '.join(map(hex, event_names()))}")
        instances = _instance_ids(self._machine.state(gpu), device)
        self._machine.announce(gpu, Event(0, kind, data, *instances))

    def current(self) -> Disturbances:
        """All that is wrong now."""
        return self._machine.faults.read()

    def clear(self, *ids: int) -> None:
        """End these faults, or, without ids, all of them; removed GPUs return. Added GPUs stay.

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

    def _add(self, fault: Fault) -> int:
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


def _instance_ids(state: GpuState, device: str | None) -> tuple[int, int]:
    if device is None:
        return ANY_INSTANCE, ANY_INSTANCE
    for instance in state.instances:
        for compute in instance.compute:
            if compute.uuid == device:
                return instance.id, compute.id
    raise UsageError(f"device: {device!r} is not on this GPU; accepted: the UUID of one of its MIG devices")


def _with(now: Disturbances, fault: Fault) -> tuple[Disturbances, int]:
    added = msgspec.structs.replace(fault, id=now.next_id)
    return msgspec.structs.replace(now, next_id=now.next_id + 1, faults=(*now.faults, added)), added.id


def _without(now: Disturbances, gpu: int) -> Disturbances:
    return msgspec.structs.replace(now, removed=tuple(sorted({*now.removed, gpu})))


def _returned(now: Disturbances, gpu: int) -> Disturbances:
    lost = pynvml.NVML_ERROR_GPU_IS_LOST
    faults = tuple(f for f in now.faults if not (f.gpu == gpu and f.call == EVERY_CALL and f.code == lost))
    removed = tuple(minor for minor in now.removed if minor != gpu)
    return msgspec.structs.replace(now, faults=faults, removed=removed)


def _cleared(now: Disturbances, ids: tuple[int, ...]) -> Disturbances:
    faults = tuple(fault for fault in now.faults if ids and fault.id not in ids)
    return msgspec.structs.replace(now, faults=faults, removed=now.removed if ids else ())
