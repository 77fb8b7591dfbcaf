"""A Host over the pynvml functions: the real module, or the simulator's."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pynvml

from driver.errors import EnvironmentFault
from driver.hardware import nodes
from driver.hardware.calls import described, nvml_call
from driver.hardware.discovery import read_gpu, with_cliques
from driver.hardware.events import Events
from driver.hardware.host import DeviceNode, Discovery, GpuFault, HostPaths
from driver.hardware.mig import MigOperations
from driver.model.gpu import Gpu, Partition, Placement, Profile


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


class NvmlHost:
    """Keeps one NVML session for its whole life: handles are cached, since lookups are slow under load."""

    def __init__(self, nvml: Any, paths: HostPaths, *, simulated: bool) -> None:
        """Start the session. Raises EnvironmentFault where NVML is missing or refuses to start."""
        self._nvml = nvml
        self._paths = paths
        self._simulated = simulated
        self._handles: dict[str, Any] = {}
        self._mig = MigOperations(nvml)
        self._events = Events(nvml)
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
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                gpu = read_gpu(self._nvml, handle, index, self._paths.root, simulated=self._simulated)
            except pynvml.NVMLError as error:
                faults.append(GpuFault(index, f"NVML says {described(error)}"))
                continue
            self._handles[gpu.uuid] = handle
            found.append(gpu)
        return Discovery(tuple(with_cliques(found)), tuple(faults))

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

    def wait_for_event(self, timeout_s: float) -> bool:
        return self._events.wait(list(self._handles.items()), timeout_s)

    def create_gpu_instance(self, gpu: Gpu, profile: Profile, placement: Placement) -> Partition:
        return self._mig.create_gpu_instance(self._handle(gpu), gpu, profile, placement)

    def create_compute_instance(self, gpu: Gpu, partition: Partition) -> Partition:
        return self._mig.create_compute_instance(self._handle(gpu), gpu, partition)

    def destroy_compute_instance(self, gpu: Gpu, partition: Partition) -> None:
        self._mig.destroy_compute_instance(self._handle(gpu), gpu, partition)

    def destroy_gpu_instance(self, gpu: Gpu, partition: Partition) -> None:
        self._mig.destroy_gpu_instance(self._handle(gpu), gpu, partition)

    def gpu_nodes(self, gpu: Gpu) -> Sequence[DeviceNode]:
        return nodes.gpu_nodes(self._paths, gpu)

    def partition_nodes(self, gpu: Gpu, partition: Partition) -> Sequence[DeviceNode]:
        return nodes.partition_nodes(self._paths, gpu, partition)

    def _handle(self, gpu: Gpu) -> Any:
        if gpu.uuid not in self._handles:
            with nvml_call(f"looking up {gpu.uuid}"):
                self._handles[gpu.uuid] = self._nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        return self._handles[gpu.uuid]
