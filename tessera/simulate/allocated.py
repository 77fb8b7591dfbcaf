"""What allocated claims have taken: devices, shares of devices, and their capacity (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from driver.kube.types import Result
from tessera.simulate.slices import DeviceId, Quantities, number


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
