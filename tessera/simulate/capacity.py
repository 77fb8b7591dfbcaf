"""What claims take of devices: all of them or a share, and how much of their capacity (pure; KEP-5075)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil

from driver.kube.slice_types import AmountRange, DeviceCapacity, RequestPolicy
from driver.kube.types import Result
from tessera.simulate.allocatable_devices import (
    AllocationError,
    DeviceId,
    FailureKind,
    Number,
    Quantities,
    number,
    written,
)

INT64 = (1 << 63) - 1
NO_POLICY = RequestPolicy()


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
                    total[name] = total.get(name, 0) + number(amount)
        return held


def consumed(requested: Quantities, capacities: Mapping[str, DeviceCapacity]) -> Quantities:
    """What a request takes of each capacity of a device. Raises AllocationError."""
    amounts = {name: _consumed(requested.get(name), capacity) for name, capacity in capacities.items()}
    for name, amount in amounts.items():
        if amount < 0:
            message = f"capacity {name} would be {written(amount)}, which is negative"
            raise AllocationError(FailureKind.CAPACITY, message)
    return amounts


def has_room(requested: Quantities, capacities: Mapping[str, DeviceCapacity], *used: Quantities) -> bool:
    """Whether a device with ``capacities``, of which ``used`` is taken, has room for a request and accepts its amounts.

    Raises AllocationError.
    """
    if not capacities:
        return not requested
    if not requested.keys() <= capacities.keys():
        return False
    taken = consumed(requested, capacities)
    return all(
        _accepted(taken[name], capacity.request_policy)
        and taken[name] + sum(part.get(name, 0) for part in used) <= number(capacity.value)
        for name, capacity in capacities.items()
    )


def _consumed(requested: Number | None, capacity: DeviceCapacity) -> Number:
    policy = capacity.request_policy or NO_POLICY
    if requested is None:
        return number(capacity.value if policy.default is None else policy.default)
    if policy.valid_range is not None:
        return _rounded_up(requested, policy.valid_range)
    return min((choice for choice in map(number, policy.valid_values) if choice >= requested), default=requested)


def _rounded_up(requested: Number, bounds: AmountRange) -> Number:
    """The amount rounded up to a step of the range. Kubernetes 1.37 computes with whole numbers, each rounded up."""
    if requested < number(bounds.min):
        return number(bounds.min)
    if bounds.step is None:
        return requested
    first, step = ceil(number(bounds.min)), ceil(number(bounds.step))
    rounded = first + step * -(-(ceil(requested) - first) // step)
    if requested > INT64 or rounded > INT64:
        message = f"the request for {written(requested)} is too large to be rounded up"
        raise AllocationError(FailureKind.CAPACITY, message)
    return rounded


def _accepted(amount: Number, policy: RequestPolicy | None) -> bool:
    """Whether the policy of a capacity allows that a claim takes ``amount``."""
    if policy is None or (policy.default is not None and amount == number(policy.default)):
        return True
    bounds = policy.valid_range
    if bounds is None:
        return not policy.valid_values or amount in map(number, policy.valid_values)
    if bounds.max is not None and amount > number(bounds.max):
        return False
    return bounds.step is None or (ceil(amount) - ceil(number(bounds.min))) % ceil(number(bounds.step)) == 0
