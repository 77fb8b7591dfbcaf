"""A Host over the pynvml functions: the real module, or the simulator's."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL
from functools import partial
from pathlib import Path
from typing import Any

import pynvml

from driver.errors import EnvironmentFault, HardwareError
from driver.hardware import nodes
from driver.hardware.calls import described, fact, nvml_call
from driver.hardware.discovery import read_gpu, with_cliques
from driver.hardware.driver_root import HOST, device_root
from driver.hardware.events import Events
from driver.hardware.host import ComputeMode, DeviceNode, Discovery, GpuFault, HostPaths
from driver.hardware.mig import MigOperations
from driver.hardware.patient import Patient
from driver.hardware.time_slice import TimeSliceTool
from driver.model.gpu import Gpu, Partition, Placement, Profile
from driver.model.health import GpuEvent
from driver.model.sharing import TimeSlice


def load_nvml(library: Path | None) -> Any:
    """The real pynvml module, bound to ``library`` (default: what the dynamic linker finds).

    Raises EnvironmentFault where the library can't be loaded.
    """
    if library is not None:
        try:
            pynvml.nvmlLib = CDLL(str(library))
        except OSError as error:
            raise EnvironmentFault(
                f"--nvml-library {library}: can't be loaded ({error}); expected the driver's libnvidia-ml.so.1"
            ) from error
    return pynvml


ANSWER_S = 15.0
"""How long discovery waits for a GPU; one in order answers in milliseconds, a cold one in a few seconds."""


class NvmlHost:
    """Keeps one NVML session for its whole life: handles are cached, since lookups are slow under load."""

    def __init__(self, nvml: Any, paths: HostPaths, *, simulated: bool, driver_root: Path = HOST) -> None:
        """Start the session. Raises EnvironmentFault where NVML is missing or refuses to start."""
        self._nvml = nvml
        self._paths = paths
        self._simulated = simulated
        self._driver_root = driver_root
        self._handles: dict[str, Any] = {}
        self._mig = MigOperations(nvml)
        self._events = Events(nvml)
        self._patient = Patient(ANSWER_S)
        # The simulator's tool is a script; the file in the place of NVML's library can't be loaded.
        self._time_slice = TimeSliceTool(paths.here(str(driver_root)), needs_library=not simulated)
        try:
            nvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise EnvironmentFault(
                f"NVML can't be used: {described(error)}; is the NVIDIA driver (550 or newer) installed and loaded? "
                "--nvml-library names the library, --gpus sim:dgx-h100 simulates a node without GPUs"
            ) from error

    def close(self) -> None:
        """End the NVML session; no method may be called afterwards."""
        with nvml_call("closing NVML"):
            self._nvml.nvmlShutdown()

    def discover(self) -> Discovery:
        with nvml_call("counting GPUs"):
            count = self._nvml.nvmlDeviceGetCount()
        found: list[Gpu] = []
        faults: list[GpuFault] = []
        for index in range(count):
            try:
                handle, gpu = self._patient.ask(index, partial(self._read, index))
            except pynvml.NVMLError as error:
                faults.append(GpuFault(index, f"NVML says {described(error)}"))
                continue
            except HardwareError as error:
                faults.append(GpuFault(index, str(error)))
                continue
            self._handles[gpu.uuid] = handle
            self._events.register(gpu.uuid, handle)
            found.append(gpu)
        self._events.keep([gpu.uuid for gpu in found])
        return Discovery(tuple(with_cliques(found)), tuple(faults))

    def _read(self, index: int) -> tuple[Any, Gpu]:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        return handle, read_gpu(self._nvml, handle, index, self._paths.root, simulated=self._simulated)

    def partitions(self, gpu: Gpu) -> Sequence[Partition]:
        if not self.mig_enabled(gpu):
            return ()
        return tuple(self._mig.partitions(self._handle(gpu), gpu))

    def find_partition(self, gpu: Gpu, profile: Profile, placement: Placement) -> Partition | None:
        return self._mig.find(self._handle(gpu), gpu, profile, placement) if self.mig_enabled(gpu) else None

    def mig_enabled(self, gpu: Gpu) -> bool:
        return gpu.mig_capable and self._mig.enabled(self._handle(gpu), gpu)

    def set_mig_mode(self, gpu: Gpu, *, enabled: bool) -> None:
        self._mig.set_mode(self._handle(gpu), gpu, enabled=enabled)

    def request_mig_mode(self, gpu: Gpu, *, enabled: bool) -> bool:
        return self._mig.request_mode(self._handle(gpu), gpu, enabled=enabled)

    def compute_mode(self, gpu: Gpu) -> ComputeMode:
        with nvml_call(f"reading the compute mode of {gpu.uuid}"):
            return ComputeMode(self._nvml.nvmlDeviceGetComputeMode(self._handle(gpu)))

    def processes(self, gpu: Gpu) -> int:
        with nvml_call(f"listing the processes of {gpu.uuid}"):
            return len(self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle(gpu)))

    def set_time_slice(self, gpu: Gpu, interval: TimeSlice) -> None:
        self._time_slice.set(gpu.uuid, interval)

    def wait_for_event(self, timeout_s: float) -> GpuEvent | None:
        return self._events.wait(dict(self._handles), timeout_s)

    def recovery_action(self, gpu: Gpu) -> int | None:
        with nvml_call(f"reading what {gpu.uuid} needs to recover"):
            wanted = [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
            values = fact(self._nvml.nvmlDeviceGetFieldValues, self._handle(gpu), wanted)
        told = values[0] if values else None
        return int(told.value.uiVal) if told is not None and told.nvmlReturn == pynvml.NVML_SUCCESS else None

    def create_gpu_instance(self, gpu: Gpu, profile: Profile, placement: Placement) -> Partition:
        return self._mig.create_gpu_instance(self._handle(gpu), gpu, profile, placement)

    def create_compute_instance(self, gpu: Gpu, partition: Partition) -> Partition:
        return self._mig.create_compute_instance(self._handle(gpu), gpu, partition)

    def destroy_compute_instance(self, gpu: Gpu, partition: Partition) -> None:
        self._mig.destroy_compute_instance(self._handle(gpu), gpu, partition)

    def destroy_gpu_instance(self, gpu: Gpu, partition: Partition) -> None:
        self._mig.destroy_gpu_instance(self._handle(gpu), gpu, partition)

    def gpu_nodes(self, gpu: Gpu) -> Sequence[DeviceNode]:
        return nodes.gpu_nodes(self._paths, gpu, device_root(self._paths, self._driver_root))

    def partition_nodes(self, gpu: Gpu, partition: Partition) -> Sequence[DeviceNode]:
        return nodes.partition_nodes(self._paths, gpu, partition, device_root(self._paths, self._driver_root))

    def _handle(self, gpu: Gpu) -> Any:
        if gpu.uuid not in self._handles:
            with nvml_call(f"looking up {gpu.uuid}"):
                self._handles[gpu.uuid] = self._nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        return self._handles[gpu.uuid]
