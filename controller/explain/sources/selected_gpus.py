"""The GPUs that a request selects, how many devices each could provide, and what keeps it from that (pure)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from controller.cluster.fleet import Fleet, FleetGpu
from controller.demand.device_search import free_spots, most_devices, slices_of
from controller.demand.node_eligibility import BLOCKING, Excluded
from controller.demand.pending_claims import Holders, holders_of
from controller.demand.requirements import DeviceRequest
from controller.demand.selected_devices import Matches, Selector, SelectorFailure
from driver.kube.types import DeviceTaintRule
from driver.model.gpu import MigMode
from driver.model.offer import FULL, SHARE, SHARED, DeviceKind, OfferKind
from driver.model.reported_gpus import FaultKind
from driver.slices.slice_names import Pool

SHOWN = 3
"""Names in a message."""


class Obstacle(StrEnum):
    """What keeps a GPU from providing selected devices, whatever is held on it; CLOSED: its node accepts no offers."""

    EXCLUDED = "on nodes where the pod can't run"
    CLOSED = "node closed"
    FAULT = "fault"
    CORDONED = "cordoned"
    RESERVED = "reserved for another driver"
    ADOPTED = "held by claims of another driver"
    TAINTED = "tainted"
    RESET = "other MIG mode"
    DEDICATED = "kept for other uses"
    FOREIGN = "partitions of others"


OF_FAULT: dict[FaultKind | None, Obstacle] = {
    FaultKind.CORDONED: Obstacle.CORDONED,
    FaultKind.RESERVED: Obstacle.RESERVED,
    FaultKind.ADOPTED: Obstacle.ADOPTED,
}
"""Kinds of faults that are not the GPU's own."""


@dataclass(frozen=True, slots=True)
class SelectedGpu:
    """One GPU that has selected devices.

    ``most`` of them could be allocated at once if nothing were held, ``now`` can be at present; both are 0 on an
    excluded node. ``limited_by``: what keeps it from providing some of the devices; ``blocked_by``: the same where it
    keeps it from all. ``detail`` is what messages have in brackets.
    """

    entry: FleetGpu
    matches: Matches
    most: int
    now: int
    blocked_by: Obstacle | None = None
    limited_by: Obstacle | None = None
    detail: str = ""

    @property
    def is_held(self) -> bool:
        """Whether only held devices keep it from providing a device."""
        return self.blocked_by is None and not self.now

    @property
    def room(self) -> float:
        """The number of devices for which its free memory and compute slices would be enough."""
        state, kinds = self.entry.state, self.matches.starts_by_kind
        in_memory = state.free / min(slices_of(state, kind, self.matches.gib) for kind in kinds)
        computes = {profile.name: profile.instance_slices for profile in self.entry.gpu.profiles}
        least = min((computes.get(kind.profile or "", 0) for kind in kinds), default=0)
        if not least:  # full GPUs and shares take compute slices with their memory
            return in_memory
        most = max(profile.compute_slices for profile in self.entry.gpu.profiles)
        held = sum(device.profile.instance_slices for device in self.entry.held if device.profile is not None)
        return min(in_memory, (most - held) / least)

    @property
    def is_at_its_limit(self) -> bool:
        """Whether as many partitions of the selected profile are held as the GPU can have, and yet slices are free."""
        if not self.is_held or len(self.matches.starts_by_kind) > 1:
            return False
        [key] = self.matches.starts_by_kind
        held = sum(device.profile is not None and device.profile.name == key.profile for device in self.entry.held)
        return 0 < self.most <= held and self.entry.state.free >= slices_of(self.entry.state, key)


