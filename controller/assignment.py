"""Whether devices that stand in the slices would meet a wish, by the scheduler's rules (pure).

``controller.search`` asks what GPUs could give, this what is there to be taken; so it looks at few devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from controller.fenced import PoolDevice
from controller.fleet import FleetGpu
from controller.search import ValueOf
from controller.wishes import Wish
from driver.model.device import Device
from driver.placement import GpuState, spot_of

STEPS = 300
"""Devices tried for one wish on one node; after that the answer is that they would not do."""


class Standing(NamedTuple):
    """A published device that nobody holds."""

    entry: FleetGpu
    device: Device
    name: PoolDevice


@dataclass
class Assignment:
    """The search for devices among ``standing``, all of one node, that meet ``wish`` side by side.

    A request for all devices of a node is never met: how many that are isn't known from those that stand.
    """

    wish: Wish
    standing: Sequence[Standing]
    value_of: ValueOf
    steps: int = STEPS
    _chosen: list[tuple[int, Standing]] = field(default_factory=list)

    def found(self) -> tuple[Standing, ...]:
        """The devices, in the order of the requests; none if there are no such."""
        if any(ask.count is None for ask in self.wish.asks):
            return ()
        slots = [index for index, ask in enumerate(self.wish.asks) for _ in range(ask.count or 0)]
        met = self._fill(slots, {})
        return tuple(each for _, each in self._chosen) if met else ()

    def _fill(self, slots: Sequence[int], states: dict[str, GpuState]) -> bool:
        """Whether ``slots``, each the position of a request, can be filled beside what is chosen."""
        if not slots:
            return True
        for each, state in self._candidates(slots[0], states):
            self.steps -= 1
            if self.steps < 0:
                return False
            self._chosen.append((slots[0], each))
            if self._fill(slots[1:], {**states, each.entry.gpu.uuid: state.take(spot_of(each.device))}):
                return True
            self._chosen.pop()
        return False

    def _candidates(self, index: int, states: dict[str, GpuState]) -> Iterator[tuple[Standing, GpuState]]:
        selector = self.wish.asks[index].selector
        for each in self.standing:
            spot, state = spot_of(each.device), states.get(each.entry.gpu.uuid, each.entry.state)
            if (
                selector.on(each.entry).has(spot.key, spot.at)
                and state.admits(spot)
                and self._within_rules(index, each)
            ):
                yield each, state

    def _within_rules(self, index: int, new: Standing) -> bool:
        for rule in self.wish.rules:
            if index in rule.asks:
                value = self._value(new, rule.attribute)
                others = {self._value(each, rule.attribute) for at, each in self._chosen if at in rule.asks}
                if value is None or (value in others if rule.distinct else others - {value}):
                    return False
        return True

    def _value(self, each: Standing, attribute: str) -> object:
        spot = spot_of(each.device)
        return self.value_of(each.entry, spot.key, spot.at, attribute)
