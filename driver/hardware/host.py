"""The node's GPUs through the pynvml functions: the real module, or the simulator's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import CDLL
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from driver.errors import DriverMissing, EnvironmentFault, HardwareError
from driver.hardware.capture import Description, NvmlAnswer, describe_node, reading_answers
from driver.hardware.cgroups.memory_limits import CgroupMemoryLimits
from driver.hardware.device_nodes import DeviceNodes
from driver.hardware.events import Events
from driver.hardware.gpu_properties import read_gpu, with_cliques
from driver.hardware.host_paths import HOST, HostPaths, boot_id
from driver.hardware.mig import MigOperations
from driver.hardware.nvml_errors import described, fact, nvml_call
from driver.hardware.time_slice import TimeSliceTool
from driver.hardware.usage import UsageReader
from driver.model.gpu import Gpu
from driver.model.gpu_events_and_conditions import GpuEvent
from driver.model.gpu_settings import ComputeMode, TimeSlice


@dataclass(frozen=True, slots=True)
class GpuFault:
    """A GPU that discovery could not read, and the reason."""

    index: int
    reason: str

    def __str__(self) -> str:
        return f"GPU index {self.index}"


@dataclass(frozen=True, slots=True)
class Discovery:
    """The GPUs that answered, by index, and those that did not."""

    gpus: tuple[Gpu, ...]
    faults: tuple[GpuFault, ...]


T = TypeVar("T")


class MissingNvml:
    """The pynvml functions while the driver is missing: a session starts, and every call in it fails."""

    def nvmlInit(self) -> None:  # noqa: N802 - the name in pynvml
        """Start the session."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*_arguments: object) -> Any:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

        return fail


