"""The cluster's GPUs and what is held on them, as values: what curation decides from (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import TypeVar

from controller.cluster.node_dedication import UseLabel
from driver.model.device import Device, devices_of
from driver.model.gpu import Gpu
from driver.model.offer import SHARED, DeviceKind, Offer, Spot
from driver.model.plan import Held
from driver.model.reported_gpus import FaultKind
from driver.model.shared_memory import SharedMemory
from driver.placement.occupancy import Geometry, GpuState, overlap, possible_kinds

T = TypeVar("T")


class Layout:
    """The devices of GPUs with one geometry and number that are divided or shared alike: by spot, and spots by name."""

    def __init__(self, devices: Iterable[Device]) -> None:
        self.devices = {device.spot: device for device in devices}
        self.spots = {device.name: device.spot for device in self.devices.values()}


LAYOUTS: dict[tuple[Geometry, int, int, SharedMemory | None], Layout] = {}
"""A cluster has few, whatever its size."""


@dataclass(frozen=True)
class FleetGpu:
    """One GPU of one node.

    ``number`` is the one in its device names; ``shares`` into how many it is divided (0: none), ``shared`` its shared
    device (None: none); ``foreign`` the bit mask of memory slices under partitions that Tessera did not make; ``held``
    what claims have, prepared or not: a shared device once for each of its claims, with what that has of it.
    ``uses`` are the kinds of device that the label ``dedicated_by`` allows; ``why_no_offers``: why its node accepts no
    offers. ``tainted``: for the claim in question, the DeviceTaintRules, with their taints, that keep it from the GPU.
    """

    node: str
    gpu: Gpu
    number: int
    held: tuple[Device, ...] = ()
    shares: int = 0
    shares_only: bool = False
    foreign: int = 0
    fault: str | None = None
    fault_kind: FaultKind | None = None
    uses: frozenset[DeviceKind] = frozenset(DeviceKind)
    dedicated_by: UseLabel | None = None
    why_no_offers: str = ""
    tainted: tuple[str, ...] = ()
    shared: SharedMemory | None = None
    empty: InitVar[FleetGpu | None] = None
    """The same GPU with nothing held, if there is one already; ``replace`` does not take it over."""

    def __post_init__(self, empty: FleetGpu | None) -> None:
        if empty is not None:
            object.__setattr__(self, "_unheld", empty)

    def holding(self, held: Iterable[Device]) -> FleetGpu:
        devices = tuple(held)
        return replace(self, held=devices, empty=self.unheld) if devices else self.unheld

    @property
    def has_monitor(self) -> bool:
        """Whether its node publishes its monitor device: it answers, and no other driver has it."""
        return self.fault_kind not in {FaultKind.UNAVAILABLE, FaultKind.RESERVED, FaultKind.ADOPTED}

    @property
    def unheld(self) -> FleetGpu:
        """The same GPU with nothing held."""
        return self._unheld if self.held else self

    @cached_property
    def _unheld(self) -> FleetGpu:
        return replace(self, held=())

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Every device it could ever offer."""
        return devices_of(self.gpu, self.number, self.shares, shared=self.shared)

    @cached_property
    def layout(self) -> Layout:
        """The same for all GPUs with the same devices."""
        key = (self.state.geometry, self.number, self.shares, self.shared)
        if key not in LAYOUTS:
            LAYOUTS[key] = Layout(self.devices)
        return LAYOUTS[key]

    def device(self, spot: Spot) -> Device | None:
        device = self.layout.devices.get(spot.device)
        return None if device is None else replace(device, gpu=self.gpu, spot=spot)

    def device_name(self, spot: Spot) -> str | None:
        device = self.layout.devices.get(spot)
        return None if device is None else device.name

    def device_named(self, name: str) -> Device | None:
        spot = self.layout.spots.get(name)
        return None if spot is None else self.device(spot)

    @cached_property
    def state(self) -> GpuState:
        """What it could offer now next to what is held, as a value that many GPUs share: curation compares these."""
        return GpuState.of(self.gpu, self.held, self.foreign, self.shares, self._kinds, self.shared)

    @cached_property
    def overlaps(self) -> tuple[tuple[str, str], ...]:
        """Pairs of names of held devices that exclude each other: one of them was allocated by mistake.

        A shared device whose claims have more than its memory, or than its compute instances, excludes itself.
        """
        devices = {device.name: device for device in self.held}.values()
        # Two shares of less than all memory always fit next to each other.
        pairs = (pair for pair in combinations(devices, 2) if 1 in {pair[0].shares, pair[1].shares})
        overdrawn = (device for device in devices if self.allocated(device) > self.capacity(device))
        return (
            *((first.name, second.name) for first, second in pairs if overlap(first, second)),
            *((device.name, device.name) for device in overdrawn),
        )

    def capacity(self, device: Device) -> int:
        """How much claims can have of a shared device: GiB, or compute instances of a shared partition; else 1."""
        return device.shared.gib if device.shared is not None else device.spot.kind.instances

    def allocated(self, device: Device) -> int:
        """How much of ``capacity`` claims have."""
        return self.state.used if device.shared is not None else dict(self.state.claims).get(device.spot, 0)

    @cached_property
    def clique(self) -> tuple[str, str]:
        """Its node, and which of the node's GPUs it is asked for together with."""
        return (self.node, self.gpu.nvlink_clique or "")

    @cached_property
    def _kinds(self) -> frozenset[DeviceKind]:
        if self.fault is not None or self.why_no_offers or self.tainted:
            return frozenset()
        return self.uses & possible_kinds(self.gpu, shares_only=self.shares_only)


