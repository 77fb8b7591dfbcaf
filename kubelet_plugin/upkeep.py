"""What is done about a claim though nobody asks for it: finishing its release, tidying what it left behind."""

from __future__ import annotations

import logging

from kubelet_plugin.locks import KeyedLocks, claim_key
from kubelet_plugin.node import Node
from kubelet_plugin.records import VERSION, ClaimRecord, device_record
from kubelet_plugin.releasing import Releaser

log = logging.getLogger(__name__)


class Upkeep:
    """Thread-safe, beside prepare and unprepare, with the same ``locks``. Methods raise RecoverableError."""

    def __init__(self, node: Node, releaser: Releaser, locks: KeyedLocks) -> None:
        self._node = node
        self._releaser = releaser
        self._locks = locks

    def finish_release(self, uid: str) -> bool:
        """Undo a claim that is owed; False where it isn't, or not any more."""
        with self._locks.hold([claim_key(uid)], f"releasing claim {uid}"):
            record = self._node.checkpoint.get(uid)
            if record is None or not record.owed:
                return False
            with self._locks.hold(record.gpu_uuids, f"releasing claim {record}"):
                self._releaser.undo(record)
        log.warning("released what was left of a claim", extra={"claim": str(record)})
        return True

    def remove_stray_spec(self, uid: str) -> bool:
        """Remove a CDI spec that no record explains; False where one does by now."""
        with self._locks.hold([claim_key(uid)], f"tidying the CDI spec of claim {uid}"):
            # Of a claim whose record was set aside the spec is what is left: its containers may start again.
            if self._node.checkpoint.get(uid) is not None or uid in self._node.checkpoint.aside:
                return False
            self._node.cdi.remove(uid)
        log.warning("removed a CDI spec that no claim has", extra={"claimUID": uid})
        return True

    def rebuild_from_spec(self, uid: str) -> bool:
        """Give a claim whose record was set aside, and which is gone, a record of what its CDI spec names, to be
        released; False where no spec tells what it had."""
        inventory, checkpoint, pool = self._node.inventory, self._node.checkpoint, self._node.pool.name
        with self._locks.hold([claim_key(uid)], f"rebuilding the record of claim {uid}"):
            devices = [found for name in self._node.cdi.devices(uid) if (found := inventory.device(name)) is not None]
            entries = tuple(
                device_record(each, pool, (), inventory.number(each.gpu), existing=inventory.existing(each))
                for each in devices
            )
            if entries and checkpoint.get(uid) is None:
                record = ClaimRecord(VERSION, "", uid, uid, "prepared", entries, self._node.boot, releasing=True)
                inventory.hold(record.holder, devices)
                checkpoint.put(record)
            return bool(entries)
