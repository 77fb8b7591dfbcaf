"""MIG operations through the pynvml functions: list, create and destroy instances.

Order and rules from the MIG user guide: MIG mode, then GPU instance, then compute instance; removal in
reverse. A GPU instance is always created at an explicit placement: the driver's own choice causes fragmentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_uint
from typing import Any

import pynvml

from driver.errors import HardwareError
from driver.hardware.discovery import NO_SUCH_PROFILE
from driver.hardware.nvml_errors import nvml_call, text
from driver.model.gpu import Gpu, Partition, Placement, Profile

GONE = pynvml.NVML_ERROR_NOT_FOUND


class MigOperations:
    """MIG on one node. Stateless except for a cache of the compute-instance profiles that span a GPU instance."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._spanning: dict[tuple[str, int], int] = {}

    def enabled(self, handle: Any, gpu: Gpu) -> bool:
        with nvml_call(f"reading the MIG mode of {gpu.uuid}"):
            current, _pending = self._nvml.nvmlDeviceGetMigMode(handle)
            return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)

    def set_mode(self, handle: Any, gpu: Gpu, *, enabled: bool) -> None:
        wanted = pynvml.NVML_DEVICE_MIG_ENABLE if enabled else pynvml.NVML_DEVICE_MIG_DISABLE
        what = f"switching MIG mode {'on' if enabled else 'off'} on {gpu.uuid}"
        with nvml_call(what):
            activation = self._nvml.nvmlDeviceSetMigMode(handle, wanted)
        # NVML returns success for a pending mode; the activation status shows the difference.
        if activation != pynvml.NVML_SUCCESS:
            with nvml_call(what):
                raise pynvml.NVMLError(activation)
        if self.enabled(handle, gpu) != enabled:
            raise HardwareError(f"{what}: NVML says SUCCESS, but the mode is only pending; the GPU needs a reset")

    def request_mode(self, handle: Any, gpu: Gpu, *, enabled: bool) -> bool:
        """Request a MIG mode; False if it is pending until the GPU is reset."""
        wanted = pynvml.NVML_DEVICE_MIG_ENABLE if enabled else pynvml.NVML_DEVICE_MIG_DISABLE
        with nvml_call(f"asking for MIG mode on {gpu.uuid}"):
            self._nvml.nvmlDeviceSetMigMode(handle, wanted)
        return self.enabled(handle, gpu) == enabled

    def partitions(self, handle: Any, gpu: Gpu) -> Iterator[Partition]:
        for profile in gpu.profiles:
            yield from self._instances(handle, gpu, profile)

    def find(self, handle: Any, gpu: Gpu, profile: Profile, placement: Placement) -> Partition | None:
        found = (p for p in self._instances(handle, gpu, profile) if p.placement == placement)
        return next(found, None)

    def create_gpu_instance(self, handle: Any, gpu: Gpu, profile: Profile, place: Placement) -> Partition:
        wanted = pynvml.c_nvmlGpuInstancePlacement_t(place.start, place.size)
        with nvml_call(f"cutting {profile.name} on memory slices {place} of {gpu.uuid}"):
            instance = self._nvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile.id, byref(wanted))
            info = self._nvml.nvmlGpuInstanceGetInfo(instance)
        return Partition(gpu.uuid, profile.id, Placement(info.placement.start, info.placement.size), info.id)

    def create_compute_instance(self, handle: Any, gpu: Gpu, partition: Partition) -> Partition:
        with nvml_call(f"creating a compute instance in GPU instance {partition.gpu_instance_id} of {gpu.uuid}"):
            instance = self._nvml.nvmlDeviceGetGpuInstanceById(handle, partition.gpu_instance_id)
            spanning = self._spanning_profile(instance, gpu, partition.profile_id)
            compute = self._nvml.nvmlGpuInstanceCreateComputeInstance(instance, spanning)
            return self._complete(partition, compute)

    def destroy_compute_instance(self, handle: Any, gpu: Gpu, partition: Partition) -> None:
        what = f"removing the compute instance of GPU instance {partition.gpu_instance_id} of {gpu.uuid}"
        with nvml_call(what), _gone_is_fine():
            instance = self._nvml.nvmlDeviceGetGpuInstanceById(handle, partition.gpu_instance_id)
            compute = self._nvml.nvmlGpuInstanceGetComputeInstanceById(instance, partition.compute_instance_id)
            self._nvml.nvmlComputeInstanceDestroy(compute)

    def destroy_gpu_instance(self, handle: Any, gpu: Gpu, partition: Partition) -> None:
        what = f"removing GPU instance {partition.gpu_instance_id} of {gpu.uuid}"
        try:
            instance = self._nvml.nvmlDeviceGetGpuInstanceById(handle, partition.gpu_instance_id)
            self._nvml.nvmlGpuInstanceDestroy(instance)
        except pynvml.NVMLError as error:
            with nvml_call(what):
                if error.value != GONE:
                    raise
            # Without a record the instance would stay forever, so NOT_FOUND is accepted only if the list agrees.
            if any(p.gpu_instance_id == partition.gpu_instance_id for p in self.partitions(handle, gpu)):
                raise HardwareError(f"{what}: NVML says NOT_FOUND and lists it all the same", GONE) from error

    def _instances(self, handle: Any, gpu: Gpu, profile: Profile) -> Iterator[Partition]:
        count = c_uint(profile.max_instances)
        handles = (pynvml.c_nvmlGpuInstance_t * profile.max_instances)()
        with nvml_call(f"listing the {profile.name} instances of {gpu.uuid}"):
            self._nvml.nvmlDeviceGetGpuInstances(handle, profile.id, handles, byref(count))
            for instance in handles[: count.value]:
                info = self._nvml.nvmlGpuInstanceGetInfo(instance)
                place = Placement(info.placement.start, info.placement.size)
                partition = Partition(gpu.uuid, profile.id, place, info.id)
                compute = self._compute_instance(instance)
                yield partition if compute is None else self._complete(partition, compute)

    def _compute_instance(self, instance: Any) -> Any | None:
        """Return the first compute instance; Tessera creates exactly one, which spans the GPU instance."""
        for info in self._compute_profiles(instance):
            count = c_uint(info.instanceCount)
            handles = (pynvml.c_nvmlComputeInstance_t * info.instanceCount)()
            self._nvml.nvmlGpuInstanceGetComputeInstances(instance, info.id, handles, byref(count))
            if count.value:
                return handles[0]
        return None

    def _complete(self, partition: Partition, compute: Any) -> Partition:
        info = self._nvml.nvmlComputeInstanceGetInfo_v2(compute)
        uuid = text(self._nvml.nvmlDeviceGetUUID(info.device))
        return Partition(
            partition.gpu_uuid, partition.profile_id, partition.placement, partition.gpu_instance_id, info.id, uuid
        )

    def _compute_profiles(self, instance: Any) -> Iterator[Any]:
        shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
        for index in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            try:
                yield self._nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, index, shared)
            except pynvml.NVMLError as error:
                if error.value not in NO_SUCH_PROFILE:
                    raise

    def _spanning_profile(self, instance: Any, gpu: Gpu, profile_id: int) -> int:
        """The compute-instance profile with every slice and SM of the GPU instance.

        Slice count and SMs must both match: on GH200 a 1-slice instance needs profile 7, not 0.
        """
        key = (gpu.uuid, profile_id)
        if key not in self._spanning:
            whole = next(profile for profile in gpu.profiles if profile.id == profile_id)
            self._spanning[key] = self._find_spanning(instance, gpu, whole)
        return self._spanning[key]

    def _find_spanning(self, instance: Any, gpu: Gpu, whole: Profile) -> int:
        wanted = (whole.compute_slices, whole.multiprocessors)
        offered = {}
        for info in self._compute_profiles(instance):
            offered[info.id] = (info.sliceCount, info.multiprocessorCount)
            if offered[info.id] == wanted:
                return int(info.id)
        raise HardwareError(
            f"{gpu.uuid}: no compute-instance profile spans {whole.name} ({wanted[0]} slices, {wanted[1]} SMs); "
            f"NVML offers {offered or 'none'} (profile id: slices, SMs)"
        )


@contextmanager
def _gone_is_fine() -> Iterator[None]:
    """Ignore NOT_FOUND: the object to remove does not exist any more."""
    try:
        yield
    except pynvml.NVMLError as error:
        if error.value != GONE:
            raise
