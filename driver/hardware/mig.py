"""MIG operations through the pynvml functions: list, create and destroy instances.

Order and rules from the MIG user guide: MIG mode, then GPU instance, then compute instance; removal in
reverse. A GPU instance is always created at an explicit placement: the driver's own choice causes fragmentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import byref, c_uint
from itertools import islice
from typing import Any

import pynvml

from driver.errors import HardwareError
from driver.hardware.nvml_errors import REMEDIES, UNKNOWN_NUMBER, nvml_call, refused
from driver.model.gpu import Gpu, Partition, Placement, Profile
from driver.model.offer import compute_instances

GONE = pynvml.NVML_ERROR_NOT_FOUND

CURRENT_NO_MORE = frozenset({GONE, pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT})
"""What NVML says of an instance that is gone; NOT_SUPPORTED with MIG mode off."""


class MigOperations:
    """MIG on the GPUs of one NVML session. Handles are cached, because lookups are slow under load."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: dict[str, Any] = {}
        self._compute_profile_ids: dict[tuple[str, int], int] = {}

    def mig_enabled(self, gpu: Gpu) -> bool:
        """Whether MIG mode is in force now."""
        if not gpu.mig_capable:
            return False
        handle = self._handles.get(gpu.uuid) or self._handle(gpu)
        try:
            current, _pending = self._nvml.nvmlDeviceGetMigMode(handle)
        except pynvml.NVMLError as error:
            raise refused(f"reading the MIG mode of {gpu.uuid}", error) from error
        return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)

    def set_mig_mode(self, gpu: Gpu, *, enabled: bool) -> None:
        """Switch MIG mode; returns only once it is in force, else raises (in use, reset required)."""
        # NVML returns success for a pending mode; the activation status shows the difference.
        activation = self._set_mig_mode(gpu, enabled=enabled)
        what = f"switching MIG mode {'on' if enabled else 'off'} on {gpu.uuid}"
        if activation != pynvml.NVML_SUCCESS:
            raise refused(what, pynvml.NVMLError(activation))
        if self.mig_enabled(gpu) != enabled:
            pending = pynvml.NVML_ERROR_RESET_REQUIRED
            raise HardwareError(f"{what}: NVML says SUCCESS, but the mode is only pending; {REMEDIES[pending]}")

    def request_mig_mode(self, gpu: Gpu) -> bool:
        """Request MIG mode; False where it takes effect only with a reset of the GPU."""
        self._set_mig_mode(gpu, enabled=True)
        return self.mig_enabled(gpu)

    def partitions(self, gpu: Gpu) -> Sequence[Partition]:
        """All MIG instances that exist on ``gpu``, whoever made them; empty with MIG mode off.

        Of a profile whose partitions are shared, one for each compute instance.
        """
        return tuple(self.all_instances(gpu)) if self.mig_enabled(gpu) else ()

    def all_instances(self, gpu: Gpu) -> Iterator[Partition]:
        """All MIG instances that exist on ``gpu``, which must be in MIG mode."""
        for profile in gpu.profiles:
            with nvml_call(f"listing the {profile.name} instances of {gpu.uuid}"):
                yield from self._list_instances(gpu, profile)

    def find_instances(self, gpu: Gpu, profile: Profile, placement: Placement) -> Sequence[Partition]:
        """The instances of ``profile`` at exactly ``placement``: one for each compute instance, at most one unless
        partitions of the profile are shared; one that is not complete if there is none."""
        is_on, instances = self.find_if_mig_enabled(gpu, profile, placement)
        if not is_on and self.mig_enabled(gpu):  # switched on since the last scan: a partition must not be forgotten
            raise HardwareError(
                f"listing the {profile.name} instances of {gpu.uuid}: NOT_SUPPORTED though MIG mode is on"
            )
        return instances

    def find_if_mig_enabled(self, gpu: Gpu, profile: Profile, placement: Placement) -> tuple[bool, Sequence[Partition]]:
        """Whether MIG mode is in force, by asking for the instances only; and these as ``find_instances``."""
        try:
            at_placement = [
                partition for partition in self._list_instances(gpu, profile) if partition.placement == placement
            ]
        except pynvml.NVMLError as error:
            # That is what NVML says with MIG mode off. A GPU that was in MIG mode at the last scan is asked again.
            maybe_off = error.value == pynvml.NVML_ERROR_NOT_SUPPORTED
            if maybe_off and not (gpu.mig_mode.in_force and self.mig_enabled(gpu)):
                return False, ()
            raise refused(f"listing the {profile.name} instances of {gpu.uuid}", error) from error
        return True, at_placement

    def is_current(self, gpu: Gpu, partition: Partition) -> bool:
        """Whether ``partition`` still exists with the same ids, placement and UUID. Raises HardwareError on doubt."""
        nvml = self._nvml
        try:
            instance = nvml.nvmlDeviceGetGpuInstanceById(self._handle(gpu), partition.gpu_instance_id)
            info = nvml.nvmlGpuInstanceGetInfo(instance)
            if (info.profileId, info.placement.start) != (partition.profile_id, partition.placement.start):
                return False
            compute = nvml.nvmlGpuInstanceGetComputeInstanceById(instance, partition.compute_instance_id)
            device = nvml.nvmlComputeInstanceGetInfo_v2(compute).device
            return bool(nvml.nvmlDeviceGetUUID(device) == partition.uuid)
        except pynvml.NVMLError as error:
            if error.value in CURRENT_NO_MORE:
                return False
            raise refused(f"looking up partition {partition.uuid} of {gpu.uuid}", error) from error

    def create_gpu_instance(self, gpu: Gpu, profile: Profile, placement: Placement) -> Partition:
        """Create the GPU instance at exactly ``placement``; the result has no compute instance yet."""
        nvml, place = self._nvml, pynvml.c_nvmlGpuInstancePlacement_t(placement.start, placement.size)
        try:
            instance = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(self._handle(gpu), profile.id, byref(place))
            info = nvml.nvmlGpuInstanceGetInfo(instance)
        except pynvml.NVMLError as error:
            raise refused(f"cutting {profile.name} on memory slices {placement} of {gpu.uuid}", error) from error
        return Partition(gpu.uuid, profile.id, Placement(info.placement.start, info.placement.size), info.id)

    def create_compute_instance(self, gpu: Gpu, partition: Partition) -> Partition:
        """Give ``partition`` the one compute instance that spans it, or another one if it is shared; the result is
        complete."""
        try:
            instance = self._nvml.nvmlDeviceGetGpuInstanceById(self._handle(gpu), partition.gpu_instance_id)
            profile_id = self._compute_profile_id(instance, gpu, partition.profile_id)
            compute = self._nvml.nvmlGpuInstanceCreateComputeInstance(instance, profile_id)
            return self._complete(partition, compute)
        except pynvml.NVMLError as error:
            what = f"creating a compute instance in GPU instance {partition.gpu_instance_id} of {gpu.uuid}"
            raise refused(what, error) from error

    def destroy_compute_instance(self, gpu: Gpu, partition: Partition) -> None:
        """Remove the compute instance; one that is gone already is no error."""
        with nvml_call(f"removing the compute instance of GPU instance {partition.gpu_instance_id} of {gpu.uuid}"):
            try:
                instance = self._nvml.nvmlDeviceGetGpuInstanceById(self._handle(gpu), partition.gpu_instance_id)
                compute = self._nvml.nvmlGpuInstanceGetComputeInstanceById(instance, partition.compute_instance_id)
                self._nvml.nvmlComputeInstanceDestroy(compute)
            except pynvml.NVMLError as error:
                if error.value != GONE:
                    raise

    def destroy_gpu_instance(self, gpu: Gpu, partition: Partition) -> None:
        """Remove the GPU instance; one that is gone already is no error."""
        what = f"removing GPU instance {partition.gpu_instance_id} of {gpu.uuid}"
        try:
            instance = self._nvml.nvmlDeviceGetGpuInstanceById(self._handle(gpu), partition.gpu_instance_id)
            self._nvml.nvmlGpuInstanceDestroy(instance)
        except pynvml.NVMLError as error:
            if error.value != GONE:
                raise refused(what, error) from error
            # Without a record the instance would stay forever, so NOT_FOUND is accepted only if the list agrees.
            if any(p.gpu_instance_id == partition.gpu_instance_id for p in self.all_instances(gpu)):
                raise HardwareError(f"{what}: NVML says NOT_FOUND and lists it all the same", GONE) from error

    def _handle(self, gpu: Gpu) -> Any:
        if gpu.uuid not in self._handles:
            with nvml_call(f"looking up {gpu.uuid}"):
                self._handles[gpu.uuid] = self._nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        return self._handles[gpu.uuid]

    def _set_mig_mode(self, gpu: Gpu, *, enabled: bool) -> int:
        """Return NVML's activation status."""
        mode = pynvml.NVML_DEVICE_MIG_ENABLE if enabled else pynvml.NVML_DEVICE_MIG_DISABLE
        try:
            return int(self._nvml.nvmlDeviceSetMigMode(self._handle(gpu), mode))
        except pynvml.NVMLError as error:
            raise refused(f"switching MIG mode {'on' if enabled else 'off'} on {gpu.uuid}", error) from error

    def _list_instances(self, gpu: Gpu, profile: Profile) -> Iterator[Partition]:
        """Raises NVMLError: NOT_SUPPORTED with MIG mode off."""
        count = c_uint(profile.max_instances)
        handles = (pynvml.c_nvmlGpuInstance_t * profile.max_instances)()
        self._nvml.nvmlDeviceGetGpuInstances(self._handle(gpu), profile.id, handles, byref(count))
        for instance in handles[: count.value]:
            info = self._nvml.nvmlGpuInstanceGetInfo(instance)
            place = Placement(info.placement.start, info.placement.size)
            partition = Partition(gpu.uuid, profile.id, place, info.id)
            created = self._compute_instances(instance)
            if compute_instances(profile.name) == 1:  # Tessera creates exactly one, which spans the GPU instance
                created = islice(created, 1)
            complete = [self._complete(partition, compute) for compute in created]
            yield from complete or [partition]

    def _compute_instances(self, instance: Any) -> Iterator[Any]:
        for info in self._compute_profiles(instance):
            count = c_uint(info.instanceCount)
            handles = (pynvml.c_nvmlComputeInstance_t * info.instanceCount)()
            self._nvml.nvmlGpuInstanceGetComputeInstances(instance, info.id, handles, byref(count))
            yield from handles[: count.value]

    def _complete(self, partition: Partition, compute: Any) -> Partition:
        info = self._nvml.nvmlComputeInstanceGetInfo_v2(compute)
        uuid = self._nvml.nvmlDeviceGetUUID(info.device)
        return Partition(
            partition.gpu_uuid, partition.profile_id, partition.placement, partition.gpu_instance_id, info.id, uuid
        )

    def _compute_profiles(self, instance: Any) -> Iterator[Any]:
        shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
        for index in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            try:
                yield self._nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, index, shared)
            except pynvml.NVMLError as error:
                if error.value not in UNKNOWN_NUMBER:
                    raise

    def _compute_profile_id(self, instance: Any, gpu: Gpu, profile_id: int) -> int:
        """The compute-instance profile with every slice and SM of the GPU instance, or that of a part if it is shared.

        Slice count and SMs must both match: on GH200 a 1-slice instance needs profile 7, not 0. A part has as many
        slices as the name of the GPU instance's profile says.
        """
        key = (gpu.uuid, profile_id)
        if key in self._compute_profile_ids:
            return self._compute_profile_ids[key]
        whole = next(profile for profile in gpu.profiles if profile.id == profile_id)
        spanning = (whole.compute_slices, whole.multiprocessors)
        parts = compute_instances(whole.name)
        offered = {}
        for info in self._compute_profiles(instance):
            offered[info.id] = (info.sliceCount, info.multiprocessorCount)
            if offered[info.id] == spanning if parts == 1 else info.sliceCount == whole.instance_slices:
                self._compute_profile_ids[key] = int(info.id)
                return self._compute_profile_ids[key]
        needed = f"fits {whole.name} {parts} times" if parts > 1 else f"spans {whole.name}"
        raise HardwareError(
            f"{gpu.uuid}: no compute-instance profile {needed} ({spanning[0]} slices, {spanning[1]} SMs); "
            f"NVML offers {offered or 'none'} (profile id: slices, SMs)"
        )