def parts_of(device: Device, claims: Iterable[Held]) -> list[Device]:
    """The parts that ``claims`` have of a device which several can have: GiB of a shared device, compute instances."""
    if device.shared is None:
        return [device for claim in claims for _ in range(claim.gib)]
    return [replace(device, spot=Spot(SHARED, claim.gib or device.shared.gib)) for claim in claims]


class Hardware:
    """Stands for which GPUs there are, on which nodes and with which facts; what is held does not matter."""


@dataclass(frozen=True)
class Fleet:
    """Every GPU of the cluster by UUID; ``nodes`` and ``cliques``: the GPUs of each, by number.

    While neither a GPU, nor a held device or its holder changes, the builder gives the same object. ``hardware`` is the
    same object as long as no GPU comes, goes, or becomes another.
    """

    gpus: Mapping[str, FleetGpu] = field(default_factory=dict)
    nodes: Mapping[str, tuple[FleetGpu, ...]] = field(default_factory=dict, compare=False)
    cliques: Mapping[tuple[str, str], tuple[FleetGpu, ...]] = field(default_factory=dict, compare=False)
    hardware: Hardware = field(default_factory=Hardware, compare=False)
    empty: Fleet | None = field(default=None, compare=False)
    """This fleet with nothing held; None if it is this object itself."""

    @classmethod
    def of(cls, gpus: Iterable[FleetGpu], hardware: Hardware | None = None) -> Fleet:
        by_uuid = {gpu.gpu.uuid: gpu for gpu in gpus}
        nodes: dict[str, list[FleetGpu]] = {}
        cliques: dict[tuple[str, str], list[FleetGpu]] = {}
        for gpu in sorted(by_uuid.values(), key=lambda gpu: gpu.number):
            nodes.setdefault(gpu.node, []).append(gpu)
            cliques.setdefault(gpu.clique, []).append(gpu)
        hardware = hardware or Hardware()
        is_held = any(gpu.held for gpu in by_uuid.values())
        return cls(
            by_uuid,
            {node: tuple(members) for node, members in nodes.items()},
            {clique: tuple(cliques[clique]) for clique in sorted(cliques)},
            hardware,
            cls.of((gpu.unheld for gpu in by_uuid.values()), hardware) if is_held else None,
        )

    def changed(self, gpus: Iterable[FleetGpu]) -> Fleet:
        """This fleet with something else held or allowed on some of its GPUs, the hardware being the same."""
        new = {gpu.gpu.uuid: gpu for gpu in gpus}
        empty = self.empty
        if empty is not None or any(gpu.held for gpu in new.values()):
            others = [gpu.unheld for uuid, gpu in new.items() if gpu.unheld is not self.unheld.gpus[uuid]]
            empty = self.unheld.changed(others) if others else self.unheld
        # What is the same is kept: a fleet has thousands of GPUs, and one of them changes.
        return Fleet(
            {**self.gpus, **new},
            {**self.nodes, **_renewed(self.nodes, {gpu.node for gpu in new.values()}, new)},
            {**self.cliques, **_renewed(self.cliques, {gpu.clique for gpu in new.values()}, new)},
            self.hardware,
            empty,
        )

    @property
    def unheld(self) -> Fleet:
        """This fleet with nothing held: the same object as long as only held devices change."""
        return self if self.empty is None else self.empty

    def __iter__(self) -> Iterator[FleetGpu]:
        return iter(self.gpus.values())

    def by_node(self, offers: Iterable[Offer]) -> dict[str, list[Offer]]:
        by_node: dict[str, list[Offer]] = {}
        for offer in offers:
            by_node.setdefault(self.gpus[offer.gpu].node, []).append(offer)
        return by_node

    def device(self, offer: Offer) -> Device | None:
        gpu = self.gpus.get(offer.gpu)
        return None if gpu is None else gpu.device(offer.spot)


def _renewed(
    before: Mapping[T, tuple[FleetGpu, ...]], groups: Iterable[T], new: Mapping[str, FleetGpu]
) -> dict[T, tuple[FleetGpu, ...]]:
    """Those ``groups`` with their ``new`` GPUs."""
    return {group: tuple(new.get(gpu.gpu.uuid, gpu) for gpu in before[group]) for group in groups}