@dataclass(frozen=True)
class SelectedGpus:
    """The GPUs of the cluster that have the devices which some requests select."""

    gpus: tuple[SelectedGpu, ...]

    @cached_property
    def reachable(self) -> tuple[SelectedGpu, ...]:
        """Those on nodes where the pod may run."""
        return tuple(gpu for gpu in self.gpus if gpu.blocked_by is not Obstacle.EXCLUDED)

    @cached_property
    def usable(self) -> tuple[SelectedGpu, ...]:
        """Those that could provide a device if nothing were held."""
        return tuple(gpu for gpu in self.reachable if gpu.blocked_by is None)

    @cached_property
    def by_node(self) -> Mapping[str, tuple[SelectedGpu, ...]]:
        gpus_of: dict[str, list[SelectedGpu]] = {}
        for gpu in self.usable:
            gpus_of.setdefault(gpu.entry.node, []).append(gpu)
        return {node: tuple(gpus) for node, gpus in gpus_of.items()}

    @cached_property
    def room(self) -> Mapping[str, float]:
        """The number of devices by node for which its free memory would be enough if it were in one place.

        GPUs that have all partitions of the profile that they can have do not count.
        """
        return {node: sum(gpu.room for gpu in gpus if not gpu.is_at_its_limit) for node, gpus in self.by_node.items()}

    @cached_property
    def most_free(self) -> tuple[int, str]:
        """The most devices that one node can provide at present, and that node."""
        return max(((sum(gpu.now for gpu in gpus), node) for node, gpus in self.by_node.items()), default=(0, ""))

    @cached_property
    def products(self) -> str:
        """``6 NVIDIA H100 80GB HBM3, 2 NVIDIA L4``: the usable GPUs."""
        counts = Counter(gpu.entry.gpu.product_name for gpu in self.usable)
        return listed([f"{count} {product}" for product, count in sorted(counts.items())])

    @cached_property
    def keys(self) -> frozenset[OfferKind]:
        return frozenset(key for matches in {gpu.matches for gpu in self.gpus} for key in matches.starts_by_kind)


@dataclass(frozen=True)
class Availability:
    """The GPUs that are ``selected`` by ``request``, and a device for which its selector fails."""

    request: DeviceRequest
    selected: SelectedGpus
    failure: SelectorFailure | None = None

    @property
    def where(self) -> str:
        """`` (on a, b)``: the nodes that could provide them if nothing were held; empty if there is none."""
        count = self.request.count or 1
        nodes = sorted(node for node, gpus in self.selected.by_node.items() if sum(gpu.most for gpu in gpus) >= count)
        return f" (on {listed(nodes)})" if nodes else ""

    def nodes_with_room(self) -> list[str]:
        """The nodes with ``room`` for the request; those with the most first."""
        count = math.inf if self.request.count is None else self.request.count
        return [
            node for room, node in sorted((-room, node) for node, room in self.selected.room.items() if room >= count)
        ]

    @property
    def needs(self) -> str:
        """What the request asks for: ``2 full GPUs of one node``, ``a partition 1g.10gb``."""
        singular, plural = _nouns(self.selected.keys)
        count = self.request.count
        if self.selected.keys == {SHARED}:
            amount = self.request.selector.memory
            what = f"{'all memory' if amount is None else f'memory {amount}'} of a shared GPU"
            if count is not None:
                return what if count == 1 else f"{count} times {what}, on one node"
        if count is None:
            return f"all {plural} of one node"
        return f"a {singular}" if count == 1 else f"{count} {plural} of one node"


def _nouns(keys: frozenset[OfferKind]) -> tuple[str, str]:
    if keys == {FULL}:
        return "full GPU", "full GPUs"
    if keys == {SHARE}:
        return "share", "shares"
    if keys == {SHARED}:
        return "shared GPU", "shared GPUs"
    profile = f" {next(iter(keys)).profile}" if len(keys) == 1 else ""
    if keys and all(key.type is DeviceKind.SHARED_PARTITION for key in keys):
        return f"compute instance{profile}", f"compute instances{profile}"
    if keys and all(key.type is DeviceKind.PARTITION for key in keys):
        return f"partition{profile}", f"partitions{profile}"
    return "device", "devices"


def matching_gpus(fleet: Fleet, selector: Selector) -> frozenset[tuple[Matches, frozenset[str]]]:
    """The UUIDs of the GPUs with devices that ``selector`` selects, those with the same devices together."""
    gpus_of: dict[Matches, list[str]] = {}
    for matches, alike in selector.among(fleet):
        if matches:
            gpus_of.setdefault(matches, []).extend(alike)
    return frozenset((matches, frozenset(gpus)) for matches, gpus in gpus_of.items())


