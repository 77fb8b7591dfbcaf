"""The disjoint offers of a node without controller: full GPUs, shares, or the partitions that ``--layout`` names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from driver.config.suggestions import meant
from driver.errors import UsageError
from driver.model.device import Device
from driver.model.gpu import Gpu
from driver.model.gpu_selection_and_share_counts import NO_LAYOUTS, Layouts, ShareCounts
from driver.model.offer import DeviceKind, OfferKind, Spot
from driver.placement.occupancy import GpuState


def standalone_offers(gpu: Gpu, devices: Sequence[Device], layouts: Layouts = NO_LAYOUTS) -> Iterable[Device]:
    """The offers among ``devices``, which are all of ``gpu``.

    The partitions of its layout; or its shares; or the full GPU, if it isn't in MIG mode until the next reset; or its
    largest partition.
    """
    has_mig = gpu.toggles_freely or gpu.mig_mode.in_force
    spots = place(gpu, layouts.of(gpu)) if has_mig else None
    if spots:
        return [device for device in devices if device.spot in spots]
    shares = [device for device in devices if device.kind is DeviceKind.SHARE]
    if shares:
        return shares
    if gpu.toggles_freely or not has_mig:
        return [device for device in devices if device.kind is DeviceKind.FULL]
    sizes = {(d.mask.bit_count(), d.profile.compute_slices, -len(d.name)): d for d in devices if d.profile is not None}
    return [sizes[max(sizes)]] if sizes else []


def place(gpu: Gpu, profiles: Sequence[str]) -> tuple[Spot, ...] | None:
    """A place for each of ``profiles``, all of which ``gpu`` must know; None if they don't fit together."""
    size = {profile.name: profile.compute_slices for profile in gpu.profiles}
    kinds = (OfferKind(DeviceKind.PARTITION, name) for name in sorted(profiles, key=lambda name: (-size[name], name)))
    return _placed(GpuState.of(gpu), tuple(kinds))


@lru_cache(1024)
def _placed(state: GpuState, kinds: tuple[OfferKind, ...]) -> tuple[Spot, ...] | None:
    """Depth-first search over the legal placements, which NVML has reported."""
    if not kinds:
        return ()
    for spot in state.spots(kinds[0]):
        others = _placed(state.take(spot), kinds[1:])
        if others is not None:
            return (spot, *others)
    return None


def check_layouts(layouts: Layouts, shares: ShareCounts, gpus: Iterable[Gpu]) -> None:
    """Raise UsageError if a GPU can't have its layout."""
    for gpu in gpus:
        profiles = layouts.of(gpu)
        reason = _impossible(gpu, profiles, shares) if profiles else None
        if reason:
            raise UsageError(f"--layout {layouts}: GPU {gpu.index} ({gpu.product_name}, {gpu.uuid}): {reason}")


def _impossible(gpu: Gpu, profiles: Sequence[str], shares: ShareCounts) -> str | None:
    profile_names = [profile.name for profile in gpu.profiles]
    if not profile_names:
        return "it has no MIG: remove its layout"
    if shares.of(gpu):
        return f"--shares divides it into {shares.of(gpu)} shares: remove one of the two"
    for name in profiles:
        if name not in profile_names:
            return f"{name} is no profile of it, accepted are {', '.join(profile_names)}{meant(name, profile_names)}"
    if place(gpu, profiles) is not None:
        return None
    fitting: list[str] = []
    for name in profiles:
        fitting += [name] if place(gpu, [*fitting, name]) else []
    return f"these partitions do not fit together, accepted would be {','.join(fitting)}"


def layout_warnings(layouts: Layouts, gpus: Sequence[Gpu], gpu_names: str) -> Iterator[str]:
    """One line for each layout without effect; ``gpu_names`` names the GPUs that are there."""
    products = sorted({gpu.product_name for gpu in gpus})
    for name in layouts.unmatched(gpus):
        yield f"--layout {name}: no GPU here has that name{gpu_names}{meant(name, products)}"
    for gpu in gpus:
        if layouts.of(gpu) and not gpu.toggles_freely and not gpu.mig_mode.in_force:
            yield (
                f"--layout: GPU {gpu.index} ({gpu.product_name}, {gpu.uuid}) is not in MIG mode, which takes a reset "
                f"to change: add it to --mig-gpus"
            )
