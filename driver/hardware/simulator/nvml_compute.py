"""Simulated NVML: compute instances, and the MIG devices they are."""

# ruff: noqa: N802, N803
from __future__ import annotations

import ctypes
from typing import Any

import pynvml

from . import mig
from .nvml_arguments import error, fill_unsized, integer, pointer_to
from .nvml_keys import ComputeInstanceKey, GpuInstanceKey, GpuKey, MigKey
from .nvml_session import ComputeView, GpuInstanceView, NvmlSession, simulated
from .products import Profile
from .state import ComputeInstance, GpuState

_SUCCESS: int = pynvml.NVML_SUCCESS


class ComputeCalls(NvmlSession):
    """``*ComputeInstance*`` and everything that takes a MIG device's handle."""

    @simulated()
    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, device: Any, profile: int, engProfile: int, version: int = 2
    ) -> Any:
        if version not in (1, 2):
            raise error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        found = self.gpu_instance(device)
        in_range = 0 <= integer(profile) < pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT
        if not in_range or integer(engProfile) != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return _profile_info(self._compute_profile(found, profile), self._profile(found), version)

    @simulated()
    def nvmlGpuInstanceGetComputeInstanceProfileInfoV(
        self, device: Any, profile: int, engProfile: int, version: int = 2
    ) -> Any:
        return self.nvmlGpuInstanceGetComputeInstanceProfileInfo(device, profile, engProfile, version)

    @simulated()
    def nvmlGpuInstanceGetComputeInstanceRemainingCapacity(self, gpuInstance: Any, profileId: int) -> int:
        found = self.gpu_instance(gpuInstance)
        profile = self._compute_profile(found, profileId)
        return len(mig.free_compute_starts(self.machine.product, found.instance, profile))

    @simulated()
    def nvmlGpuInstanceCreateComputeInstance(self, gpuInstance: Any, profileId: int) -> Any:
        found, wanted = self.gpu_instance(gpuInstance), integer(profileId)
        serial, product = found.instance.serial, self.machine.product

        def create(state: GpuState) -> tuple[GpuState, ComputeInstance]:
            instance = self.find_gpu_instance(state, serial)
            return mig.create_compute_instance(product, state, instance, wanted)

        created = self.machine.reconfigure(found.minor, create, self.machine.latency.create_compute_instance)
        return self.handle(ComputeInstanceKey(found.minor, created.uuid))

    @simulated()
    def nvmlComputeInstanceDestroy(self, computeInstance: Any) -> int:
        found = self.compute_instance(computeInstance)
        minor, uuid = found.minor, found.compute.uuid

        def destroy(state: GpuState) -> tuple[GpuState, None]:
            current = self.find_compute(minor, state, uuid)
            return mig.destroy_compute_instance(state, current.instance, current.compute), None

        self.machine.reconfigure(minor, destroy, self.machine.latency.destroy_compute_instance)
        self.forget(ComputeInstanceKey(minor, uuid))
        self.forget(MigKey(minor, uuid))
        return _SUCCESS

    @simulated()
    def nvmlGpuInstanceGetComputeInstances(
        self, gpuInstance: Any, profileId: int, computeInstancesRef: Any, countRef: Any
    ) -> int:
        found = self.gpu_instance(gpuInstance)
        profile = self._compute_profile(found, profileId)
        present = [ci for ci in found.instance.compute if ci.profile == profile.id]
        handles = [self.handle(ComputeInstanceKey(found.minor, ci.uuid)) for ci in present]
        fill_unsized(pynvml.c_nvmlComputeInstance_t, computeInstancesRef, profile.max_instances, handles)
        pointer_to(ctypes.c_uint, countRef)[0] = len(present)
        return _SUCCESS

    @simulated()
    def nvmlGpuInstanceGetComputeInstanceById(self, gpuInstance: Any, computeInstanceId: int) -> Any:
        found = self.gpu_instance(gpuInstance)
        for compute in found.instance.compute:
            if compute.id == integer(computeInstanceId):
                return self.handle(ComputeInstanceKey(found.minor, compute.uuid))
        raise error(pynvml.NVML_ERROR_NOT_FOUND)

    @simulated()
    def nvmlComputeInstanceGetInfo_v2(self, computeInstance: Any) -> Any:
        found = self.compute_instance(computeInstance)
        info = pynvml.c_nvmlComputeInstanceInfo_t()
        info.device = self.handle(MigKey(found.minor, found.compute.uuid))
        info.gpuInstance = self.handle(GpuInstanceKey(found.minor, found.instance.serial))
        info.id, info.profileId = found.compute.id, found.compute.profile
        info.placement.start, info.placement.size = found.compute.start, found.compute.size
        return info

    @simulated()
    def nvmlComputeInstanceGetInfo(self, computeInstance: Any) -> Any:
        return self.nvmlComputeInstanceGetInfo_v2(computeInstance)

    @simulated()
    def nvmlDeviceIsMigDeviceHandle(self, device: Any) -> ctypes.c_uint:
        # pynvml returns the ctypes object here, not its value.
        return ctypes.c_uint(isinstance(self.device(device), MigKey))

    @simulated()
    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any:
        minor = self.gpu(device, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if not self.machine.product.mig_capable:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if not 0 <= integer(index) < self.machine.product.max_gpu_instances:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        for instance in self.machine.state(minor).instances:
            for compute in instance.compute:
                if compute.index == integer(index):
                    return self.handle(MigKey(minor, compute.uuid))
        raise error(pynvml.NVML_ERROR_NOT_FOUND)

    @simulated()
    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: Any) -> Any:
        return self.handle(GpuKey(self.mig_device(migDevice).minor))

    @simulated()
    def nvmlDeviceGetGpuInstanceId(self, device: Any) -> int:
        return self.mig_device(device).instance.id

    @simulated()
    def nvmlDeviceGetComputeInstanceId(self, device: Any) -> int:
        return self.mig_device(device).compute.id

    @simulated()
    def nvmlDeviceGetAttributes_v2(self, device: Any) -> Any:
        if isinstance(self.device(device), GpuKey):
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self._attributes(self.mig_device(device))

    @simulated()
    def nvmlDeviceGetAttributes(self, device: Any) -> Any:
        return self.nvmlDeviceGetAttributes_v2(device)

    def _attributes(self, found: ComputeView) -> Any:
        profile = self.machine.product.by_id[found.instance.profile]
        compute = mig.compute_profiles(self.machine.product, profile)[found.compute.profile]
        attributes = pynvml.c_nvmlDeviceAttributes()
        _share_engines(attributes, profile)
        attributes.multiprocessorCount = compute.multiprocessors
        attributes.gpuInstanceSliceCount = profile.slices
        attributes.computeInstanceSliceCount = compute.slices
        attributes.memorySizeMB = profile.memory_at(found.instance.start)
        return attributes

    def _profile(self, found: GpuInstanceView) -> Profile:
        return self.machine.product.by_id[found.instance.profile]

    def _compute_profile(self, found: GpuInstanceView, profile_id: int) -> mig.ComputeProfile:
        """That compute profile of the GPU instance; NOT_SUPPORTED where it has none."""
        profile = mig.compute_profiles(self.machine.product, self._profile(found)).get(integer(profile_id))
        if profile is None:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return profile


def _profile_info(compute: mig.ComputeProfile, profile: Profile, version: int) -> Any:
    if version == 1:
        info = pynvml.c_nvmlComputeInstanceProfileInfo_t()
    else:
        info = pynvml.c_nvmlComputeInstanceProfileInfo_v2_t()
        info.name = f"MIG {compute.name}"
    _share_engines(info, profile)
    info.id, info.sliceCount, info.instanceCount = compute.id, compute.slices, compute.max_instances
    info.multiprocessorCount = compute.multiprocessors
    return info


def _share_engines(struct: Any, profile: Profile) -> None:
    struct.sharedCopyEngineCount = profile.copy_engines
    struct.sharedDecoderCount = profile.decoders
    struct.sharedEncoderCount = profile.encoders
    struct.sharedJpegCount = profile.jpeg
    struct.sharedOfaCount = profile.ofa
