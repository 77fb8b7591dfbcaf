"""Simulated NVML: MIG mode, GPU instances and compute instances."""

# ruff: noqa: N802, N803
from __future__ import annotations

import ctypes
from typing import Any

import pynvml

from driver.simulator import mig_rules
from driver.simulator.machine import MIG_CHANGED, ComputeInstance, GpuInstance, SimulatedGpuState
from driver.simulator.nvml_base import (
    ComputeInstanceKey,
    GpuInstanceKey,
    GpuKey,
    MigKey,
    NvmlSession,
    error,
    fill_unsized,
    integer,
    pointer_to,
    simulated,
)
from driver.simulator.products import ProductProfile

_SUCCESS: int = pynvml.NVML_SUCCESS

# The version of the profile structs that nvidia-ml-py asks for; another is like a driver without that function.
_VERSION = 2


class MigCalls(NvmlSession):
    """MIG mode, GPU instances and compute instances. Functions for GPUs refuse a MIG device: INVALID_ARGUMENT."""

    @simulated
    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:
        state = self.machine.gpu_state(self._mig_gpu(device))
        return [int(state.mig_enabled), int(state.mig_pending)]

    @simulated
    def nvmlDeviceSetMigMode(self, device: Any, mode: int) -> int:
        minor, new_mode = self._mig_gpu(device), integer(mode)
        if new_mode not in (pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_ENABLE):
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        product, latency = self.machine.product, self.machine.latency
        seconds = latency.mode_without_reset if product.toggles_without_reset else latency.mode_with_reset
        return self.machine.change(
            minor, lambda state: mig_rules.switch_mode(product, state, bool(new_mode)), seconds, MIG_CHANGED
        )

    @simulated
    def nvmlDeviceGetGpuInstanceProfileInfo(self, device: Any, profile: int, version: int = 2) -> Any:
        if version != _VERSION:
            raise error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        self._mig_gpu(device)
        if not 0 <= integer(profile) < pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        supported = self.machine.product.by_enum.get(integer(profile))
        if supported is None:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return _profile_info(supported)

    @simulated
    def nvmlDeviceGetGpuInstancePossiblePlacements(
        self, device: Any, profileId: int, placementsRef: Any, countRef: Any
    ) -> int:
        self._mig_gpu(device)
        profile = self._supported(profileId)
        count = pointer_to(ctypes.c_uint, countRef)
        room, count[0] = count[0], len(profile.starts)
        if placementsRef is None:
            return _SUCCESS
        if room < len(profile.starts):
            raise error(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        placements = pointer_to(pynvml.c_nvmlGpuInstancePlacement_t, placementsRef)
        for index, start in enumerate(profile.starts):
            placements[index] = pynvml.c_nvmlGpuInstancePlacement_t(start, profile.size)
        return _SUCCESS

    @simulated
    def nvmlDeviceCreateGpuInstanceWithPlacement(self, device: Any, profileId: int, placement: Any) -> Any:
        window = pointer_to(pynvml.c_nvmlGpuInstancePlacement_t, placement)[0]
        minor, product, profile = self._mig_gpu(device), self.machine.product, integer(profileId)
        created: GpuInstance = self.machine.change(
            minor,
            lambda state: mig_rules.create_gpu_instance(product, state, profile, (window.start, window.size)),
            self.machine.latency.create_gpu_instance,
            MIG_CHANGED,
        )
        return self.handle(GpuInstanceKey(minor, created.serial))

    @simulated
    def nvmlGpuInstanceDestroy(self, gpuInstance: Any) -> int:
        minor, instance = self._gpu_instance(gpuInstance)
        serial = instance.serial
        self.machine.change(
            minor,
            lambda state: (mig_rules.destroy_gpu_instance(state, _with_serial(state, serial)), None),
            self.machine.latency.destroy_gpu_instance,
            MIG_CHANGED,
        )
        self.forget(GpuInstanceKey(minor, serial))
        return _SUCCESS

    @simulated
    def nvmlDeviceGetGpuInstances(self, device: Any, profileId: int, gpuInstancesRef: Any, countRef: Any) -> int:
        minor = self._mig_gpu(device)
        state = self.machine.gpu_state(minor)
        mig_rules.require_mig(state)
        profile = self._supported(profileId)
        instances = [gi for gi in state.instances if gi.profile == profile.id]
        handles = [self.handle(GpuInstanceKey(minor, gi.serial)) for gi in instances]
        fill_unsized(pynvml.c_nvmlGpuInstance_t, gpuInstancesRef, profile.max_instances, handles)
        pointer_to(ctypes.c_uint, countRef)[0] = len(instances)
        return _SUCCESS

    @simulated
    def nvmlDeviceGetGpuInstanceById(self, device: Any, gpuInstanceId: int) -> Any:
        minor = self._mig_gpu(device)
        state = self.machine.gpu_state(minor)
        mig_rules.require_mig(state)
        for instance in state.instances:
            if instance.id == integer(gpuInstanceId):
                return self.handle(GpuInstanceKey(minor, instance.serial))
        raise error(pynvml.NVML_ERROR_NOT_FOUND)

    @simulated
    def nvmlGpuInstanceGetInfo(self, gpuInstance: Any) -> Any:
        minor, instance = self._gpu_instance(gpuInstance)
        info = pynvml.c_nvmlGpuInstanceInfo_t()
        info.device = self.handle(GpuKey(minor))
        info.id, info.profileId = instance.id, instance.profile
        info.placement.start, info.placement.size = instance.start, instance.size
        return info

    def _mig_gpu(self, handle: Any) -> int:
        minor = self.gpu(handle, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if not self.machine.product.mig_capable:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return minor

    def _supported(self, profile_id: int) -> ProductProfile:
        profile = self.machine.product.by_id.get(integer(profile_id))
        if profile is None:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return profile

    @simulated
    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, device: Any, profile: int, engProfile: int, version: int = 2
    ) -> Any:
        if version != _VERSION:
            raise error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        _, instance = self._gpu_instance(device)
        in_range = 0 <= integer(profile) < pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT
        if not in_range or integer(engProfile) != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        gpu_profile = self.machine.product.by_id[instance.profile]
        return _compute_profile_info(self._compute_profile(instance, profile), gpu_profile)

    @simulated
    def nvmlGpuInstanceCreateComputeInstance(self, gpuInstance: Any, profileId: int) -> Any:
        (minor, instance), profile_number = self._gpu_instance(gpuInstance), integer(profileId)
        serial, product = instance.serial, self.machine.product
        created: ComputeInstance = self.machine.change(
            minor,
            lambda state: mig_rules.create_compute_instance(
                product, state, _with_serial(state, serial), profile_number
            ),
            self.machine.latency.create_compute_instance,
            MIG_CHANGED,
        )
        return self.handle(ComputeInstanceKey(minor, created.uuid))

    @simulated
    def nvmlComputeInstanceDestroy(self, computeInstance: Any) -> int:
        minor, _, compute = self._compute_instance(computeInstance)
        uuid = compute.uuid
        self.machine.change(
            minor,
            lambda state: (mig_rules.destroy_compute_instance(state, *_with_uuid(state, uuid)), None),
            self.machine.latency.destroy_compute_instance,
            MIG_CHANGED,
        )
        self.forget(ComputeInstanceKey(minor, uuid))
        self.forget(MigKey(minor, uuid))
        return _SUCCESS

    @simulated
    def nvmlGpuInstanceGetComputeInstances(
        self, gpuInstance: Any, profileId: int, computeInstancesRef: Any, countRef: Any
    ) -> int:
        minor, instance = self._gpu_instance(gpuInstance)
        profile = self._compute_profile(instance, profileId)
        present = [ci for ci in instance.compute if ci.profile == profile.id]
        handles = [self.handle(ComputeInstanceKey(minor, ci.uuid)) for ci in present]
        fill_unsized(pynvml.c_nvmlComputeInstance_t, computeInstancesRef, profile.max_instances, handles)
        pointer_to(ctypes.c_uint, countRef)[0] = len(present)
        return _SUCCESS

    @simulated
    def nvmlGpuInstanceGetComputeInstanceById(self, gpuInstance: Any, computeInstanceId: int) -> Any:
        minor, instance = self._gpu_instance(gpuInstance)
        for compute in instance.compute:
            if compute.id == integer(computeInstanceId):
                return self.handle(ComputeInstanceKey(minor, compute.uuid))
        raise error(pynvml.NVML_ERROR_NOT_FOUND)

    @simulated
    def nvmlComputeInstanceGetInfo_v2(self, computeInstance: Any) -> Any:
        minor, instance, compute = self._compute_instance(computeInstance)
        info = pynvml.c_nvmlComputeInstanceInfo_t()
        info.device = self.handle(MigKey(minor, compute.uuid))
        info.gpuInstance = self.handle(GpuInstanceKey(minor, instance.serial))
        info.id, info.profileId = compute.id, compute.profile
        info.placement.start, info.placement.size = compute.start, compute.size
        return info

    def _gpu_instance(self, handle: Any) -> tuple[int, GpuInstance]:
        """The minor and GPU instance behind a handle; a destroyed one is INVALID_ARGUMENT."""
        key = self.target(handle, GpuInstanceKey)
        return key.minor, _with_serial(self.machine.gpu_state(key.minor), key.serial)

    def _compute_instance(self, handle: Any) -> tuple[int, GpuInstance, ComputeInstance]:
        """The minor and both instances behind a compute-instance handle; a destroyed one is INVALID_ARGUMENT."""
        key = self.target(handle, ComputeInstanceKey)
        return key.minor, *_with_uuid(self.machine.gpu_state(key.minor), key.uuid)

    def _compute_profile(self, instance: GpuInstance, profile_id: int) -> mig_rules.ComputeProfile:
        """Return a compute profile of the GPU instance; NOT_SUPPORTED if it does not have that profile."""
        product = self.machine.product
        profile = mig_rules.compute_profiles(product, product.by_id[instance.profile]).get(integer(profile_id))
        if profile is None:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return profile


def _with_serial(state: SimulatedGpuState, serial: int) -> GpuInstance:
    for instance in state.instances:
        if instance.serial == serial:
            return instance
    raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)


