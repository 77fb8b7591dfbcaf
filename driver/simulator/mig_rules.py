"""The rules of MIG as pure functions of a GPU's state: which operations succeed, and the error codes of the others.

Sources: the NVML manual ("Multi Instance GPU Management"), the MIG user guide, and the oracle rule of
``data/mig_geometry.json``: a set of instances fits iff their memory slices are disjoint, no profile exceeds
its count, and the media engines suffice.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import cache

import pynvml
from msgspec.structs import replace

from driver.simulator.machine import ComputeInstance, GpuInstance, SimulatedGpuState
from driver.simulator.products import Product, ProductProfile

# Compute slices a compute instance may have inside a larger GPU instance, with its profile
# (MIG user guide, "Compute instance profiles").
_PARTIAL_CI_PROFILES = {1: 0, 2: 1, 3: 2, 4: 3}


@dataclass(frozen=True, slots=True)
class ComputeProfile:
    """One compute-instance profile inside one GPU-instance profile. ``id`` is also its enum index."""

    id: int
    name: str
    slices: int
    multiprocessors: int
    max_instances: int


def switch_mode(product: Product, state: SimulatedGpuState, enable: bool) -> tuple[SimulatedGpuState, int]:
    """Switch MIG mode; the second value is the activation status of ``nvmlDeviceSetMigMode``.

    A GPU with processes keeps its mode and returns IN_USE; a GPU that needs a reset returns RESET_REQUIRED. In both
    cases the new mode is pending.

    :raises NVMLError: NOT_SUPPORTED by the product; IN_USE while instances exist
    """
    if not product.mig_capable:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    if state.instances and not enable:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
    pending = replace(state, mig_pending=enable)
    if state.mig_enabled == enable:
        return (state if state == pending else pending), pynvml.NVML_SUCCESS
    if state.processes:
        return pending, pynvml.NVML_ERROR_IN_USE
    if not product.toggles_without_reset:
        return pending, pynvml.NVML_ERROR_RESET_REQUIRED
    return replace(pending, mig_enabled=enable), pynvml.NVML_SUCCESS


def reset(state: SimulatedGpuState) -> SimulatedGpuState:
    """Return the state after a reset: without instances, with the pending mode in force.

    :raises NVMLError: IN_USE while a process uses the GPU or one of its MIG devices
    """
    if state.processes:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
    return _emptied(state, state.mig_pending)


def reboot(product: Product, state: SimulatedGpuState) -> SimulatedGpuState:
    """Return the state after a reboot: without instances and processes; MIG mode persists on Ampere only."""
    mode = state.mig_pending and not product.toggles_without_reset
    return _emptied(state, mode)


def _emptied(state: SimulatedGpuState, mode: bool) -> SimulatedGpuState:
    serial, event = state.next_serial, state.next_event
    return SimulatedGpuState(mode, mode, next_serial=serial, next_event=event, events=state.events)


def create_gpu_instance(
    product: Product, state: SimulatedGpuState, profile_id: int, placement: tuple[int, int]
) -> tuple[SimulatedGpuState, GpuInstance]:
    """Create a GPU instance at ``placement`` (start, size).

    :raises NVMLError: NOT_SUPPORTED with MIG off; INVALID_ARGUMENT for an unknown profile or an illegal
        placement; INSUFFICIENT_RESOURCES where slices, count or media engines are taken
    """
    require_mig(state)
    profile = product.by_id.get(profile_id)
    start, size = placement
    if profile is None or start not in profile.starts or size != profile.size:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    if start not in free_starts(product, state, profile):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
    number = _gpu_instance_id(product, state, profile)
    created = GpuInstance(number, state.next_serial, profile.id, start, profile.size)
    return (replace(state, instances=(*state.instances, created), next_serial=state.next_serial + 1), created)


def destroy_gpu_instance(state: SimulatedGpuState, instance: GpuInstance) -> SimulatedGpuState:
    """Destroy a GPU instance. Raises NVMLError: IN_USE while it has compute instances."""
    if instance.compute:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
    others = tuple(other for other in state.instances if other.serial != instance.serial)
    return replace(state, instances=others)


def create_compute_instance(
    product: Product, state: SimulatedGpuState, instance: GpuInstance, profile_id: int
) -> tuple[SimulatedGpuState, ComputeInstance]:
    """Create a compute instance in ``instance``, on its lowest free compute slices, with a new MIG UUID.

    :raises NVMLError: INVALID_ARGUMENT for a profile that this GPU instance does not have;
        INSUFFICIENT_RESOURCES where its compute slices are taken
    """
    profile = compute_profiles(product, product.by_id[instance.profile]).get(profile_id)
    if profile is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    starts = free_compute_starts(product, instance, profile)
    if not starts:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
    created = ComputeInstance(
        id=_lowest_free({ci.id for ci in instance.compute}),
        profile=profile.id,
        start=starts[0],
        size=profile.slices,
        uuid=f"MIG-{uuid.uuid4()}",
        index=_lowest_free({ci.index for gi in state.instances for ci in gi.compute}),
    )
    return _with_compute(state, instance, (*instance.compute, created)), created


def destroy_compute_instance(
    state: SimulatedGpuState, instance: GpuInstance, compute: ComputeInstance
) -> SimulatedGpuState:
    """Destroy a compute instance. Raises NVMLError: IN_USE while a process uses it."""
    if any(process.device == compute.uuid for process in state.processes):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
    return _with_compute(state, instance, tuple(ci for ci in instance.compute if ci.uuid != compute.uuid))


def _with_compute(
    state: SimulatedGpuState, instance: GpuInstance, compute: tuple[ComputeInstance, ...]
) -> SimulatedGpuState:
    """Return the state in which ``instance`` has exactly these compute instances."""
    changed = replace(instance, compute=compute)
    instances = tuple(changed if gi.serial == instance.serial else gi for gi in state.instances)
    return replace(state, instances=instances)


def require_mig(state: SimulatedGpuState) -> None:
    """Raise NVMLError NOT_SUPPORTED unless MIG mode is on."""
    if not state.mig_enabled:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def free_starts(product: Product, state: SimulatedGpuState, profile: ProductProfile) -> list[int]:
    """Start slices of free placements of the profile, ascending."""
    present = [product.by_id[gi.profile] for gi in state.instances]
    if sum(other.id == profile.id for other in present) >= profile.max_instances:
        return []
    if not _media_engines_suffice([*present, profile]):
        return []
    taken = {part for gi in state.instances for part in range(gi.start, gi.start + gi.size)}
    return [start for start in profile.starts if taken.isdisjoint(range(start, start + profile.size))]


@cache
def compute_profiles(product: Product, profile: ProductProfile) -> dict[int, ComputeProfile]:
    """Compute-instance profiles of a GPU-instance profile, by id; the largest spans the whole instance."""
    multiprocessors = {p.slices: p.multiprocessors for p in reversed(product.profiles)}
    profiles: dict[int, ComputeProfile] = {}
    for slices, number in _PARTIAL_CI_PROFILES.items():
        if slices < profile.slices and slices in multiprocessors and (slices != 3 or profile.slices == 7):
            name, most = f"{slices}c.{profile.name}", profile.slices // slices
            profiles[number] = ComputeProfile(number, name, slices, multiprocessors[slices], most)
    whole = profile.whole_ci_profile
    profiles[whole] = ComputeProfile(whole, profile.name, profile.slices, profile.multiprocessors, 1)
    return profiles


def free_compute_starts(product: Product, instance: GpuInstance, profile: ComputeProfile) -> list[int]:
    """Free start positions of a compute profile inside ``instance``, in compute slices, ascending."""
    slices = product.by_id[instance.profile].slices
    taken = {part for ci in instance.compute for part in range(ci.start, ci.start + ci.size)}
    return [
        start
        for start in range(0, slices - profile.slices + 1, profile.slices)
        if taken.isdisjoint(range(start, start + profile.slices))
    ]


def _media_engines_suffice(profiles: list[ProductProfile]) -> bool:
    kinds = [profile.media for profile in profiles]
    if "all" in kinds:
        return kinds.count("all") == 1 and all(kind in ("all", "none") for kind in kinds)
    return kinds.count("me") <= 1


def _gpu_instance_id(product: Product, state: SimulatedGpuState, profile: ProductProfile) -> int:
    # Captures show 0 for a whole GPU, 1-2 for halves, 3-6 for quarters, 7-14 for eighths, given in order of
    # creation: an id says nothing about where its instance lies, and comes back once it is free.
    share = product.memory_slices // profile.size
    taken = {gi.id for gi in state.instances}
    return next(number for number in range(share - 1, 2 * share - 1) if number not in taken)


def _lowest_free(taken: set[int]) -> int:
    return next(number for number in range(len(taken) + 1) if number not in taken)
