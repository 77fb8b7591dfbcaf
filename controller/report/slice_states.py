"""What becomes of the cluster's memory slices, counted by product and state (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from controller.cluster.fleet import Fleet, FleetGpu
from controller.demand.device_search import slices_of
from controller.demand.feasibility import SelectedKind
from controller.demand.pending_claims import PendingClaim, Queue
from driver.model.device import SLICE_VALUE
from driver.model.offer import DeviceKind, Offer, OfferKind
from driver.placement.occupancy import PARTITION_KINDS, GpuState, start_of

REQUESTED_SECONDS = 3600.0
"""A kind of device counts as requested for this time after a claim last asked for it."""


class SliceState(StrEnum):
    """``stranded``: free, but in no free placement of a kind of device that was requested lately. ``unavailable``:
    faulty, under partitions of others, or on a node that accepts no new pods and not offered."""

    HELD = "held"
    OFFERED = "offered"
    FREE = "free"
    STRANDED = "stranded"
    UNAVAILABLE = "unavailable"


class GpuUse(StrEnum):
    HELD = "held"
    PARTLY_HELD = "partly-held"
    FREE = "free"
    UNAVAILABLE = "unavailable"


class Capacity(NamedTuple):
    """Memory slices by product and state, GPUs by product and use, and those lost to scatter by product."""

    slices: Mapping[tuple[str, SliceState], float]
    gpus: Mapping[tuple[str, GpuUse], int]
    scattered: Mapping[str, int]


class RequestedKinds:
    """The kinds of devices that claims have asked for lately."""

    def __init__(self) -> None:
        self._requested_at: dict[OfferKind, float] = {}
        self._held: dict[str, frozenset[str]] = {}
        """Names of the held devices of each node."""

    def update(self, queue: Queue, fleet: Fleet, changed: Iterable[str], now: float) -> None:
        """Add what pending claims match, and what was allocated on ``changed`` nodes since the last time."""
        kinds = {selected.kind for claim in queue.pending for selected in _kinds(queue, claim)}
        for node in changed:
            held = {device.name: device for entry in fleet.nodes.get(node, ()) for device in entry.held}
            kinds |= {held[name].spot.kind for name in held.keys() - self._held.get(node, frozenset())}
            self._held[node] = frozenset(held)
        oldest = now - REQUESTED_SECONDS
        requested = {**self._requested_at, **dict.fromkeys(kinds, now)}
        self._requested_at = {kind: at for kind, at in requested.items() if at >= oldest}

    @property
    def kinds(self) -> frozenset[OfferKind]:
        return frozenset(self._requested_at)


def _kinds(queue: Queue, pending: PendingClaim) -> Iterator[SelectedKind]:
    for request in queue.requests(pending):
        yield from queue.feasibility.kinds(request.selector, queue.nodes(pending))


def capacity_of(fleet: Fleet, offered: Iterable[Offer], requested: Collection[OfferKind]) -> Capacity:
    """Count every slice once: what several offers cover, too."""
    by_gpu: dict[str, list[Offer]] = {}
    for offer in offered:
        by_gpu.setdefault(offer.gpu, []).append(offer)
    slices: Counter[tuple[str, SliceState]] = Counter()
    gpus: Counter[tuple[str, GpuUse]] = Counter()
    kinds = frozenset(requested)
    for entry in fleet:
        product = entry.gpu.product_name
        counts = slices_by_state(entry, by_gpu.get(entry.gpu.uuid, ()), kinds)
        for state, count in counts.items():
            slices[product, state] += count  # type: ignore[assignment]  # a share holds a part of a slice
        gpus[product, _use(counts, entry.gpu.memory_slices)] += 1
    return Capacity(slices, gpus, scattered_gpus(fleet))


def scattered_gpus(fleet: Fleet) -> Counter[str]:
    """By product, the GPUs that would become whole if the partitions of claims were packed on the fewest GPUs.

    Only GPUs count that nothing but such partitions keeps from being allocated whole. The largest partitions are placed
    first, each on the first GPU with room: with a better packing there might be more. Nodes and pods do not matter.
    """
    partly_held: dict[str, list[FleetGpu]] = {}
    for entry in fleet:
        is_movable = bool(entry.held) and all(device.kind is DeviceKind.PARTITION for device in entry.held)
        if is_movable and entry.unheld.state.whole:
            partly_held.setdefault(entry.gpu.product_name, []).append(entry)
    return Counter({product: _emptied(entries) for product, entries in partly_held.items()})


def _emptied(entries: Sequence[FleetGpu]) -> int:
    """The number of ``entries`` that are empty once their partitions are packed."""
    states, first = [entry.unheld.state for entry in entries], entries[0].unheld.state
    counts = Counter(device.spot.kind for entry in entries for device in entry.held)
    for kind in sorted(counts, key=lambda kind: (-slices_of(first, kind), len(list(first.spots(kind))), str(kind))):
        for place in range(len(states)):
            while counts[kind] and (packed := _with_another(states[place], kind)) is not None:
                states[place], counts[kind] = packed, counts[kind] - 1
    return 0 if counts.total() else sum(not state.mask for state in states)


@lru_cache(maxsize=1 << 14)
def _with_another(state: GpuState, kind: OfferKind) -> GpuState | None:
    """``state`` with one more partition of ``kind``, at the last place: few can have the last slices. None: no room."""
    spot = max(state.spots(kind), key=lambda spot: spot.at, default=None)
    return None if spot is None else state.take(spot, 1)


def _use(counts: Mapping[SliceState, float], total: int) -> GpuUse:
    held = counts.get(SliceState.HELD, 0)
    if held:
        return GpuUse.HELD if held >= total else GpuUse.PARTLY_HELD
    return GpuUse.UNAVAILABLE if counts.get(SliceState.UNAVAILABLE, 0) >= total else GpuUse.FREE


def slices_by_state(
    entry: FleetGpu, offers: Collection[Offer], requested: frozenset[OfferKind]
) -> Mapping[SliceState, float]:
    """The number of a GPU's memory slices in each state."""
    if is_divided(entry):
        parts = parts_of(entry, offers)
        return {state: entry.gpu.memory_slices * part / sum(parts.values()) for state, part in parts.items() if part}
    masks = slice_masks(entry, offers, requested)
    return {state: mask.bit_count() for state, mask in masks.items() if mask}


