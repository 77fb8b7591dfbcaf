"""A simulated node: its directory, its GPUs, and events outside NVML such as reboots and processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from driver.config.suggestions import meant
from driver.errors import EnvironmentFault, UsageError
from driver.model.gpu_settings import ComputeMode, TimeSlice
from driver.simulator import mig_rules, tree
from driver.simulator.description import NodeDescription, parse_description
from driver.simulator.faults import FaultControl
from driver.simulator.machine import MIG_CHANGED, GpuInstance, Machine, Process, SimulatedGpuState
from driver.simulator.nvml import SimulatedNvml
from driver.simulator.products import Product
from driver.simulator.state.gpu_load import LOAD_PID, WHOLE_GPU, Load, Phase, check_activity, check_memory
from driver.simulator.state.latency import DEFAULT_LATENCY, Latency
from driver.simulator.state.state_file import exclusively
from driver.simulator.tree import make_folder, write_file

# Version of the directory layout; other versions are refused.
_FORMAT = 1

NODE_FILE = "sim/node.json"
LOCK_FILE = "sim/node.lock"
"""The first file that is created, so it exists even if creation was interrupted."""


class SimulatedNode(Machine):
    """One node in one directory. Any number of processes may have it open at once.

    ``nvml`` is used in place of the module pynvml, ``root`` in place of ``/``.
    """

    @cached_property
    def nvml(self) -> SimulatedNvml:
        return SimulatedNvml(self)

    @cached_property
    def faults(self) -> FaultControl:
        return FaultControl(self)

    @classmethod
    def open(
        cls,
        description: NodeDescription,
        root: Path,
        *,
        latency: Latency = DEFAULT_LATENCY,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
    ) -> SimulatedNode:
        """Open the node in ``root``, or create it if the directory is missing or empty; existing GPU state is kept.

        :raises UsageError: ``root`` holds a node of another description, or other files
        :raises EnvironmentFault: ``root`` can't be written
        """
        node = cls(description, root, latency, sleep, clock)
        try:
            _refuse_foreign_directory(root)
            make_folder(root / "sim")
            with exclusively(str(root / LOCK_FILE)):
                present = _read_description(root)
                if present is not None and present != description:
                    what = "another version of it" if present.name == description.name else f"{present.name!r}"
                    where = f"{root} holds the simulated node {what}, not {description.name!r}"
                    raise UsageError(f"{where}: choose another directory")
                tree.build(node.current_description, root)
                for minor, gpu in enumerate(node.gpus):
                    node.prepare_gpu(minor)
                    if minor not in node.present:
                        tree.remove_gpu(gpu, root)
                content = {"format": _FORMAT, "description": msgspec.to_builtins(description)}
                write_file(root / NODE_FILE, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise EnvironmentFault(f"simulated node in {root}: {error}") from error
        return node

    @classmethod
    def attach(cls, root: Path, *, latency: Latency = DEFAULT_LATENCY) -> SimulatedNode:
        """Open the existing node in ``root``; nothing is written. Raises EnvironmentFault: there is none."""
        description = _read_description(root)
        if description is None:
            raise EnvironmentFault(
                f"no simulated node in {root}: {root / NODE_FILE} does not exist;"
                " `tessera node --node-name NODE --kubeconfig FILE --gpus sim:NAME` makes one"
            )
        return cls(description, root, latency)

    @staticmethod
    def is_in(root: Path) -> bool:
        """Whether ``root`` holds a simulated node."""
        return (root / NODE_FILE).exists()

    def processes(self, minor: int) -> list[Process]:
        """The processes of a GPU, those of loads included."""
        return self.gpu_state(minor).processes_at(self.clock())

    def reboot(self) -> None:
        """Reboot the machine: instances and processes end, and MIG mode on Hopper and newer is switched off."""
        product = self.product
        for minor in range(len(self.gpus)):
            self.change(minor, lambda state: (mig_rules.reboot(product, state), None))
        tree.write_boot_id(self.root)

    def reset_gpu(self, minor: int) -> None:
        """Reset a GPU like ``nvidia-smi --gpu-reset``: instances are lost, a pending MIG mode takes effect.

        :raises NVMLError: IN_USE while a process holds the GPU
        """
        self.change(minor, lambda state: (mig_rules.reset(state), None), event=MIG_CHANGED)

    def reload_driver(self) -> None:
        """Unload the kernel module and load it again: as a reboot, but containers keep running."""
        for minor in range(len(self.gpus)):
            self.change(minor, lambda state: (mig_rules.reboot(self.product, state), None), event=MIG_CHANGED)

    def put_load(
        self,
        device: str,
        phases: tuple[Phase, ...],
        *,
        pid: int = LOAD_PID,
        cgroup: Path | None = None,
        server: int = 0,
    ) -> None:
        """Load a GPU or a MIG device (UUID) from now on; replaces its load of the same process id.

        The load of a MIG device ends with it, that of a GPU with a reset, a reboot or MIG mode. ``cgroup`` is the
        process's; without one no limit on memory holds it. ``server``: the MPS server (process id) whose client it is.

        :raises UsageError: no such device, more than it has, or more than a limit of the cgroup allows
        """
        minor, mig = self._find(device)
        product, group = self.product, str(cgroup.resolve()) if cgroup else ""

        def rule(state: SimulatedGpuState) -> tuple[SimulatedGpuState, None]:
            now = self.clock()
            load = Load(phases, mig, pid, now, *_parts(product, state, mig), group, server)
            _check_compute_mode(state, load)
            loads = state.loads.put(load)
            check_activity(list(loads.on(mig)), nvlink=self.has_nvlink(minor))
            total = self.memory_mib(state, mig) << 20
            processes = sum(process.memory for process in state.processes if process.device == mig)
            others = [other for other in loads.on(mig) if other is not load]
            check_memory(load, others, total - processes)
            self.cgroups.check(state.limits, load, others)
            return replace(state, loads=loads), None

        self.change(minor, rule)

    def end_load(self, device: str, pid: int | None = None) -> None:
        """End the load of a GPU or a MIG device (UUID); with ``pid`` only that of one process."""
        minor, mig = self._find(device)

        def rule(state: SimulatedGpuState) -> tuple[SimulatedGpuState, None]:
            loads = state.loads.end(mig, self.clock(), pid)
            return (state if loads is state.loads else replace(state, loads=loads)), None

        self.change(minor, rule)

    def device_uuids(self) -> dict[str, tuple[int, str]]:
        """The present GPUs and MIG devices by UUID: minor, and UUID of the MIG device, empty for a GPU."""
        devices: dict[str, tuple[int, str]] = {}
        for minor in self.present:
            mig_devices = self.gpu_state(minor).mig_devices
            devices |= {self.uuids[minor]: (minor, WHOLE_GPU)} | {uuid: (minor, uuid) for uuid in mig_devices}
        return devices

    def _find(self, device: str) -> tuple[int, str]:
        devices = self.device_uuids()
        if device not in devices:
            near = meant(device, devices)
            raise UsageError(f"device: {device} is not on this node{near}; accepted: {', '.join(devices)}")
        return devices[device]


def _check_compute_mode(state: SimulatedGpuState, load: Load) -> None:
    """Refuse a process that the compute mode keeps out: the clients of one MPS server count as one process.

    :raises UsageError: CUDA would say that the devices are busy or unavailable
    """
    others = [process.pid for process in state.processes]
    others += [other.pid for other in state.loads.on(load.device) if other.pid != load.pid]
    mode = ComputeMode(state.compute_mode)
    if mode is ComputeMode.PROHIBITED or (mode is ComputeMode.EXCLUSIVE_PROCESS and others and not load.server):
        by = f"; processes {', '.join(map(str, others))} use the GPU" if others else ""
        raise UsageError(f"pid: the compute mode of the GPU is {mode.name}{by}; accepted: a client of its MPS server")


def _parts(product: Product, state: SimulatedGpuState, mig: str) -> tuple[float, float]:
    """The device's parts of the compute slices and the memory slices of its GPU.

    :raises UsageError: the whole GPU in MIG mode, or a MIG device that was destroyed in the meantime
    """
    devices = ", ".join(state.mig_devices) or "none now"
    if not mig and state.mig_enabled:
        raise UsageError(f"device: the GPU is in MIG mode; accepted: one of its partitions: {devices}")
    if not mig:
        return 1.0, 1.0
    if mig not in state.mig_devices:
        raise UsageError(f"device: {mig} is gone; accepted: another partition: {devices}")
    instance, compute = state.mig_devices[mig]
    slices = max(profile.slices for profile in product.profiles)
    share = compute.size / product.by_id[instance.profile].slices
    return compute.size / slices, share * instance.size / product.memory_slices


def _read_description(root: Path) -> NodeDescription | None:
    path = root / NODE_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        written_format, description = content["format"], content["description"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EnvironmentFault(f"simulated node in {root}: {path} can't be read: {error}") from error
    if written_format != _FORMAT:
        raise EnvironmentFault(f"simulated node in {root}: format {written_format}, this version reads {_FORMAT}")
    return parse_description(description, str(path))


def _refuse_foreign_directory(root: Path) -> None:
    """Refuse a directory with other files: a node consists of a thousand files, which must not mix with them."""
    try:
        others = [path for path in root.iterdir() if path.name != "sim" or any(path.iterdir())]
    except FileNotFoundError:
        return
    # Checked last: another process may have started to create the node in the meantime.
    if others and not (root / LOCK_FILE).exists():
        raise UsageError(f"{root} is not empty and does not hold a simulated node: choose another directory")


def describe(node: SimulatedNode, held: dict[str, str]) -> list[dict[str, Any]]:
    """Return the node's GPUs as JSON objects, each with its MIG devices; memory in MiB.

    The state of each GPU is consistent. Neither an NVML session nor a lock is needed.

    :param held: holders by UUID of the GPU or MIG device
    """
    return [_describe_gpu(node, minor, held) for minor in node.present]


def _describe_gpu(node: SimulatedNode, minor: int, held: dict[str, str]) -> dict[str, Any]:
    state, product = node.gpu_state(minor), node.description.gpu_product
    uuid, processes = node.description.gpu_uuid(minor), node.processes(minor)
    in_order = sorted(state.instances, key=lambda gi: gi.start)
    return {
        "node": node.description.name,
        "index": node.present.index(minor),
        "name": product.name,
        "uuid": uuid,
        "pciBusId": node.gpus[minor].pci_bus_id,
        "memoryTotal": product.memory_mib,
        "memoryUsed": sum(process.memory for process in processes) >> 20,
        "migMode": _mode(product.mig_capable, state.mig_enabled),
        "migModePending": _mode(product.mig_capable, state.mig_pending),
        "computeMode": ComputeMode(state.compute_mode).name,
        "timeSlice": str(list(TimeSlice)[state.time_slice]),
        "holder": held.get(uuid),
        "processes": _pids(processes, ""),
        "migDevices": [row for gi in in_order for row in _describe_instance(product, processes, gi, held)],
    }


def _describe_instance(
    product: Product, processes: Sequence[Process], gi: GpuInstance, held: dict[str, str]
) -> list[dict[str, Any]]:
    profile = product.by_id[gi.profile]
    common: dict[str, Any] = {
        "gpuInstance": gi.id,
        "profile": profile.name,
        "placement": {"start": gi.start, "size": gi.size},
        "memory": profile.memory_at(gi.start),
    }
    if not gi.compute:
        return [common | {"computeInstance": None, "uuid": None, "holder": None, "processes": []}]
    return [
        {**common, "computeInstance": ci.id, "uuid": ci.uuid, "holder": held.get(ci.uuid)}
        | {"processes": _pids(processes, ci.uuid)}
        for ci in gi.compute
    ]


def _pids(processes: Sequence[Process], device: str) -> list[int]:
    return [process.pid for process in processes if process.device == device]


def _mode(capable: bool, enabled: bool) -> str:
    return ("Enabled" if enabled else "Disabled") if capable else "N/A"
