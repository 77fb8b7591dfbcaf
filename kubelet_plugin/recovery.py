"""Finding one's feet after a restart: checkpoint, hardware and CDI directory brought together again.

What Tessera did not create is never destroyed: a partition without a record is left alone (see ``scan``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from driver.errors import RecoverableError
from driver.model.device import Device
from kubelet_plugin.held import device_of
from kubelet_plugin.node import Node
from kubelet_plugin.preparation import Preparer
from kubelet_plugin.records import ClaimRecord
from kubelet_plugin.steps import Step, Steps

log = logging.getLogger(__name__)


def recover(node: Node, preparer: Preparer, records: Iterable[ClaimRecord], steps: Steps) -> None:
    """Bring memory in line with ``records``. To be called once, before any claim is taken.

    A claim that was being prepared is undone: the kubelet never got its answer and will ask again. So is one that was
    being unprepared. A claim that was prepared is held. Never raises for a single claim: what fails is logged and
    stays held.
    """
    records = list(records)
    for record in records:
        node.inventory.hold(record.holder, _devices(node, record))
    for record in records:
        with steps(Step.RECOVER_RECORD, claim=str(record)):
            if record.owed:
                _undo(preparer, record)
    with steps(Step.TIDY_CDI_SPECS):
        _tidy_specs(node, preparer)


def hold_recorded(node: Node) -> None:
    """Hold what the records say, also on GPUs that were away at start and have come back.

    May run beside prepare and unprepare: a record that changes meanwhile is looked at again.
    """
    for uid in [record.uid for record in node.checkpoint.records()]:
        while (record := node.checkpoint.get(uid)) is not None:
            node.inventory.hold(record.holder, _devices(node, record))
            if node.checkpoint.get(uid) is record:
                break
        else:
            node.inventory.release(uid)


def _devices(node: Node, record: ClaimRecord) -> list[Device]:
    found = []
    for entry in record.devices:
        device = device_of(node.inventory, entry)
        if device is not None:
            found.append(device)
            continue
        log.error(
            "a held device is not on this node any more",
            extra={"claim": str(record), "device": entry.device, "gpu": entry.gpu_uuid},
        )
    return found


def _undo(preparer: Preparer, record: ClaimRecord) -> None:
    try:
        preparer.upkeep.finish_release(record.uid)
    except RecoverableError as error:
        log.error("can't release what is left of a claim yet", extra={"claim": str(record), "error": str(error)})


def _tidy_specs(node: Node, preparer: Preparer) -> None:
    """Remove specs that no record explains, and half of one."""
    try:
        node.cdi.remove_half_written()
        for uid in node.cdi.claim_uids():
            preparer.upkeep.remove_stray_spec(uid)
    except RecoverableError as error:
        log.error("can't tidy the CDI directory", extra={"error": str(error)})
