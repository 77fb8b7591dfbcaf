"""The rules of MIG, on a state value: what a GPU accepts, what it refuses and with which code.

Sources: the NVML manual ("Multi Instance GPU Management"), the MIG user guide, and the oracle rule of
``data/mig_geometry.json``: a set of instances fits iff their memory slices are disjoint, no profile exceeds
its count, and the media engines suffice. Nothing here does I/O.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import cache

import msgspec
import pynvml

from .products import Product, Profile
from .state import ComputeInstance, GpuInstance, GpuState

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


def switch_mode(product: Product, state: GpuState, enable: bool) -> tuple[GpuState, int]:
    """MIG mode on or off; the second value is the activation status, as ``nvmlDeviceSetMigMode`` gives it.

    A GPU that a process holds keeps its mode and answers IN_USE; one of a generation that needs a reset
    answers RESET_REQUIRED. Both remember the wish as pending.

    :raises NVMLError: NOT_SUPPORTED by the product; IN_USE while instances exist
    """
    if not product.mig_capable:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    if state.instances and not enable:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
    pending = msgspec.structs.replace(state, mig_pending=enable)
    if state.mig_enabled == enable:
        return (state if state == pending else pending), pynvml.NVML_SUCCESS
    if state.processes:
        return pending, pynvml.NVML_ERROR_IN_USE
    if not product.toggles_without_reset:
        return pending, pynvml.NVML_ERROR_RESET_REQUIRED
    return msgspec.structs.replace(pending, mig_enabled=enable), pynvml.NVML_SUCCESS


def reset(state: GpuState) -> GpuState:
    """The GPU after a reset: no instance survives, a pending mode is in force.

    :raises NVMLError: IN_USE while a process holds the GPU or a MIG device on it
    """
    busy = any(ci.processes for gi in state.instances for ci in gi.compute)
    if state.processes or busy:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
    return _emptied(state, state.mig_pending)


def reboot(product: Product, state: GpuState) -> GpuState:
    """The GPU after a reboot: without instances or processes; the mode survives only where it needs a reset."""
    mode = state.mig_pending and not product.toggles_without_reset
    return _emptied(state, mode)


def _emptied(state: GpuState, mode: bool) -> GpuState:
    return msgspec.structs.replace(
        state,
        mig_enabled=mode,
        mig_pending=mode,
        compute_mode=0,
        time_slice=0,
        instances=(),
        processes=(),
        recovery_action=pynvml.NVML_GPU_RECOVERY_ACTION_NONE,
    )


def create_gpu_instance(
    product: Product, state: GpuState, profile_id: int, placement: tuple[int, int] | None
) -> tuple[GpuState, GpuInstance]:
    """A GPU instance at ``placement`` (start, size), or where the driver would put it.

    :raises NVMLError: NOT_SUPPORTED with MIG off; INVALID_ARGUMENT for an unknown profile or a placement it
        never has; INSUFFICIENT_RESOURCES where slices, count or media engines are taken
    """
    require_mig(state)
    profile = known_profile(product, profile_id)
    if placement is not None and (placement[0] not in profile.starts or placement[1] != profile.size):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    free = free_starts(product, state, profile)
    wanted = free if placement is None else [start for start in free if start == placement[0]]
    if not wanted:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
    start = _drivers_choice(product, profile, wanted)
    number = _gpu_instance_id(product, state, profile)
    created = GpuInstance(number, state.next_serial, profile.id, start, profile.size)
    return (
        msgspec.structs.replace(state, instances=(*state.instances, created), next_serial=state.next_serial + 1),
        created,
    )


def destroy_gpu_instance(state: GpuState, instance: GpuInstance) -> GpuState:
    """The state without that GPU instance.

    :raises NVMLError: IN_USE while it has compute instances
    """
    if instance.compute:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
    left = tuple(other for other in state.instances if other.serial != instance.serial)
    return msgspec.structs.replace(state, instances=left)


def create_compute_instance(
    product: Product, state: GpuState, instance: GpuInstance, profile_id: int
) -> tuple[GpuState, ComputeInstance]:
    """A compute instance in ``instance``, on its lowest free compute slices, with a fresh MIG UUID.

    :raises NVMLError: INVALID_ARGUMENT for a profile this GPU instance has not;
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
    return with_compute(state, instance, (*instance.compute, created)), created


def destroy_compute_instance(state: GpuState, instance: GpuInstance, compute: ComputeInstance) -> GpuState:
    """The state without that compute instance.

    :raises NVMLError: IN_USE while a process holds it
    """
    if compute.processes:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
    return with_compute(state, instance, tuple(ci for ci in instance.compute if ci.uuid != compute.uuid))


