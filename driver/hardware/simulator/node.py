"""A simulated node: its directory, its GPUs, and what happens to them that NVML can't do."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from driver.errors import EnvironmentFault, UsageError

from . import mig, tree
from .description import GpuDescription, NodeDescription, parse_description
from .fault_control import FaultControl
from .files import make_folder, write_file
from .latency import DEFAULT_LATENCY, Latency
from .machine import Machine
from .nvml import SimulatedNvml, is_simulated
from .state import GpuState, Process

# Layout of the directory; one that another version wrote is refused.
_FORMAT = 1


class SimulatedNode:
    """One node in one directory. Any number of processes may have it open at once.

    ``nvml`` is used in place of the module pynvml, ``root`` in place of ``/``.
    """

    def __init__(self, machine: Machine) -> None:
        self.description = machine.description
        self.root = machine.root
        self.nvml = SimulatedNvml(machine)
        self.faults = FaultControl(machine, is_simulated)
        self._machine = machine

    @classmethod
    def open(
        cls,
        description: NodeDescription,
        root: Path,
        *,
        latency: Latency = DEFAULT_LATENCY,
        sleep: Callable[[float], None] = time.sleep,
    ) -> SimulatedNode:
        """The node in ``root``, which is made where it does not exist or is empty; what its GPUs hold stays.

        :raises UsageError: ``root`` holds a node of another description, or what is no simulated node at all
        :raises EnvironmentFault: ``root`` can't be written
        """
        machine = Machine(description, root, latency, sleep)
        try:
            _refuse_strangers_directory(root)
            with _exclusively(root):
                _refuse_another(root, description)
                tree.build(machine.current_description, root)
                machine.initialise()
                for minor in set(range(len(machine.gpus))) - set(machine.present):
                    tree.remove_gpu(machine.gpus[minor], root)
                _write_description(root, description)
        except OSError as error:
            raise EnvironmentFault(f"simulated node in {root}: {error}") from error
        return cls(machine)

    @classmethod
    def attach(
        cls,
        root: Path,
        *,
        latency: Latency = DEFAULT_LATENCY,
        sleep: Callable[[float], None] = time.sleep,
    ) -> SimulatedNode:
        """The node that is already in ``root``; nothing is written.

        :raises EnvironmentFault: there is none
        """
        description = _read_description(root)
        if description is None:
            raise EnvironmentFault(
                f"no simulated node in {root}: {_node_file(root)} does not exist;"
                " `tessera node --node-name NODE --kubeconfig FILE --gpus sim:NAME` makes one"
            )
        return cls(Machine(description, root, latency, sleep))

    @staticmethod
    def is_in(root: Path) -> bool:
        """Whether ``attach`` finds a node there."""
        return _node_file(root).exists()

    @property
    def gpus(self) -> tuple[GpuDescription, ...]:
        """Every GPU the node has or had, by minor: the description's, then those added."""
        return self._machine.gpus

    @property
    def present(self) -> list[int]:
        """Minors of the GPUs that are there now, in the order of NVML's indices."""
        return self._machine.present

    def gpu_state(self, minor: int) -> GpuState:
        """What is on a GPU now, without an NVML session."""
        return self._machine.state(minor)

    def reboot(self) -> None:
        """As if the machine had been rebooted: no instance and no process survives, nor Hopper's MIG mode."""
        product = self._machine.product
        for minor in range(len(self.gpus)):
            self._machine.change(minor, lambda state: (mig.reboot(product, state), None))
        tree.write_boot_id(self.root)

    def reset_gpu(self, minor: int) -> None:
        """As ``nvidia-smi --gpu-reset``: instances are lost, a pending MIG mode comes into force.

        :raises NVMLError: IN_USE while a process holds the GPU
        """
        self._machine.reconfigure(minor, lambda state: (mig.reset(state), None), 0.0)

    def start_process(self, device: str, *, pid: int, memory: int = 0) -> None:
        """A process takes hold of a GPU or a MIG device, which is IN_USE until :meth:`end_process`.

        :param device: UUID
        :param memory: bytes of GPU memory it uses
        :raises UsageError: the node has no such device
        """
        self._edit_processes(device, lambda present: (*present, Process(pid, memory)))

    def end_process(self, device: str, *, pid: int) -> None:
        """That process lets go of the device."""
        self._edit_processes(device, lambda present: tuple(p for p in present if p.pid != pid))

    @contextmanager
    def process_on(self, device: str, *, pid: int = 4242, memory: int = 0) -> Iterator[None]:
        """While the block runs, a process holds the device."""
        self.start_process(device, pid=pid, memory=memory)
        try:
            yield
        finally:
            self.end_process(device, pid=pid)

    def _edit_processes(self, device: str, edit: Callable[[tuple[Process, ...]], tuple[Process, ...]]) -> None:
        if device in self._machine.uuids:
            minor = self._machine.uuids.index(device)
            self._machine.change(minor, lambda state: (_edited_gpu(state, edit), None))
            return
        for minor in range(len(self.gpus)):
            if self._machine.change(minor, lambda state: _edited_mig(state, device, edit)):
                return
        raise UsageError(f"the simulated node {self.description.name} has no device {device}")


def _edited_gpu(state: GpuState, edit: Callable[[tuple[Process, ...]], tuple[Process, ...]]) -> GpuState:
    return msgspec.structs.replace(state, processes=edit(state.processes))


def _edited_mig(
    state: GpuState, device: str, edit: Callable[[tuple[Process, ...]], tuple[Process, ...]]
) -> tuple[GpuState, bool]:
    for instance in state.instances:
        if any(ci.uuid == device for ci in instance.compute):
            compute = tuple(
                msgspec.structs.replace(ci, processes=edit(ci.processes)) if ci.uuid == device else ci
                for ci in instance.compute
            )
            return mig.with_compute(state, instance, compute), True
    return state, False


@contextmanager
def _exclusively(root: Path) -> Iterator[None]:
    make_folder(root / "sim")
    descriptor = os.open(_lock_file(root), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lock_file(root: Path) -> Path:
    """Made before all others, so also there where the making was interrupted."""
    return root / "sim" / "node.lock"


def _node_file(root: Path) -> Path:
    return root / "sim" / "node.json"


def _read_description(root: Path) -> NodeDescription | None:
    path = _node_file(root)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found, description = content["format"], content["description"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EnvironmentFault(f"simulated node in {root}: {path} can't be read: {error}") from error
    if found != _FORMAT:
        raise EnvironmentFault(f"simulated node in {root}: format {found}, this version reads {_FORMAT}")
    return parse_description(description, str(path))


def _refuse_strangers_directory(root: Path) -> None:
    """A node is a thousand files: they must not get among somebody's own, least of all those of the machine."""
    try:
        found = [each for each in root.iterdir() if each.name != "sim" or any(each.iterdir())]
    except FileNotFoundError:
        return
    # Looked for last: another process may have begun to make the node while we looked.
    if found and not _lock_file(root).exists():
        raise UsageError(f"{root} is not empty, and no simulated node: choose another directory for it")


def _refuse_another(root: Path, description: NodeDescription) -> None:
    present = _read_description(root)
    if present is not None and present != description:
        what = "another version of it" if present.name == description.name else f"{present.name!r}"
        raise UsageError(f"{root} holds the simulated node {what}, not {description.name!r}: choose another directory")


def _write_description(root: Path, description: NodeDescription) -> None:
    content = {"format": _FORMAT, "description": description.to_json()}
    write_file(_node_file(root), json.dumps(content, indent=2) + "\n")
