"""The disjoint offers of a node without controller: full GPUs, shares, shared GPUs, or partitions by ``--layout``.

Also what is wrong with settings that name GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from driver.config.suggestions import meant
from driver.errors import UsageError
from driver.model.device import MOST_SHARES, Device
from driver.model.gpu import Gpu
from driver.model.gpu_settings import FEWEST_SHARES, Layouts, ShareCounts, written_layouts
from driver.model.offer import DeviceKind, OfferKind, Spot, partition_kind
from driver.placement.occupancy import GpuState
from kubelet_plugin.settings import NodeSettings


def standalone_offers(gpu: Gpu, devices: Sequence[Device], layouts: Layouts) -> Iterable[Device]:
    """The offers among ``devices``, which are all of ``gpu``.

    The partitions of its layout; or its shares, or its shared device; or the full GPU, if it isn't in MIG mode until
    the next reset; or its largest partition.
    """
    has_mig = gpu.toggles_freely or gpu.mig_mode.in_force
    spots = place(gpu, layouts.of(gpu)) if has_mig else None
    if spots:
        return [device for device in devices if device.spot in spots]
    shares = [device for device in devices if device.kind is DeviceKind.SHARE]
    if shares:
        return shares
    if shared := [device for device in devices if device.kind is DeviceKind.SHARED]:
        return shared
    if gpu.toggles_freely or not has_mig:
        return [device for device in devices if device.kind is DeviceKind.FULL]
    sizes = {(d.mask.bit_count(), d.profile.compute_slices, -len(d.name)): d for d in devices if d.profile is not None}
    return [sizes[max(sizes)]] if sizes else []


def place(gpu: Gpu, profiles: Sequence[str]) -> tuple[Spot, ...] | None:
    """A place for each of ``profiles``, all of which ``gpu`` must know; None if they don't fit together."""
    size = {profile.name: profile.compute_slices for profile in gpu.profiles}
    kinds = map(partition_kind, sorted(profiles, key=lambda name: (-size[name], name)))
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
            raise UsageError(
                f"--layout {written_layouts(layouts)}: GPU {gpu.index} ({gpu.product_name}, {gpu.uuid}): {reason}"
            )


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


def setting_warnings(settings: NodeSettings, gpus: Sequence[Gpu]) -> Iterator[str]:
    """One line for each setting without effect: of an unknown GPU, shares without a number, a layout without MIG."""
    products = sorted({gpu.product_name for gpu in gpus})
    unmatched = {
        "--mig-gpus": settings.mig_gpus.unmatched(gpus),
        "--shares": settings.shares.unmatched(gpus),
        "--shared": settings.shared.unmatched(gpus),
        "--shares-only": settings.shares_only.unmatched(gpus),
        "--layout": settings.layout.unmatched(gpus),
    }
    for flag, names in unmatched.items():
        for name in names:
            suggestion = meant(name, products) if flag in ("--shares", "--shared", "--layout") else ""
            yield f"{flag} {name}: no GPU here has that name{_names_of(gpus)}{suggestion}"
    for name in settings.compute_instances.unmatched(gpus):
        names = sorted({profile.name for gpu in gpus for profile in gpu.profiles})
        yield f"--compute-instances {name}: no GPU here has such a profile; there are {', '.join(names) or 'none'}"
    for gpu in gpus:
        where = f"GPU {gpu.index} ({gpu.product_name}, {gpu.uuid})"
        if gpu in settings.shares_only and not settings.shares.of(gpu) and settings.shared.of(gpu) is None:
            yield (
                f"--shares-only: {where} has no number of shares: set --shares {gpu.index}=R, "
                f"R from {FEWEST_SHARES} to {MOST_SHARES}, or --shared {gpu.index}=time-slicing"
            )
        if settings.layout.of(gpu) and not gpu.toggles_freely and not gpu.mig_mode.in_force:
            yield f"--layout: {where} is not in MIG mode, which takes a reset to change: add it to --mig-gpus"


def _names_of(gpus: Sequence[Gpu]) -> str:
    """``; there are NVIDIA L4 (0, 1), ...``: the GPUs by product, with their indices."""
    indices: dict[str, list[str]] = {}
    for gpu in gpus:
        indices.setdefault(gpu.product_name, []).append(str(gpu.index))
    return "; there are " + (", ".join(f"{name} ({', '.join(at)})" for name, at in sorted(indices.items())) or "none")