def with_compute(state: GpuState, instance: GpuInstance, compute: tuple[ComputeInstance, ...]) -> GpuState:
    """The state where ``instance`` has exactly these compute instances."""
    changed = msgspec.structs.replace(instance, compute=compute)
    instances = tuple(changed if gi.serial == instance.serial else gi for gi in state.instances)
    return msgspec.structs.replace(state, instances=instances)


def require_mig(state: GpuState) -> None:
    """Raise NVMLError NOT_SUPPORTED unless MIG mode is on."""
    if not state.mig_enabled:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def known_profile(product: Product, profile_id: int) -> Profile:
    """The product's profile of that id; NVMLError INVALID_ARGUMENT where it has none."""
    profile = product.by_id.get(profile_id)
    if profile is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return profile


def free_starts(product: Product, state: GpuState, profile: Profile) -> list[int]:
    """Where one more instance of the profile could start now, ascending."""
    present = [product.by_id[gi.profile] for gi in state.instances]
    if sum(other.id == profile.id for other in present) >= profile.max_instances:
        return []
    if not _media_engines_suffice([*present, profile]):
        return []
    taken = {part for gi in state.instances for part in range(gi.start, gi.start + gi.size)}
    return [start for start in profile.starts if taken.isdisjoint(range(start, start + profile.size))]


def remaining_capacity(product: Product, state: GpuState, profile: Profile) -> int:
    """How many more instances of the profile fit at once."""
    count, end = 0, 0
    for start in free_starts(product, state, profile):
        if start >= end:
            count, end = count + 1, start + profile.size
    present = sum(gi.profile == profile.id for gi in state.instances)
    return min(count, profile.max_instances - present)


@cache
def compute_profiles(product: Product, profile: Profile) -> dict[int, ComputeProfile]:
    """Compute-instance profiles of a GPU-instance profile, by id; the largest spans the whole instance."""
    multiprocessors = {p.slices: p.multiprocessors for p in reversed(product.profiles)}
    partial = [
        slices
        for slices in _PARTIAL_CI_PROFILES
        if slices < profile.slices and slices in multiprocessors and (slices != 3 or profile.slices == 7)
    ]
    found = {
        _PARTIAL_CI_PROFILES[slices]: ComputeProfile(
            id=_PARTIAL_CI_PROFILES[slices],
            name=f"{slices}c.{profile.name}",
            slices=slices,
            multiprocessors=multiprocessors[slices],
            max_instances=profile.slices // slices,
        )
        for slices in partial
    }
    whole = profile.whole_ci_profile
    found[whole] = ComputeProfile(whole, profile.name, profile.slices, profile.multiprocessors, 1)
    return found


def free_compute_starts(product: Product, instance: GpuInstance, profile: ComputeProfile) -> list[int]:
    """Where one more compute instance could start inside ``instance``, in compute slices, ascending."""
    slices = product.by_id[instance.profile].slices
    taken = {part for ci in instance.compute for part in range(ci.start, ci.start + ci.size)}
    return [
        start
        for start in range(0, slices - profile.slices + 1, profile.slices)
        if taken.isdisjoint(range(start, start + profile.slices))
    ]


def _media_engines_suffice(profiles: list[Profile]) -> bool:
    kinds = [profile.media for profile in profiles]
    if "all" in kinds:
        return kinds.count("all") == 1 and all(kind in ("all", "none") for kind in kinds)
    return kinds.count("me") <= 1


def _drivers_choice(product: Product, profile: Profile, starts: list[int]) -> int:
    # The MIG user guide's listings show single slices filling the upper half first: one 1g instance on an
    # empty GPU already costs the upper 3g placement.
    if profile.size == 1:
        upper = [start for start in starts if start >= product.memory_slices // 2]
        return (upper or starts)[0]
    return starts[0]


def _gpu_instance_id(product: Product, state: GpuState, profile: Profile) -> int:
    # Captures show 0 for a whole GPU, 1-2 for halves, 3-6 for quarters, 7-14 for eighths, given in order of
    # creation: an id says nothing about where its instance lies, and comes back once it is free.
    share = product.memory_slices // profile.size
    taken = {gi.id for gi in state.instances}
    return next(number for number in range(share - 1, 2 * share - 1) if number not in taken)


def _lowest_free(taken: set[int]) -> int:
    return next(number for number in range(len(taken) + 1) if number not in taken)