def is_divided(entry: FleetGpu) -> bool:
    """Whether claims have parts of every slice, or nothing else can be held."""
    is_shared = entry.state.shared or entry.state.used
    return bool(is_shared) or (entry.shares_only and not entry.state.mask)


def parts_of(entry: FleetGpu, offers: Iterable[Offer]) -> Mapping[SliceState, int]:
    """What is in each state of every slice of a divided GPU: GiB of the shared device, or of SLICE_VALUE."""
    held, kind = entry.state.shared, DeviceKind.SHARE
    unheld, of_offer = max(0, SLICE_VALUE - held), SLICE_VALUE // max(1, entry.shares)
    if entry.state.used:
        held, kind = entry.state.used, DeviceKind.SHARED
        unheld = of_offer = max(0, entry.state.room - held)
    offers_of_kind = sum(offer.spot.kind.type is kind for offer in offers) if entry.fault is None else 0
    offered = min(unheld, offers_of_kind * of_offer)
    rest = SliceState.FREE if not entry.why_no_offers and entry.fault is None else SliceState.UNAVAILABLE
    return {SliceState.HELD: held, SliceState.OFFERED: offered, rest: unheld - offered}


def slice_masks(entry: FleetGpu, offers: Iterable[Offer], requested: frozenset[OfferKind]) -> Mapping[SliceState, int]:
    """Bit masks of the memory slices in each state, of a GPU that is not divided into shares."""
    state = entry.state
    held = 0
    for device in entry.held:
        held |= device.mask
    free = 0 if entry.fault is not None else state.geometry.all_slices & ~state.mask
    offered = 0
    for offer in offers:
        offered |= _mask(state, offer.spot.kind, offer.spot.at) & free
    usable = _usable(state, requested) if requested and not entry.why_no_offers else state.geometry.all_slices
    stranded = free & ~usable
    rest = free & usable & ~offered if not entry.why_no_offers else 0
    return {
        SliceState.HELD: held,
        SliceState.OFFERED: offered & ~stranded,
        SliceState.FREE: rest,
        SliceState.STRANDED: stranded,
        SliceState.UNAVAILABLE: state.geometry.all_slices & ~held & ~(offered | rest | stranded),
    }


@lru_cache(maxsize=1 << 14)
def _usable(state: GpuState, requested: frozenset[OfferKind]) -> int:
    """Bit mask of the slices in free placements of ``requested``."""
    mask = 0
    for key in requested:
        for spot in state.spots(key):
            mask |= _mask(state, key, spot.at)
    return mask


def _mask(state: GpuState, key: OfferKind, at: int) -> int:
    """Bit mask of the slices under a device of ``key`` at that place."""
    if key.type not in PARTITION_KINDS:
        return state.geometry.all_slices
    windows = state.geometry.windows.get(key.profile or "", ())
    return next((mask for mask in windows if start_of(mask) == at), 0)
