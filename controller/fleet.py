"""The cluster's GPUs and what is held on them, as values: what curation decides from (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from driver.model.device import Device, DeviceKind, devices_of
from driver.model.gpu import Gpu
from driver.model.occupancy import Occupancy
from driver.model.plan import Offer, offer_of
from driver.placement import GpuState


@dataclass(frozen=True)
class FleetGpu:
    """One GPU of one node.

    ``number`` is the one in its device names; ``shares`` into how many it is divided (0: none); ``foreign`` the bit
    mask of memory slices under partitions that Tessera did not make; ``held`` what claims have, prepared or not.
    ``uses`` are the kinds of device its node's dedication allows.
    """

    node: str
    gpu: Gpu
    number: int
    held: tuple[Device, ...] = ()
    shares: int = 0
    shares_only: bool = False
    foreign: int = 0
    fault: str | None = None
    uses: frozenset[DeviceKind] = frozenset(DeviceKind)

    def holding(self, held: Iterable[Device]) -> FleetGpu:
        """The same GPU with other devices held."""
        return replace(self, held=tuple(held))

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Every device it could ever offer."""
        return devices_of(self.gpu, self.number, self.shares)

    @cached_property
    def by_offer(self) -> Mapping[Offer, Device]:
        """Those devices by the offers that stand for them."""
        return {offer_of(device): device for device in self.devices}

    @cached_property
    def occupancy(self) -> Occupancy:
        state = self.state
        return Occupancy(state.mask, state.geometry.limits, state.taken, state.shared)

    @cached_property
    def possible(self) -> tuple[Device, ...]:
        """What it could offer now: what fits beside what is held, without a reset, as settings and labels allow."""
        names = {device.name for device in self.held}
        fitting = (device for device in self.devices if self.occupancy.admits(device))
        return tuple(device for device in fitting if device.kind in self._kinds and device.name not in names)

    @cached_property
    def state(self) -> GpuState:
        """What :attr:`possible` says, as a value that many GPUs share: curation compares these."""
        return GpuState.of(self.gpu, self.held, self.foreign, self.shares, self._kinds)

    @cached_property
    def clique(self) -> tuple[str, str]:
        """Its node, and which of the node's GPUs it is asked for together with."""
        return (self.node, self.gpu.nvlink_clique or "")

    @cached_property
    def _kinds(self) -> frozenset[DeviceKind]:
        if self.fault is not None:
            return frozenset()
        return frozenset(kind for kind in self.uses if self._allows(kind))

    def _allows(self, kind: DeviceKind) -> bool:
        if self.shares_only and kind is not DeviceKind.SHARE:
            return False
        return self.gpu.toggles_freely or (kind is DeviceKind.PARTITION) == self.gpu.mig_mode.in_force


@dataclass(frozen=True)
class Fleet:
    """Every GPU of the cluster by UUID."""

    gpus: Mapping[str, FleetGpu] = field(default_factory=dict)

    @classmethod
    def of(cls, gpus: Iterable[FleetGpu]) -> Fleet:
        return cls({entry.gpu.uuid: entry for entry in gpus})

    def __iter__(self) -> Iterator[FleetGpu]:
        return iter(self.gpus.values())

    @cached_property
    def nodes(self) -> Mapping[str, tuple[FleetGpu, ...]]:
        """The GPUs of each node, by number."""
        found: dict[str, list[FleetGpu]] = {}
        for entry in sorted(self, key=lambda entry: entry.number):
            found.setdefault(entry.node, []).append(entry)
        return {node: tuple(gpus) for node, gpus in found.items()}

    @cached_property
    def cliques(self) -> Mapping[tuple[str, str], tuple[FleetGpu, ...]]:
        """The GPUs of each clique, by number."""
        found: dict[tuple[str, str], list[FleetGpu]] = {}
        for entry in self:
            found.setdefault(entry.clique, []).append(entry)
        return {clique: tuple(sorted(found[clique], key=lambda entry: entry.number)) for clique in sorted(found)}

    @cached_property
    def clique_sizes(self) -> frozenset[int]:
        """How many GPUs the cliques have."""
        return frozenset(map(len, self.cliques.values()))
