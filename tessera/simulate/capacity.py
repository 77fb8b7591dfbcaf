"""Consumable capacity: how much of a device a request takes, and whether so much is left (pure; KEP-5075)."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil

from tessera.simulate.failures import AllocationError, Failure
from tessera.simulate.slices import Capacity, Quantities

INT64 = (1 << 63) - 1
MILLI = Fraction(1, 1000)


def consumed(requested: Quantities, capacities: Mapping[str, Capacity]) -> Quantities:
    """What a request takes of each capacity of a device. Raises AllocationError."""
    found = {name: _consumed(requested.get(name), each) for name, each in capacities.items()}
    for name, amount in found.items():
        if amount < 0:
            raise AllocationError(Failure.CAPACITY, f"capacity {name} would be {float(amount):g}, which is negative")
    return found


def has_room(requested: Quantities, capacities: Mapping[str, Capacity], *used: Quantities) -> bool:
    """Whether a device with ``capacities``, of which ``used`` is taken, has room for a request and accepts its amounts.

    Raises AllocationError.
    """
    if not requested.keys() <= capacities.keys():
        return False
    taken = consumed(requested, capacities)
    return all(
        _accepted(taken[name], each) and taken[name] + sum(part.get(name, 0) for part in used) <= each.value
        for name, each in capacities.items()
    )


def _consumed(requested: Fraction | None, capacity: Capacity) -> Fraction:
    if requested is None:
        return capacity.default if capacity.default is not None else capacity.value
    if capacity.lowest is not None:
        return _rounded_up(requested, capacity, capacity.lowest)
    return min((each for each in capacity.choices if each >= requested), default=requested)


def _rounded_up(requested: Fraction, capacity: Capacity, lowest: Fraction) -> Fraction:
    if requested < lowest:
        return lowest
    if capacity.step is None:
        return requested
    unit = _unit(capacity)
    if (unit is MILLI and not _is_milli(requested)) or requested > INT64 * unit:
        raise AllocationError(
            Failure.CAPACITY, f"the request for {float(requested):g} can't be rounded up to a step of the range"
        )
    first, step = ceil(lowest / unit), ceil(capacity.step / unit)
    found = first + step * -(-(ceil(requested / unit) - first) // step)
    if found > INT64:
        raise AllocationError(Failure.CAPACITY, f"the request for {float(requested):g} is too large after rounding")
    return found * unit


def _accepted(amount: Fraction, capacity: Capacity) -> bool:
    """Whether the policy of a capacity allows that a claim takes ``amount``."""
    if not capacity.has_policy or amount == capacity.default:
        return True
    if capacity.lowest is None:
        return not capacity.choices or amount in capacity.choices
    if capacity.highest is not None and amount > capacity.highest:
        return False
    if capacity.step is None:
        return True
    unit = _unit(capacity)
    if unit is MILLI and not _is_milli(amount):
        return False
    return (ceil(amount / unit) - ceil(capacity.lowest / unit)) % ceil(capacity.step / unit) == 0


def _unit(capacity: Capacity) -> Fraction:
    """The unit of a range's arithmetic: thousandths where all of its bounds are such, else whole numbers."""
    bounds = [each for each in (capacity.lowest, capacity.highest, capacity.step) if each is not None]
    return MILLI if all(map(_is_milli, bounds)) else Fraction(1)


def _is_milli(amount: Fraction) -> bool:
    thousandths = amount / MILLI
    return thousandths.denominator == 1 and abs(thousandths) <= INT64