def selected_gpus(
    fleet: Fleet, matching: Iterable[tuple[Matches, Collection[str]]], excluded: Mapping[str, Excluded]
) -> SelectedGpus:
    """``excluded`` are the nodes on which the pod can not run."""
    matches_of = {uuid: matches for matches, gpus in matching for uuid in gpus}
    chosen = (entry for uuid, entry in fleet.gpus.items() if uuid in matches_of)
    return SelectedGpus(
        tuple(_selected(entry, matches_of[entry.gpu.uuid], excluded.get(entry.node)) for entry in chosen)
    )


def failure_of(fleet: Fleet, selector: Selector, excluded: Collection[str]) -> SelectorFailure | None:
    """The first device for which ``selector`` fails on a node that is not ``excluded``."""
    for matches, alike in selector.among(fleet):
        if matches.failures and any(fleet.gpus[uuid].node not in excluded for uuid in alike):
            return matches.failures[0]
    return None


def _selected(entry: FleetGpu, matches: Matches, excluded: Excluded | None) -> SelectedGpu:
    if excluded is not None:
        return SelectedGpu(entry, matches, 0, 0, Obstacle.EXCLUDED, Obstacle.EXCLUDED, excluded.text)
    most, now = most_devices(entry.unheld.state, matches), most_devices(entry.state, matches)
    obstacle, detail = _obstacle(entry, matches)
    keeps_all = obstacle is not None and not free_spots(entry.unheld.state, matches)
    return SelectedGpu(entry, matches, most, now, obstacle if keeps_all else None, obstacle, detail)


def _obstacle(entry: FleetGpu, matches: Matches) -> tuple[Obstacle | None, str]:
    if entry.why_no_offers:
        return Obstacle.CLOSED, f"its node {entry.why_no_offers}"
    if entry.fault is not None:
        return OF_FAULT.get(entry.fault_kind, Obstacle.FAULT), entry.fault
    if entry.tainted:
        return Obstacle.TAINTED, tainting_rules(entry)
    missing = {key.type for key in matches.starts_by_kind} - entry.state.kinds
    if missing:
        # Kinds that the settings of the node allow, and only the present MIG mode does not: a reset brings them.
        of_several = {DeviceKind.SHARE, DeviceKind.SHARED}
        after_reset = missing & entry.uses & (of_several if entry.shares_only else set(DeviceKind))
        return (Obstacle.RESET, f"MIG {entry.gpu.mig_mode}") if after_reset else (Obstacle.DEDICATED, kept_by(entry))
    return (Obstacle.FOREIGN, "") if entry.foreign else (None, "")


def kept_by(entry: FleetGpu) -> str:
    """What keeps a GPU for some kinds of devices: a label of its node, or the settings of its node plugin."""
    return f"label {entry.dedicated_by}" if entry.dedicated_by else "--shares or --mig-gpus of its node plugin"


def without(entry: FleetGpu, obstacle: Obstacle) -> FleetGpu:
    """The same GPU as if ``obstacle`` were removed; EXCLUDED concerns the pod, not the GPU."""
    match obstacle:
        case Obstacle.CLOSED if entry.why_no_offers:
            return replace(entry, why_no_offers="")
        case Obstacle.FAULT | Obstacle.CORDONED | Obstacle.RESERVED | Obstacle.ADOPTED if entry.fault is not None:
            return replace(entry, fault=None, fault_kind=None)
        case Obstacle.TAINTED if entry.tainted:
            return replace(entry, tainted=())
        case Obstacle.DEDICATED:
            return replace(entry, uses=frozenset(DeviceKind), dedicated_by=None, shares_only=False)
        case Obstacle.FOREIGN:
            return replace(entry, foreign=0)
        case Obstacle.RESET:
            mode = MigMode.DISABLED if entry.gpu.mig_mode.in_force else MigMode.ENABLED
            return replace(entry, gpu=replace(entry.gpu, mig_mode=mode))
        case _:
            return entry