def _with_uuid(state: SimulatedGpuState, uuid: str) -> tuple[GpuInstance, ComputeInstance]:
    if uuid not in state.mig_devices:
        raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return state.mig_devices[uuid]


def _profile_info(profile: ProductProfile) -> Any:
    info = pynvml.c_nvmlGpuInstanceProfileInfo_v2_t()
    info.name = f"MIG {profile.name}"
    info.id, info.sliceCount, info.instanceCount = profile.id, profile.slices, profile.max_instances
    info.multiprocessorCount, info.memorySizeMB = profile.multiprocessors, profile.memory_mib
    info.copyEngineCount, info.decoderCount = profile.copy_engines, profile.decoders
    info.encoderCount, info.jpegCount, info.ofaCount = profile.encoders, profile.jpeg, profile.ofa
    return info


def _compute_profile_info(compute: mig_rules.ComputeProfile, profile: ProductProfile) -> Any:
    info = pynvml.c_nvmlComputeInstanceProfileInfo_v2_t()
    info.name = f"MIG {compute.name}"
    info.id, info.sliceCount, info.instanceCount = compute.id, compute.slices, compute.max_instances
    info.multiprocessorCount = compute.multiprocessors
    info.sharedCopyEngineCount, info.sharedDecoderCount = profile.copy_engines, profile.decoders
    info.sharedEncoderCount, info.sharedJpegCount = profile.encoders, profile.jpeg
    info.sharedOfaCount = profile.ofa
    return info