class TimeoutRunner:
    """Runs NVML calls with a timeout, each in its own thread: NVML itself has no timeouts. For use by one thread.

    A call that hangs is abandoned, and not repeated until it has returned. The threads are not daemons: a process
    that exits waits for calls that still hang.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._hung: dict[object, Future[Any]] = {}

    def run(self, key: object, call: Callable[[], T]) -> T:
        """Return the result of ``call``, or raise what it raises.

        Raises HardwareError after the timeout, and while an earlier call for ``key`` still hangs.
        """
        earlier = self._hung.get(key)
        if earlier is not None and not earlier.done():
            raise HardwareError(f"it has not answered for more than {self._timeout_seconds:g} s")
        executor = ThreadPoolExecutor(1, thread_name_prefix="nvml")
        pending = executor.submit(call)
        executor.shutdown(wait=False)
        try:
            result = pending.result(self._timeout_seconds)
        except TimeoutError:
            self._hung[key] = pending
            raise HardwareError(f"it did not answer within {self._timeout_seconds:g} s") from None
        self._hung.pop(key, None)
        return result


def load_nvml(library: Path | None) -> Any:
    """The real pynvml module, bound to ``library`` (default: what the dynamic linker finds).

    Raises EnvironmentFault where the library can't be loaded.
    """
    if library is not None:
        try:
            pynvml.nvmlLib = CDLL(str(library))
            # It may have functions of the library that was found before the driver was replaced.
            pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - pynvml has no other way
        except OSError as error:
            raise EnvironmentFault(
                f"--nvml-library {library}: can't be loaded ({error}); expected the driver's libnvidia-ml.so.1"
            ) from error
    return pynvml


GPU_ANSWER_TIMEOUT_SECONDS = 15.0
"""How long discovery waits for a GPU. A healthy GPU answers in milliseconds, after a cold start in a few seconds."""


class Host(MigOperations):
    """A node with GPUs, in one NVML session.

    ``paths``: where its files are; ``driver_root``: where this process sees the driver's. ``nodes``: its device nodes.
    ``memory_limits``: limits on the memory of cgroups.
    Every method raises HardwareError; none keeps a lock between calls. Callers serialise the methods that change a GPU
    (those that return a Partition or None) for each GPU; different GPUs may be used from several threads at once.
    """

    def __init__(self, nvml: Any, paths: HostPaths, *, simulated: bool, driver_root: Path = HOST) -> None:
        """Start the session. Raises DriverMissing where NVML is missing or refuses to start."""
        super().__init__(nvml)
        self.paths, self.driver_root, self.simulated = paths, paths.here(str(driver_root)), simulated
        self.nodes = DeviceNodes(paths, driver_root)
        self.memory_limits = CgroupMemoryLimits(nvml, paths, self._handle)
        self._events = Events(nvml)
        self._timeouts = TimeoutRunner(GPU_ANSWER_TIMEOUT_SECONDS)
        # The simulator's tool is a script; the file in the place of NVML's library can't be loaded.
        self._time_slice = TimeSliceTool(self.driver_root, needs_library=not simulated)
        try:
            nvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise DriverMissing(
                f"NVML can't be used: {described(error)}; is the NVIDIA driver (550 or newer) installed and loaded? "
                "--nvml-library names the library, --gpus sim:dgx-h100 simulates a node without GPUs",
                f"NVML says {described(error)}",
            ) from error

    def close(self) -> None:
        """End the NVML session; no method may be called afterwards."""
        with nvml_call("closing NVML"):
            self._nvml.nvmlShutdown()

    def boot_id(self) -> str | None:
        """The id of the current boot; None if it cannot be read."""
        return boot_id(self.paths) or None

    def count_gpus(self) -> int:
        """The number of GPUs, none of which is asked: one of them may hang."""
        with nvml_call("counting GPUs"):
            return int(self._nvml.nvmlDeviceGetCount())

    def discover(self) -> Discovery:
        """Read the facts of every GPU. A GPU that fails is reported; the others are unaffected."""
        found: list[Gpu] = []
        faults: list[GpuFault] = []
        for index in range(self.count_gpus()):
            try:
                handle, gpu = self._timeouts.run(index, partial(self._read, index))
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
        return handle, read_gpu(self._nvml, handle, index, self.paths.root, simulated=self.simulated)

    def read_again(self, gpu: Gpu) -> Gpu:
        """The properties of ``gpu`` as they are now; without its NVLink clique, for which all GPUs must be read."""
        with nvml_call(f"reading the properties of {gpu.uuid}"):
            return read_gpu(self._nvml, self._handle(gpu), gpu.index, self.paths.root, simulated=self.simulated)

    def reading_answers(self, gpu: Gpu) -> list[NvmlAnswer]:
        """How NVML's reading functions answer for ``gpu``."""
        return list(reading_answers(self._nvml, self._handle(gpu)))

    def events_of(self, gpu: Gpu) -> int:
        """Which of the event types WANTED (bits) ``gpu`` supports; they were registered once for the test."""
        with nvml_call(f"registering events of {gpu.uuid}"):
            return self._events.registered_for_test(self._handle(gpu))

    def describe(self, gpus: Sequence[Gpu]) -> Description:
        """A description of the node with ``gpus``, all of one product, for the simulator."""
        with nvml_call("describing the node"):
            return describe_node(self._nvml, self.paths.root, [(gpu, self._handle(gpu)) for gpu in gpus])

    def usage_reader(self) -> UsageReader:
        """Reads the usage of GPUs and partitions; its threads are apart from those of the other methods."""
        return UsageReader(self._nvml)

    def compute_mode(self, gpu: Gpu) -> ComputeMode:
        """Whether several processes may use ``gpu``. An administrator sets it; a reboot sets it to DEFAULT."""
        with nvml_call(f"reading the compute mode of {gpu.uuid}"):
            return ComputeMode(self._nvml.nvmlDeviceGetComputeMode(self._handle(gpu)))

    def set_compute_mode(self, gpu: Gpu, mode: ComputeMode) -> None:
        """Set it; a reboot sets it to DEFAULT. Programs that run go on."""
        with nvml_call(f"setting the compute mode of {gpu.uuid} to {mode.name}"):
            self._nvml.nvmlDeviceSetComputeMode(self._handle(gpu), mode)

    def processes(self, gpu: Gpu) -> int:
        """How many compute processes run on ``gpu`` itself; those on its partitions are not counted."""
        with nvml_call(f"listing the processes of {gpu.uuid}"):
            return len(self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle(gpu)))

    def set_time_slice(self, gpu: Gpu, interval: TimeSlice) -> None:
        """Set how long each process on ``gpu`` runs before the next; a GPU reset and a reboot set it to DEFAULT.

        It has no effect on partitions. Products before Volta answer NOT_SUPPORTED, so do not set DEFAULT where it
        is set already.
        """
        self._time_slice.set(gpu.uuid, interval)

    def wait_for_event(self, timeout_s: float) -> GpuEvent | None:
        """Wait for an NVML event; None on timeout. For use by one thread.

        No event is lost between two calls; an event may be returned twice.
        """
        return self._events.wait(dict(self._handles), timeout_s)

    def recovery_action(self, gpu: Gpu) -> int | None:
        """NVML's recovery action of ``gpu`` (0: none); None where the driver does not report it."""
        with nvml_call(f"reading the recovery action of {gpu.uuid}"):
            fields = [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
            values = fact(self._nvml.nvmlDeviceGetFieldValues, self._handle(gpu), fields)
        reported = values[0] if values else None
        if reported is None or reported.nvmlReturn != pynvml.NVML_SUCCESS:
            return None
        return int(reported.value.uiVal)
