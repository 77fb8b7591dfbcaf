"""Simulated NVML: MIG mode and GPU instances."""

# ruff: noqa: N802, N803
from __future__ import annotations

import ctypes
from typing import Any

import pynvml

from . import mig
from .nvml_arguments import error, fill_unsized, integer, pointer_to
from .nvml_keys import GpuInstanceKey, GpuKey
from .nvml_session import NvmlSession, simulated
from .products import Profile
from .state import GpuInstance

_SUCCESS: int = pynvml.NVML_SUCCESS

# First driver branch with nvmlDeviceGetGpuInstanceProfileInfoByIdV.
_PROFILE_BY_ID_SINCE = 580


class MigCalls(NvmlSession):
    """``nvmlDevice*Mig*`` and ``*GpuInstance*``. A MIG device's handle is INVALID_ARGUMENT in all of them."""

    @simulated()
    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:
        state = self.machine.state(self._mig_gpu(device))
        return [int(state.mig_enabled), int(state.mig_pending)]

    @simulated()
    def nvmlDeviceSetMigMode(self, device: Any, mode: int) -> int:
        minor, wanted = self._mig_gpu(device), integer(mode)
        if wanted not in (pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_ENABLE):
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        product, latency = self.machine.product, self.machine.latency
        seconds = latency.mode_without_reset if product.toggles_without_reset else latency.mode_with_reset
        return self.machine.reconfigure(minor, lambda state: mig.switch_mode(product, state, bool(wanted)), seconds)

    @simulated()
    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:
        minor = self.gpu(device, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        enabled = self.machine.state(minor).mig_enabled
        return self.machine.product.max_gpu_instances if enabled else 0

    @simulated()
    def nvmlDeviceGetGpuInstanceProfileInfo(self, device: Any, profile: int, version: int = 2) -> Any:
        if version not in (1, 2):
            raise error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        self._mig_gpu(device)
        if not 0 <= integer(profile) < pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        found = self.machine.product.by_enum.get(integer(profile))
        if found is None:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return _profile_info(found, version)

    @simulated()
    def nvmlDeviceGetGpuInstanceProfileInfoV(self, device: Any, profile: int, version: int = 2) -> Any:
        return self.nvmlDeviceGetGpuInstanceProfileInfo(device, profile, version)

    @simulated(since=_PROFILE_BY_ID_SINCE)
    def nvmlDeviceGetGpuInstanceProfileInfoById(self, device: Any, profileId: int) -> Any:
        self._mig_gpu(device)
        return _profile_info(self._supported(profileId), 2)

    @simulated(since=_PROFILE_BY_ID_SINCE)
    def nvmlDeviceGetGpuInstanceProfileInfoByIdV(self, device: Any, profileId: int) -> Any:
        return self.nvmlDeviceGetGpuInstanceProfileInfoById(device, profileId)

    @simulated()
    def nvmlDeviceGetGpuInstanceRemainingCapacity(self, device: Any, profileId: int) -> int:
        state = self.machine.state(self._mig_gpu(device))
        mig.require_mig(state)
        return mig.remaining_capacity(self.machine.product, state, self._supported(profileId))

    @simulated()
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

    @simulated()
    def nvmlDeviceCreateGpuInstance(self, device: Any, profileId: int) -> Any:
        return self._create(device, profileId, None)

    @simulated()
    def nvmlDeviceCreateGpuInstanceWithPlacement(self, device: Any, profileId: int, placement: Any) -> Any:
        wanted = pointer_to(pynvml.c_nvmlGpuInstancePlacement_t, placement)[0]
        return self._create(device, profileId, (wanted.start, wanted.size))

    @simulated()
    def nvmlGpuInstanceDestroy(self, gpuInstance: Any) -> int:
        found = self.gpu_instance(gpuInstance)
        serial = found.instance.serial
        self.machine.reconfigure(
            found.minor,
            lambda state: (mig.destroy_gpu_instance(state, self.find_gpu_instance(state, serial)), None),
            self.machine.latency.destroy_gpu_instance,
        )
        self.forget(GpuInstanceKey(found.minor, serial))
        return _SUCCESS

    @simulated()
    def nvmlDeviceGetGpuInstances(self, device: Any, profileId: int, gpuInstancesRef: Any, countRef: Any) -> int:
        minor = self._mig_gpu(device)
        state = self.machine.state(minor)
        mig.require_mig(state)
        profile = self._supported(profileId)
        found = [gi for gi in state.instances if gi.profile == profile.id]
        handles = [self.handle(GpuInstanceKey(minor, gi.serial)) for gi in found]
        fill_unsized(pynvml.c_nvmlGpuInstance_t, gpuInstancesRef, profile.max_instances, handles)
        pointer_to(ctypes.c_uint, countRef)[0] = len(found)
        return _SUCCESS

    @simulated()
    def nvmlDeviceGetGpuInstanceById(self, device: Any, gpuInstanceId: int) -> Any:
        minor = self._mig_gpu(device)
        state = self.machine.state(minor)
        mig.require_mig(state)
        for instance in state.instances:
            if instance.id == integer(gpuInstanceId):
                return self.handle(GpuInstanceKey(minor, instance.serial))
        raise error(pynvml.NVML_ERROR_NOT_FOUND)

    @simulated()
    def nvmlGpuInstanceGetInfo(self, gpuInstance: Any) -> Any:
        found = self.gpu_instance(gpuInstance)
        info = pynvml.c_nvmlGpuInstanceInfo_t()
        info.device = self.handle(GpuKey(found.minor))
        info.id, info.profileId = found.instance.id, found.instance.profile
        info.placement.start, info.placement.size = found.instance.start, found.instance.size
        return info

    def _create(self, device: Any, profile_id: int, placement: tuple[int, int] | None) -> Any:
        minor, product = self._mig_gpu(device), self.machine.product
        wanted = integer(profile_id)
        created: GpuInstance = self.machine.reconfigure(
            minor,
            lambda state: mig.create_gpu_instance(product, state, wanted, placement),
            self.machine.latency.create_gpu_instance,
        )
        return self.handle(GpuInstanceKey(minor, created.serial))

    def _mig_gpu(self, handle: Any) -> int:
        minor = self.gpu(handle, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if not self.machine.product.mig_capable:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return minor

    def _supported(self, profile_id: int) -> Profile:
        profile = self.machine.product.by_id.get(integer(profile_id))
        if profile is None:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return profile


def _profile_info(profile: Profile, version: int) -> Any:
    if version == 1:
        info = pynvml.c_nvmlGpuInstanceProfileInfo_t()
    else:
        info = pynvml.c_nvmlGpuInstanceProfileInfo_v2_t()
        info.name = f"MIG {profile.name}"
    info.id, info.sliceCount, info.instanceCount = profile.id, profile.slices, profile.max_instances
    info.multiprocessorCount, info.memorySizeMB = profile.multiprocessors, profile.memory_mib
    info.copyEngineCount, info.decoderCount = profile.copy_engines, profile.decoders
    info.encoderCount, info.jpegCount, info.ofaCount = profile.encoders, profile.jpeg, profile.ofa
    return info
