"""Constraints of a claim: an attribute that its devices must have in common, or that must differ (pure)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from driver.kube.types import DeviceConstraint
from tessera.simulate.slices import Candidate


class Constraint:
    """One constraint, with the values of the devices that have been added."""

    def __init__(self, written: DeviceConstraint, attribute: str) -> None:
        self._requests, self._attribute = frozenset(written.requests), attribute
        self._distinct = written.match_attribute is None
        self._values: list[tuple[str, Any]] = []

    def applies(self, names: Collection[str]) -> bool:
        """Whether it is for a request that has these names: its own and, for an alternative, the full one."""
        return not self._requests or not self._requests.isdisjoint(names)

    def add(self, device: Candidate) -> bool:
        """Add ``device``; False, and nothing changed, where the constraint does not allow it beside the others."""
        value = device.attribute(self._attribute)
        if value is None or (self._values and not self._allows(value)):
            return False
        self._values.append(value)
        return True

    def remove(self) -> None:
        """Remove the device that was added last."""
        self._values.pop()

    def _allows(self, value: tuple[str, Any]) -> bool:
        return value not in self._values if self._distinct else value == self._values[0]


def constraint_of(written: DeviceConstraint) -> Constraint | None:
    """The constraint; None for one of a kind that the scheduler does not know."""
    attribute = written.match_attribute if written.match_attribute is not None else written.distinct_attribute
    return None if attribute is None else Constraint(written, attribute)