def untolerated(rules: Iterable[DeviceTaintRule], requests: Iterable[DeviceRequest]) -> tuple[DeviceTaintRule, ...]:
    """The rules that keep devices from a claim, none of whose ``requests`` tolerates their taint."""
    tolerations = [toleration for request in requests for toleration in request.tolerations]
    blocking = (rule for rule in rules if rule.spec.taint.effect in BLOCKING)
    return tuple(rule for rule in blocking if not rule.spec.taint.is_tolerated(tolerations))


def named_rule(rule: DeviceTaintRule) -> str:
    """The rule and its taint, as messages name them."""
    return f"DeviceTaintRule {rule.metadata.name} with {rule.spec.taint.text}"


def tainting_rules(entry: FleetGpu) -> str:
    """The rules that keep a claim from the GPU, as messages name them; empty if none does."""
    return " and ".join(entry.tainted)


def with_taints(fleet: Fleet, driver: str, rules: Sequence[DeviceTaintRule], selectors: Iterable[Selector]) -> Fleet:
    """``fleet`` with the GPUs of which ``rules`` taint all devices that ``selectors`` select."""
    chosen = tuple(selectors)
    tainting = ((entry, [rule for rule in rules if _taints(rule, entry, driver, chosen)]) for entry in fleet)
    tainted = [replace(entry, tainted=tuple(map(named_rule, by))) for entry, by in tainting if by]
    return fleet.changed(tainted) if tainted else fleet


def _taints(rule: DeviceTaintRule, entry: FleetGpu, driver: str, selectors: Sequence[Selector]) -> bool:
    """Whether ``rule`` taints every device of the GPU that ``selectors`` select."""
    device = rule.spec.device_selector.device if rule.spec.device_selector is not None else None
    if not rule.selects(driver, Pool(entry.node, driver).name, device or ""):
        return False
    if device is None:
        return True
    if device not in entry.layout.spots:
        return False
    selected = [selector.on(entry) for selector in selectors]
    spots = entry.layout.spots.items()
    # A rule for one device taints them all if the selectors select no other device of this GPU.
    return all(name == device for name, spot in spots if any(matches.has(*spot) for matches in selected))


def by_obstacle(selected: Iterable[SelectedGpus], *, blocked: bool = False) -> dict[Obstacle, list[FleetGpu]]:
    """The reachable GPUs, each once, that an obstacle limits; or only those that it keeps from every device."""
    groups: dict[Obstacle, dict[str, FleetGpu]] = {}
    for gpu in (gpu for gpus in selected for gpu in gpus.reachable):
        obstacle = gpu.blocked_by if blocked else gpu.limited_by
        if obstacle is not None:
            groups.setdefault(obstacle, {})[gpu.entry.gpu.uuid] = gpu.entry
    return {obstacle: list(gpus.values()) for obstacle, gpus in groups.items()}


def listed(names: Sequence[str], shown: int = SHOWN) -> str:
    """The first names and the number of the others: ``a, b, c and 3 more``."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def named(gpus: Iterable[FleetGpu]) -> str:
    """``gpu-3, gpu-5 of a (fault or taint), gpu-0 of b``, and the number of the others."""
    details: dict[str, list[FleetGpu]] = {}
    for gpu in gpus:
        details.setdefault(gpu.fault or tainting_rules(gpu), []).append(gpu)
    return listed([numbered(alike) + (f" ({detail})" if detail else "") for detail, alike in details.items()])


def numbered(gpus: Iterable[FleetGpu]) -> str:
    """``gpu-3, gpu-5 of a, gpu-0 of b``, and the number of the nodes that are left out."""
    on_nodes: dict[str, list[str]] = {}
    for gpu in gpus:
        on_nodes.setdefault(gpu.node, []).append(f"gpu-{gpu.number}")
    return listed([f"{listed(names)} of {node}" for node, names in sorted(on_nodes.items())])


def held_by(available: Iterable[Availability], holders: Holders) -> str:
    """The claims that hold devices of the usable GPUs: the end of a sentence."""
    claims = holders_of((gpu.entry for availability in available for gpu in availability.selected.usable), holders)
    noun = "claim" if len(claims) == 1 else "claims"
    return f"; devices there are held by {len(claims)} {noun}: {listed(claims)}" if claims else ""
