"""Devices that the plugin uses like a claim does, without one: for trials of failing GPUs and for the acceptance test.

What is made is held and recorded like the devices of a claim in preparation, and so removed after a kill.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from driver.errors import RecoverableError, StateError
from driver.model.device import Device
from kubelet_plugin.checkpoint.records import ClaimRecord, device_record
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.claims.cleanup import ClaimCleanup
from kubelet_plugin.claims.partitions import Partitions
from kubelet_plugin.inventory.inventory import ClaimReference


class Rehearsals:
    """The caller of each method holds the locks of ``reference`` and of the device's GPU.

    ``partitions`` and ``settings`` make what a block uses. Methods raise RecoverableError.
    """

    def __init__(self, stores: ClaimStores, partitions: Partitions, cleanup: ClaimCleanup) -> None:
        self.stores, self.partitions, self._cleanup = stores, partitions, cleanup
        self.settings = cleanup.settings

    @contextmanager
    def recorded(self, reference: ClaimReference, device: Device, **fields: Any) -> Iterator[ClaimRecord]:
        """Record ``device`` with other ``fields`` of its DeviceRecord for the block, and undo afterwards what the block
        has made of it.

        What can't be undone keeps its record, for ClaimReconciler; until then ``reference`` records nothing else.
        """
        stores = self.stores
        if stores.checkpoint.get(reference.uid) is not None:
            raise StateError(f"what {reference.name} made before could not be removed yet")
        number = stores.inventory.number(device.gpu)
        device_entry = device_record(device, stores.pool.name, (), number, **fields)
        record = ClaimRecord.of(reference, "preparing", (device_entry,), stores.boot)
        stores.inventory.hold(reference, [device])
        try:
            stores.checkpoint.put(record)
            yield record
        except RecoverableError:
            self._cleanup.undo(record)
            raise
        self._cleanup.undo(record)

    def cut_and_remove(self, reference: ClaimReference, device: Device) -> None:
        """Cut the partition ``device``, and remove it again."""
        with self.recorded(reference, device) as record:
            self.partitions.make(device, record.devices[0])
