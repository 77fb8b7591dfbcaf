"""Equivalence classes of GPUs: those whose devices have equal values of the attributes a selector reads (pure)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import fields
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from controller.cluster.fleet import Fleet, FleetGpu, Hardware
from driver.model.device import Device, full_device, partition_device, share_device, shared_device
from driver.model.gpu import Gpu
from driver.model.offer import DeviceKind, partition_kind
from driver.model.shared_memory import SharedMemory
from driver.slices.attributes import FACTS, Value

PLACEMENT_ATTRIBUTE = "placementStart"
"""The only attribute in which partitions of one profile on one GPU differ."""

FACT_OF = {kind: {fact.name: fact.of for fact in facts} for kind, facts in FACTS.items()}

KNOWN = frozenset(name for facts in FACT_OF.values() for name in facts)
"""Every attribute that a device may have."""

Names = frozenset[str] | None
"""Attributes of this driver as the slices spell them; None for all of them."""


class Alike(NamedTuple):
    """GPUs with equivalent devices, by UUID; ``example`` is one of them, as it was when they were grouped."""

    example: FleetGpu
    gpus: tuple[str, ...]


class EquivalenceClasses:
    """The classes of GPUs whose devices don't differ in ``names``, for each kind of device by itself."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self._classified: dict[str, tuple[Gpu, int, SharedMemory | None, tuple[int, ...]]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._next_number = count()  # unlike the size of a dict never the same for two threads
        self._by_facts: dict[Hashable, tuple[int, ...]] | None = (
            {} if names is not None and not names & UNIQUE else None
        )
        """Classes by facts that GPUs may share; None where ``names`` includes an attribute unique to each GPU."""

        self._groups: tuple[Hardware, list[Alike]] | None = None

    def groups(self, fleet: Fleet) -> Sequence[Alike]:
        """The GPUs of ``fleet``, those with equivalent devices together; remembered while the hardware is the same."""
        remembered = self._groups
        if remembered is None or remembered[0] is not fleet.hardware:
            members: dict[tuple[int, ...], tuple[FleetGpu, list[str]]] = {}
            for gpu in fleet:
                members.setdefault(self.of(gpu), (gpu, []))[1].append(gpu.gpu.uuid)
            remembered = (fleet.hardware, [Alike(example, tuple(gpus)) for example, gpus in members.values()])
            self._groups = remembered  # the web page's thread looks at other fleets
        return remembered[1]

    def of(self, gpu: FleetGpu) -> tuple[int, ...]:
        """A number for each kind of device that the GPU has; equal numbers mean equivalent devices."""
        remembered = self._classified.get(gpu.gpu.uuid)
        if remembered is None or remembered[0] is not gpu.gpu or remembered[1:3] != (gpu.shares, gpu.shared):
            remembered = self._classified[gpu.gpu.uuid] = (gpu.gpu, gpu.shares, gpu.shared, self._classify(gpu))
        return remembered[3]

    def _classify(self, gpu: FleetGpu) -> tuple[int, ...]:
        if self._by_facts is None:
            return tuple(self._number(gpu, example) for example in examples_of(gpu))
        link = gpu.gpu.nvlink
        links = None if link is None else (link.generation, link.links, link.bandwidth)
        facts = (COMMON_FACTS(gpu.gpu), links, gpu.state.geometry, gpu.shares, gpu.shared)
        if facts not in self._by_facts:
            self._by_facts[facts] = tuple(self._number(gpu, example) for example in examples_of(gpu))
        return self._by_facts[facts]

    def _number(self, gpu: FleetGpu, example: Device) -> int:
        """The attributes of all devices of a kind follow from the GPU's geometry and capacity and from one device."""
        size = (gpu.state.geometry, gpu.gpu.memory_bytes, gpu.gpu.multiprocessors, example.shared)
        key = (example.kind, *size, facts_of(example, self.names))
        return self._numbers.setdefault(key, next(self._next_number))


UNIQUE = frozenset({"uuid", "parentUUID"})
"""Attributes that are unique to each GPU."""

COMMON_FACTS = attrgetter(
    *(field.name for field in fields(Gpu) if field.name not in {"uuid", "index", "minor", "nvlink", "profiles"})
)
"""The facts about a GPU that other GPUs may share and by which devices can differ, except its links."""


def representatives(gpu: FleetGpu, kind: DeviceKind, *, each_placement: bool) -> Iterator[list[Device]]:
    """For each profile of that kind the devices that represent all of them: one, or one for every placement."""
    if kind is DeviceKind.FULL:
        yield [full_device(gpu.gpu, gpu.number)]
    elif kind is DeviceKind.SHARE:
        if gpu.shares:
            yield [share_device(gpu.gpu, gpu.number, 0, gpu.shares)]
    elif kind is DeviceKind.SHARED:
        if gpu.shared is not None:
            yield [shared_device(gpu.gpu, gpu.number, gpu.shared)]
    else:
        for profile in (profile for profile in gpu.gpu.profiles if partition_kind(profile.name).type is kind):
            if placements := profile.placements if each_placement else profile.placements[:1]:
                yield [partition_device(gpu.gpu, gpu.number, profile, placement) for placement in placements]


def examples_of(gpu: FleetGpu) -> Iterator[Device]:
    """One device of each kind that the GPU has."""
    for kind in DeviceKind:
        yield from next(representatives(gpu, kind, each_placement=False), ())


def facts_of(device: Device, names: Names) -> tuple[Value, ...]:
    """The values of some attributes; None for what the device does not have."""
    facts = FACT_OF[device.kind]
    if names is None:
        return tuple(of(device) for of in facts.values())
    return tuple(facts[name](device) if name in facts else None for name in names)
