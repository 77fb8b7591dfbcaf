"""The last defence against giving memory out twice (force-deleted pods make this real)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from driver.errors import ClaimError, HardwareError
from kubelet_plugin.claims import Allocated, ClaimReference
from kubelet_plugin.inventory import Inventory


def refuse_overlap(reference: ClaimReference, allocated: Sequence[Allocated], inventory: Inventory) -> None:
    """Raises ClaimError where devices overlap each other or what another claim holds, or are a neighbour's,
    HardwareError where a GPU can't be used at present."""
    for item, other in combinations(allocated, 2):
        if item.device.overlaps(other.device):
            raise ClaimError(
                f"claim {reference}: its own devices {item.device} and {other.device} overlap; "
                "the scheduler allocates only devices whose memory slices are disjoint"
            )
    for item in allocated:
        fault = inventory.fault(item.device.gpu)
        if fault is not None:
            raise HardwareError(f"claim {reference}: {item.device} can't be used at present: {fault}")
        owner = inventory.owner(reference.uid, item.device.gpu)
        if owner is not None:
            raise ClaimError(f"claim {reference}: {item.device} is not ours to give: {owner}; delete the pod")
        conflict = inventory.conflict(reference.uid, item.device)
        if conflict is not None:
            holder, held = conflict
            raise ClaimError(
                f"claim {reference}: {item.device} overlaps {held}, which {holder} still holds on this node; "
                "it is prepared once that claim is unprepared"
            )
