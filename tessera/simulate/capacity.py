"""What claims take of devices: all of them or a share, and how much of their capacity (pure; KEP-5075)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil

from driver.kube.types import Result
from tessera.simulate.failures import AllocationError, Failure
from tessera.simulate.slices import Capacity, DeviceId, Number, Quantities, number, written

INT64 = (1 << 63) - 1


@dataclass
class Allocated:
    """``devices`` are taken whole; of the ``shared`` ones ``capacity`` is what their claims take together."""

    devices: set[DeviceId] = field(default_factory=set)
    shared: set[DeviceId] = field(default_factory=set)
    capacity: dict[DeviceId, Quantities] = field(default_factory=dict)

    @classmethod
    def of(cls, results: Iterable[Result]) -> Allocated:
        """What these results of allocations take; administrative access takes nothing."""
        found = cls()
        for each in results:
            device = DeviceId(each.driver, each.pool, each.device)
            if each.admin_access:
                continue
            if each.share_id is None:
                found.devices.add(device)
                continue
            found.shared.add(device)
            if each.consumed_capacity is not None:
                total = found.capacity.setdefault(device, {})
                for name, amount in each.consumed_capacity.items():
                    total[name] = total.get(name, number(0)) + number(amount)
        return found

    def takes_counters(self, device: DeviceId) -> bool:
        """Whether the counters that ``device`` consumes are taken."""
        return device in self.devices or device in self.shared


def consumed(requested: Quantities, capacities: Mapping[str, Capacity]) -> Quantities:
    """What a request takes of each capacity of a device. Raises AllocationError."""
    found = {name: _consumed(requested.get(name), each) for name, each in capacities.items()}
    for name, amount in found.items():
        if amount < 0:
            raise AllocationError(Failure.CAPACITY, f"capacity {name} would be {written(amount)}, which is negative")
    return found


def has_room(requested: Quantities, capacities: Mapping[str, Capacity], *used: Quantities) -> bool:
    """Whether a device with ``capacities``, of which ``used`` is taken, has room for a request and accepts its amounts.

    Raises AllocationError.
    """
    if not capacities:
        return not requested
    if not requested.keys() <= capacities.keys():
        return False
    taken = consumed(requested, capacities)
    return all(
        _accepted(taken[name], each) and taken[name] + sum(part.get(name, 0) for part in used) <= each.value
        for name, each in capacities.items()
    )


def _consumed(requested: Number | None, capacity: Capacity) -> Number:
    if requested is None:
        return capacity.default if capacity.default is not None else capacity.value
    if capacity.lowest is not None:
        return _rounded_up(requested, capacity, capacity.lowest)
    return min((each for each in capacity.choices if each >= requested), default=requested)


def _rounded_up(requested: Number, capacity: Capacity, lowest: Number) -> Number:
    """The amount rounded up to a step of the range. Kubernetes 1.37 computes with whole numbers, each rounded up."""
    if requested < lowest:
        return lowest
    if capacity.step is None:
        return requested
    first, step = ceil(lowest), ceil(capacity.step)
    found = first + step * -(-(ceil(requested) - first) // step)
    if requested > INT64 or found > INT64:
        raise AllocationError(Failure.CAPACITY, f"the request for {written(requested)} is too large to be rounded up")
    return found


def _accepted(amount: Number, capacity: Capacity) -> bool:
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
