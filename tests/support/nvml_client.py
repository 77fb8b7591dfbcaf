"""A small MIG client for the simulator's tests, written as for the module pynvml."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_uint
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from driver.simulator import mig_rules, smi_tool
from driver.simulator.description import load_description
from driver.simulator.machine import Process, SimulatedGpuState
from driver.simulator.node import SimulatedNode
from driver.simulator.nvml import SimulatedNvml
from driver.simulator.products import Product, ProductProfile
from driver.simulator.state.latency import ZERO_LATENCY

G1, G1_ME, G1_DOUBLE, G2, G3, G4, G7 = 19, 20, 15, 14, 9, 5, 0
"""Ids of the H100's GPU-instance profiles."""


class Cut(NamedTuple):
    """What cutting a partition gives."""

    gpu_instance: Any
    compute_instance: Any
    uuid: str


def one_h100(root: Path) -> SimulatedNode:
    """A node of one H100, with a session and without latency."""
    node = SimulatedNode.open(load_description("h100-1"), root, latency=ZERO_LATENCY)
    node.nvml.nvmlInit()
    return node


def enable_mig(nvml: Any, index: int = 0) -> Any:
    """The GPU's handle, MIG mode on."""
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    assert nvml.nvmlDeviceSetMigMode(device, nvml.NVML_DEVICE_MIG_ENABLE) == nvml.NVML_SUCCESS
    return device


def profiles_by_name(product: Product) -> dict[str, ProductProfile]:
    """Profiles by the name people use, as "1g.10gb"."""
    return {profile.name: profile for profile in product.profiles}


def start_process(node: SimulatedNode, device: str, *, pid: int, memory: int = 0) -> None:
    """Start a process with ``memory`` bytes on a GPU or a MIG device (UUID), which is IN_USE until ``end_process``."""
    process = Process(pid, memory, _mig_uuid(node, device))
    _edit_processes(node, device, lambda present: (*present, process))


def end_process(node: SimulatedNode, device: str, *, pid: int) -> None:
    """End that process."""
    ended = (pid, _mig_uuid(node, device))
    _edit_processes(node, device, lambda present: tuple(p for p in present if (p.pid, p.device) != ended))


@contextmanager
def process_on(node: SimulatedNode, device: str, *, pid: int = 4242, memory: int = 0) -> Iterator[None]:
    """Run a process on the device (UUID) during the block."""
    start_process(node, device, pid=pid, memory=memory)
    try:
        yield
    finally:
        end_process(node, device, pid=pid)


def _mig_uuid(node: SimulatedNode, device: str) -> str:
    return "" if device in node.uuids else device


def _edit_processes(
    node: SimulatedNode, device: str, edit: Callable[[tuple[Process, ...]], tuple[Process, ...]]
) -> None:
    for minor, uuid in enumerate(node.uuids):

        def edited(state: SimulatedGpuState, uuid: str = uuid) -> tuple[SimulatedGpuState, bool]:
            found = device == uuid or device in state.mig_devices
            return (msgspec.structs.replace(state, processes=edit(state.processes)) if found else state), found

        if node.change(minor, edited):
            return
    raise LookupError(f"the simulated node {node.description.name} has no device {device}")


def placements(nvml: Any, device: Any, profile_id: int) -> list[tuple[int, int]]:
    """Every placement of a profile, by asking twice: for the number, then for the values."""
    count = c_uint()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, profile_id, None, byref(count))
    found = (nvml.c_nvmlGpuInstancePlacement_t * count.value)()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, profile_id, found, byref(count))
    return [(placement.start, placement.size) for placement in found[: count.value]]


def profile_infos(nvml: Any, device: Any) -> list[Any]:
    """Info of every GPU-instance profile the GPU has."""
    infos = []
    for profile in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            infos.append(nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, profile))
        except nvml.NVMLError_NotSupported:
            continue
    return infos


def create(nvml: Any, device: Any, profile_id: int, start: int, size: int) -> Any:
    """A GPU instance at a placement."""
    placement = nvml.c_nvmlGpuInstancePlacement_t(start, size)
    return nvml.nvmlDeviceCreateGpuInstanceWithPlacement(device, profile_id, byref(placement))


def spanning_ci_profile(nvml: Any, device: Any, gpu_instance: Any) -> int:
    """The compute-instance profile that takes all of a GPU instance, found by slices and SMs."""
    wanted = nvml.nvmlGpuInstanceGetInfo(gpu_instance).profileId
    gi = next(info for info in profile_infos(nvml, device) if info.id == wanted)
    for profile in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            ci = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(
                gpu_instance, profile, nvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
            )
        except nvml.NVMLError_NotSupported:
            continue
        if (ci.sliceCount, ci.multiprocessorCount) == (gi.sliceCount, gi.multiprocessorCount):
            return int(ci.id)
    raise AssertionError("no compute-instance profile spans the GPU instance")


def cut(nvml: Any, device: Any, profile_id: int, start: int, size: int) -> Cut:
    """A partition at a placement: GPU instance and spanning compute instance."""
    gpu_instance = create(nvml, device, profile_id, start, size)
    profile = spanning_ci_profile(nvml, device, gpu_instance)
    compute_instance = nvml.nvmlGpuInstanceCreateComputeInstance(gpu_instance, profile)
    mig_device = nvml.nvmlComputeInstanceGetInfo_v2(compute_instance).device
    return Cut(gpu_instance, compute_instance, nvml.nvmlDeviceGetUUID(mig_device))


def remove(nvml: Any, partition: Cut) -> None:
    """Destroy a partition, in the order that works."""
    nvml.nvmlComputeInstanceDestroy(partition.compute_instance)
    nvml.nvmlGpuInstanceDestroy(partition.gpu_instance)


def gpu_instances(nvml: Any, device: Any) -> dict[int, tuple[int, int, int]]:
    """(profile id, start, size) of each GPU instance, by its id."""
    found = {}
    for info in profile_infos(nvml, device):
        handles, count = (nvml.c_nvmlGpuInstance_t * info.instanceCount)(), c_uint()
        nvml.nvmlDeviceGetGpuInstances(device, info.id, handles, byref(count))
        for handle in handles[: count.value]:
            gi = nvml.nvmlGpuInstanceGetInfo(handle)
            found[gi.id] = (gi.profileId, gi.placement.start, gi.placement.size)
    return found


def mig_uuids(nvml: SimulatedNvml, device: Any) -> dict[int, str]:
    """UUID of each MIG device, by its index; indices may have gaps."""
    instances = nvml.machine.gpu_state(nvml.nvmlDeviceGetMinorNumber(device)).instances
    return {ci.index: ci.uuid for gi in instances for ci in gi.compute}


def set_compute_mode(node: SimulatedNode, mode: str) -> None:
    """Set the compute mode of the first GPU, with the node's nvidia-smi."""
    assert smi_tool.run([str(node.root), "-i", "0", "-c", mode])[0] == 0


def remaining_capacity(product: Product, state: SimulatedGpuState, profile: ProductProfile) -> int:
    """How many more instances of the profile fit at once."""
    count, end = 0, 0
    for start in mig_rules.free_starts(product, state, profile):
        if start >= end:
            count, end = count + 1, start + profile.size
    present = sum(gi.profile == profile.id for gi in state.instances)
    return min(count, profile.max_instances - present)
