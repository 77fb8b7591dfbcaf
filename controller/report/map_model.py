"""The map of a cluster's GPUs as values, from which text, JSON and SVG are made (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from controller.cluster.fleet import FleetGpu
from controller.cluster.node_views import UNREACHABLE_TAINTS, NodeView
from controller.report.cluster_view import ClusterView
from controller.report.slice_states import (
    RequestedKinds,
    SliceState,
    is_divided,
    parts_of,
    slice_masks,
    slices_by_state,
)
from controller.report.unprepared_claims import sentence
from driver.kube.types import Claim, GpuNodePlan, Key, Node
from driver.model.device import SLICE_VALUE, Device, is_monitor
from driver.model.offer import OF_SEVERAL, SHARED, DeviceKind, Offer, OfferKind, partition_kind
from driver.model.plan import Held, PlanMode
from driver.placement.occupancy import GpuState
from driver.slices.slice_names import Pool


class Value(msgspec.Struct, frozen=True, rename="camel"):
    """A value of the map; its fields in camelCase are those of the JSON output (docs/map.md)."""


class Holder(Value, frozen=True):
    """A claim, and the class of its request; None if the claim is gone or names no class.

    ``problem``: that its node can not prepare or release it, since when, and why; None: its node does not report that.
    """

    namespace: str
    claim: str
    device_class: str | None = None
    problem: str | None = None

    def __str__(self) -> str:
        return f"{self.namespace}/{self.claim}"


class MapSpan(Value, frozen=True):
    """Memory slices ``start`` to ``start + size - 1`` of a GPU, or one of its shares.

    ``devices`` has the held device, or those that a new claim may be allocated here, largest first, and ``kinds`` what
    they are: ``full``, ``share``, or a profile. ``slices`` is the number of memory slices; a share has a part of each.
    ``foreign``: under a partition that Tessera did not create. ``memory_gib``: of a shared device what the claim has of
    it, or what claims can still get; None: it is another device.
    """

    start: int
    size: int
    slices: float
    state: SliceState
    devices: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    holder: Holder | None = None
    foreign: bool = False
    memory_gib: int | None = None


class FreePartition(Value, frozen=True, order=True):
    """A profile of which a partition fits, ordered by size."""

    memory_slices: int
    compute_slices: int
    profile: str


class MapGpu(Value, frozen=True):
    """A GPU with its spans in order of their starts.

    ``slices`` counts its memory slices by state. ``shares`` is the number of its shares, 0 if it has none;
    ``shared_memory_gib`` what claims can have of its shared device, 0 if it has none; ``is_divided``: the spans are
    shares, or what each claim has of the shared device. ``is_whole``: nothing is held on it, and it can be allocated as
    a full GPU. ``largest_partition`` is the largest that fits. ``cordon`` is the operator's reason, which ``fault``
    repeats as soon as the node has taken it over. ``overlaps`` are pairs of held devices that have the same memory, a
    defect; of a shared device whose claims have more than its memory, its name twice.
    """

    number: int
    uuid: str
    product: str
    memory_slices: int
    memory_bytes: int
    mig_mode: str
    slices: Mapping[SliceState, float]
    shares: int
    shared_memory_gib: int
    is_divided: bool
    is_whole: bool
    largest_partition: FreePartition | None
    fault: str | None
    cordon: str | None
    nvlink_clique: str | None
    fabric_clique: str | None
    overlaps: tuple[tuple[str, str], ...]
    spans: tuple[MapSpan, ...]


class NodeState(StrEnum):
    """Why a node, or a part of it, is not available as usual."""

    CORDONED = "cordoned"
    NOT_READY = "not-ready"
    PAUSED = "paused"
    UNREPORTED = "unreported"
    INCOMPLETE = "incomplete"
    STANDALONE = "standalone"
    COMPLETE = "complete"


class LostDevice(Value, frozen=True):
    """A held device of which the node reports no GPU."""

    device: str
    holder: Holder


class MapNode(Value, frozen=True):
    """A node. ``is_whole``: all of its GPUs are.

    ``failed_monitors``: claims with nothing but monitor devices of the node, which it can not prepare or release.
    """

    name: str
    states: tuple[NodeState, ...]
    is_whole: bool
    gpus: tuple[MapGpu, ...]
    lost_devices: tuple[LostDevice, ...] = ()
    failed_monitors: tuple[Holder, ...] = ()


def requested_kinds(view: ClusterView) -> frozenset[OfferKind]:
    """The kinds of device that pending claims request and that held claims have."""
    kinds = RequestedKinds()
    kinds.update(view.queue, view.fleet, view.fleet.nodes, 0.0)
    return kinds.kinds


def cluster_map(view: ClusterView) -> Iterator[MapNode]:
    """All nodes in order of name, one at a time."""
    snapshot, kinds = view.snapshot, requested_kinds(view)
    offers: dict[str, list[Offer]] = {}
    for offer in view.devices.offered:
        offers.setdefault(offer.gpu, []).append(offer)
    nodes = {node.metadata.name: node for node in snapshot.cluster.nodes}
    largest: dict[GpuState, FreePartition | None] = {}
    failed_monitors = _failed_monitors(view)
    for node in snapshot.views:
        plan = snapshot.plans.get(node.name)
        cordons = plan.spec.cordons if plan is not None else {}
        holders = _holders(view, node.pool)
        entries = view.fleet.nodes.get(node.name, ())
        gpus = tuple(
            _gpu(entry, offers.get(entry.gpu.uuid, ()), kinds, holders, cordons.get(entry.gpu.uuid), largest)
            for entry in entries
        )
        there = {device.name for entry in entries for device in entry.held}
        lost = (LostDevice(name, holder) for name in sorted(holders.keys() - there) for holder in holders[name])
        states = tuple(_states(node, nodes.get(node.name), plan, is_incomplete=node.pool in snapshot.incomplete))
        is_whole = bool(gpus) and all(gpu.is_whole for gpu in gpus)
        yield MapNode(node.name, states, is_whole, gpus, tuple(lost), tuple(failed_monitors.get(node.name, ())))


def _states(view: NodeView, node: Node | None, plan: GpuNodePlan | None, *, is_incomplete: bool) -> Iterator[NodeState]:
    taints = {taint.key for taint in node.spec.taints} if node is not None else set()
    states = {
        NodeState.CORDONED: node is not None and node.spec.unschedulable,
        NodeState.NOT_READY: bool(taints & UNREACHABLE_TAINTS),
        NodeState.PAUSED: plan is not None and plan.metadata.paused,
        NodeState.UNREPORTED: not view.status.inventory,
        NodeState.INCOMPLETE: is_incomplete,
        NodeState.COMPLETE: view.is_complete,
        NodeState.STANDALONE: view.status.mode is PlanMode.STANDALONE,
    }
    return (state for state, holds in states.items() if holds)


def _holders(view: ClusterView, pool: str) -> dict[str, tuple[Holder, ...]]:
    """The claims by held device of a pool; several have one device only by a defect."""
    held = view.snapshot.cluster.claims.holders(pool)
    return {device: tuple(_holder(view, pool, holding) for holding in holdings) for device, holdings in held.items()}


def _holder(view: ClusterView, pool: str, held: Held) -> Holder:
    namespace, _, name = held.claim.partition("/")
    key = Key(namespace, name)
    claim = view.snapshot.cluster.claims.find(key)
    return Holder(*key, None if claim is None else _class(claim, pool, held.device), _problem(view, key))


def _problem(view: ClusterView, key: Key) -> str | None:
    start, release = view.failed_starts.get(key), view.failed_releases.get(key)
    return sentence(start) if start is not None else str(release) if release is not None else None


def _failed_monitors(view: ClusterView) -> Mapping[str, Sequence[Holder]]:
    """By node, the claims with nothing but its monitor devices that it can not prepare or release."""
    found: dict[str, list[Holder]] = {}
    nodes = {key: start.node for key, start in view.failed_starts.items()}
    nodes |= {key: release.node for key, release in view.failed_releases.items()}
    for key, node in sorted(nodes.items()):
        claim = view.snapshot.cluster.claims.find(key)
        devices = claim.results_in(view.driver, Pool(node, view.driver).names) if claim is not None else ()
        if claim is not None and devices and all(is_monitor(result.device) for result in devices):
            device_class = _class(claim, devices[0].pool, devices[0].device)
            found.setdefault(node, []).append(Holder(*key, device_class, _problem(view, key)))
    return found


def _class(claim: Claim, pool: str, device: str) -> str | None:
    """The class of the request, or of its alternative, for which the device was allocated."""
    for result in claim.results:
        if (result.pool, result.device) == (pool, device):
            request, _, alternative = result.request.partition("/")
            for requested in claim.spec.devices.requests:
                for exact in requested.alternatives if requested.name == request else ():
                    if exact.name == alternative:
                        return exact.device_class_name
    return None


def _gpu(
    entry: FleetGpu,
    offers: Collection[Offer],
    kinds: frozenset[OfferKind],
    holders: Mapping[str, tuple[Holder, ...]],
    cordon: str | None,
    largest: dict[GpuState, FreePartition | None],
) -> MapGpu:
    gpu, state = entry.gpu, entry.state
    if state not in largest:
        largest[state] = _largest_partition(entry)
    offered = [device for offer in offers if (device := entry.device(offer.spot)) is not None]
    spans = list(_held_spans(entry, holders))
    if state.used:
        spans += _rest_of_memory(entry, parts_of(entry, offers), offered)
    elif is_divided(entry):
        spans += _other_shares(entry, parts_of(entry, offers), offered)
    else:
        spans += _other_spans(entry, slice_masks(entry, offers, kinds), offered)
        spans.sort(key=lambda span: (span.start, span.devices))
    return MapGpu(
        number=entry.number,
        uuid=gpu.uuid,
        product=gpu.product_name,
        memory_slices=gpu.memory_slices,
        memory_bytes=gpu.memory_bytes,
        mig_mode=gpu.mig_mode.value,
        slices=slices_by_state(entry, offers, kinds),
        shares=entry.shares,
        shared_memory_gib=state.room,
        is_divided=is_divided(entry),
        is_whole=state.whole,
        largest_partition=largest[state],
        fault=entry.fault,
        cordon=cordon,
        nvlink_clique=gpu.nvlink_clique,
        fabric_clique=gpu.fabric_clique,
        overlaps=entry.overlaps,
        spans=tuple(spans),
    )


def _largest_partition(entry: FleetGpu) -> FreePartition | None:
    """The largest partition that fits next to what is held."""
    fitting = (
        FreePartition(profile.placements[0].size, profile.compute_slices, profile.name)
        for profile in entry.gpu.profiles
        if next(entry.state.spots(partition_kind(profile.name)), None)
    )
    # Of the variants of a profile, such as 1g.10gb and 1g.10gb+me, the plain one.
    return max(fitting, key=lambda each: (each.memory_slices, each.compute_slices, -len(each.profile)), default=None)


def _held_spans(entry: FleetGpu, holders: Mapping[str, tuple[Holder, ...]]) -> Iterator[MapSpan]:
    of_several, held = Counter[str](), Counter(device.name for device in entry.held)
    for device in sorted(entry.held, key=lambda each: (_start(each), each.name)):
        size = device.mask.bit_count()
        slices, gib = size * device.weight / SLICE_VALUE, None
        kinds, claims = (str(device.spot.kind),), holders.get(device.name, ())
        if device.kind is DeviceKind.SHARED:
            gib, slices = device.spot.at, size * device.spot.at / max(entry.state.room, entry.state.used)
        if device.kind is DeviceKind.SHARED_PARTITION:
            slices /= held[device.name]
        if device.kind in OF_SEVERAL:
            place = of_several[device.name]
            claims = claims[place : place + 1]
            of_several[device.name] += 1
        for holder in claims or (None,):
            span = MapSpan(_start(device), size, slices, SliceState.HELD, (device.name,), kinds, holder)
            yield span if gib is None else msgspec.structs.replace(span, memory_gib=gib)


def _rest_of_memory(entry: FleetGpu, parts: Mapping[SliceState, int], offered: Iterable[Device]) -> Iterator[MapSpan]:
    """What claims do not have yet of the shared device."""
    total, names = entry.gpu.memory_slices, tuple(device.name for device in offered)
    for state, gib in parts.items():
        if gib and state is not SliceState.HELD:
            slices, devices = total * gib / sum(parts.values()), names if state is SliceState.OFFERED else ()
            yield MapSpan(0, total, slices, state, devices, (str(SHARED),), memory_gib=gib)


def _other_shares(entry: FleetGpu, values: Mapping[SliceState, int], offered: Iterable[Device]) -> Iterator[MapSpan]:
    """A span for each share that is not held, and one for a rest that is too small for a share."""
    free_shares = (device for device in offered if device.kind is DeviceKind.SHARE)
    names = [share.name for share in sorted(free_shares, key=lambda share: share.spot.at)]
    total, weight = entry.gpu.memory_slices, SLICE_VALUE // max(1, entry.shares)
    for state, value in values.items():
        if state is SliceState.HELD:
            continue
        for at in range(0, value, weight):
            part = min(weight, value - at)
            devices = (names.pop(0),) if names and state is SliceState.OFFERED else ()
            kinds = ("share",) if part == weight and entry.shares else ()
            yield MapSpan(0, total, total * part / SLICE_VALUE, state, devices, kinds)


def _other_spans(entry: FleetGpu, masks: Mapping[SliceState, int], offered: Collection[Device]) -> Iterator[MapSpan]:
    """Spans of adjacent slices of one state; offered slices are split where no offer covers both sides."""
    yield from _offered_spans(masks[SliceState.OFFERED], offered)
    for state in (SliceState.FREE, SliceState.STRANDED):
        for start, size in _runs(masks[state]):
            yield MapSpan(start, size, size, state)
    unavailable = masks[SliceState.UNAVAILABLE]
    for mask, foreign in ((unavailable & entry.foreign, True), (unavailable & ~entry.foreign, False)):
        for start, size in _runs(mask):
            yield MapSpan(start, size, size, SliceState.UNAVAILABLE, foreign=foreign)


def _offered_spans(mask: int, offered: Collection[Device]) -> Iterator[MapSpan]:
    groups: list[tuple[int, list[Device]]] = []
    for device in sorted(offered, key=lambda device: (_start(device), device.name)):
        if groups and groups[-1][0] & device.mask:
            groups[-1] = (groups[-1][0] | device.mask, [*groups[-1][1], device])
        else:
            groups.append((device.mask, [device]))
    for covered, devices in groups:
        for start, size in _runs(covered & mask):
            inside = [device for device in devices if device.mask >> start & (1 << size) - 1]
            inside.sort(key=_largest_first)
            kinds = tuple(dict.fromkeys(str(device.spot.kind) for device in inside))
            yield MapSpan(start, size, size, SliceState.OFFERED, tuple(device.name for device in inside), kinds)


def _largest_first(device: Device) -> tuple[bool, int, int, str]:
    compute = device.profile.compute_slices if device.profile is not None else device.gpu.memory_slices
    return device.kind is DeviceKind.SHARE, -device.mask.bit_count(), -compute, device.name


def _runs(mask: int) -> Iterator[tuple[int, int]]:
    """Start and size of each run of adjacent bits."""
    start = 0
    while mask >> start:
        while not mask >> start & 1:
            start += 1
        size = 1
        while mask >> start + size & 1:
            size += 1
        yield start, size
        start += size


def _start(device: Device) -> int:
    return device.placement.start if device.placement is not None else 0
