"""What claims take of devices: all of them or a share, and how much of their capacity (pure; KEP-5075)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil

from driver.kube.types import Result
from tessera.simulate.allocatable_devices import (
    AllocationError,
    CapacityRange,
    DeviceId,
    FailureKind,
    Number,
    Quantities,
    number,
    written,
)

INT64 = (1 << 63) - 1


@dataclass
class HeldDevices:
    """``devices`` are taken whole; of the ``shared`` ones ``capacity`` is what their claims take together."""

    devices: set[DeviceId] = field(default_factory=set)
    shared: set[DeviceId] = field(default_factory=set)
    capacity: dict[DeviceId, Quantities] = field(default_factory=dict)

    @classmethod
    def of(cls, results: Iterable[Result]) -> HeldDevices:
        """What these results of allocations take; administrative access takes nothing."""
        held = cls()
        for result in results:
            device = DeviceId(result.driver, result.pool, result.device)
            if result.admin_access:
                continue
            if result.share_id is None:
                held.devices.add(device)
                continue
            held.shared.add(device)
            if result.consumed_capacity is not None:
                total = held.capacity.setdefault(device, {})
                for name, amount in result.consumed_capacity.items():
                    total[name] = total.get(name, number(0)) + number(amount)
        return held

    def takes_counters(self, device: DeviceId) -> bool:
        """Whether the counters that ``device`` consumes are taken."""
        return device in self.devices or device in self.shared


def consumed(requested: Quantities, capacities: Mapping[str, CapacityRange]) -> Quantities:
    """What a request takes of each capacity of a device. Raises AllocationError."""
    amounts = {name: _consumed(requested.get(name), capacity) for name, capacity in capacities.items()}
    for name, amount in amounts.items():
        if amount < 0:
            raise AllocationError(
                FailureKind.CAPACITY, f"capacity {name} would be {written(amount)}, which is negative"
            )
    return amounts


def has_room(requested: Quantities, capacities: Mapping[str, CapacityRange], *used: Quantities) -> bool:
    """Whether a device with ``capacities``, of which ``used`` is taken, has room for a request and accepts its amounts.

    Raises AllocationError.
    """
    if not capacities:
        return not requested
    if not requested.keys() <= capacities.keys():
        return False
    taken = consumed(requested, capacities)
    return all(
        _accepted(taken[name], capacity) and taken[name] + sum(part.get(name, 0) for part in used) <= capacity.value
        for name, capacity in capacities.items()
    )


def _consumed(requested: Number | None, capacity: CapacityRange) -> Number:
    if requested is None:
        return capacity.default if capacity.default is not None else capacity.value
    if capacity.lowest is not None:
        return _rounded_up(requested, capacity, capacity.lowest)
    return min((choice for choice in capacity.choices if choice >= requested), default=requested)


def _rounded_up(requested: Number, capacity: CapacityRange, lowest: Number) -> Number:
    """The amount rounded up to a step of the range. Kubernetes 1.37 computes with whole numbers, each rounded up."""
    if requested < lowest:
        return lowest
    if capacity.step is None:
        return requested
    first, step = ceil(lowest), ceil(capacity.step)
    rounded = first + step * -(-(ceil(requested) - first) // step)
    if requested > INT64 or rounded > INT64:
        raise AllocationError(
            FailureKind.CAPACITY, f"the request for {written(requested)} is too large to be rounded up"
        )
    return rounded


def _accepted(amount: Number, capacity: CapacityRange) -> bool:
    """Whether the policy of a capacity allows that a claim takes ``amount``."""
    if not capacity.has_policy or amount == capacity.default:
        return True
    if capacity.lowest is None:
        return not capacity.choices or amount in capacity.choices
    if capacity.highest is not None and amount > capacity.highest:
        return False
    if capacity.step is None:
        return True
    return (ceil(amount) - ceil(capacity.lowest)) % ceil(capacity.step) == 0
