"""Finding one's feet after a restart: checkpoint, hardware and CDI directory brought together again.

What Tessera did not create is never destroyed: a partition without a record is left alone and its memory
slices are not offered.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from driver.errors import RecoverableError
from driver.model.device import Device
from driver.model.gpu import Gpu, Partition, Placement
from kubelet_plugin.checkpoint import ClaimRecord
from kubelet_plugin.preparation import Node, Preparer

log = logging.getLogger(__name__)


def recover(node: Node, preparer: Preparer, records: Iterable[ClaimRecord]) -> None:
    """Bring memory in line with ``records``. To be called once, before any claim is taken.

    A claim that was being prepared is undone: the kubelet never got its answer and will ask again. A
    claim that was prepared is held. Never raises for a single claim: what fails is logged and stays held.
    """
    records = list(records)
    for record in records:
        node.inventory.hold(record.holder, _devices(node, record))
    for record in records:
        if record.phase == "preparing":
            _undo(preparer, record)
        else:
            _check(node, record)
    _remove_stray_specs(node)
    for gpu in node.inventory.gpus:
        _note_foreign(node, gpu)


def _devices(node: Node, record: ClaimRecord) -> list[Device]:
    found = []
    for entry in record.devices:
        device = node.inventory.device(entry.device)
        if device is not None and device.gpu.uuid == entry.gpu_uuid:
            found.append(device)
            continue
        log.error(
            "a held device is not on this node any more",
            extra={"claim": f"{record.namespace}/{record.name}", "device": entry.device, "gpu": entry.gpu_uuid},
        )
    return found


def _undo(preparer: Preparer, record: ClaimRecord) -> None:
    claim = f"{record.namespace}/{record.name}"
    try:
        preparer.undo(record)
        log.warning("undid a claim whose preparation was cut short", extra={"claim": claim})
    except RecoverableError as error:
        log.error("can't undo a claim whose preparation was cut short", extra={"claim": claim, "error": str(error)})


def _check(node: Node, record: ClaimRecord) -> None:
    """Say so where a prepared claim lost something; its next prepare makes it again."""
    claim = f"{record.namespace}/{record.name}"
    if record.uid not in node.cdi.claim_uids():
        log.warning("the CDI spec of a prepared claim is gone", extra={"claim": claim})
    for entry in record.devices:
        gpu = next((gpu for gpu in node.inventory.gpus if gpu.uuid == entry.gpu_uuid), None)
        if gpu is not None and entry.partition is not None and entry.partition not in _partitions(node, gpu):
            log.warning("the partition of a prepared claim is gone", extra={"claim": claim, "device": entry.device})


def _remove_stray_specs(node: Node) -> None:
    try:
        for uid in node.cdi.claim_uids():
            if node.checkpoint.get(uid) is None:
                node.cdi.remove(uid)
                log.warning("removed a CDI spec that no claim has", extra={"uid": uid})
    except RecoverableError as error:
        log.error("can't tidy the CDI directory", extra={"error": str(error)})


def _note_foreign(node: Node, gpu: Gpu) -> None:
    ours = {
        Placement(entry.start, entry.size)
        for record in node.checkpoint.records()
        for entry in record.devices
        if entry.gpu_uuid == gpu.uuid and entry.start is not None and entry.size is not None
    }
    foreign = [partition for partition in _partitions(node, gpu) if partition.placement not in ours]
    mask = 0
    for partition in foreign:
        mask |= partition.placement.mask
        log.warning(
            "left alone a partition that Tessera did not make",
            extra={"gpu": gpu.uuid, "uuid": partition.uuid, "slices": str(partition.placement)},
        )
    node.inventory.note_foreign(gpu, mask)


def _partitions(node: Node, gpu: Gpu) -> Iterable[Partition]:
    try:
        return node.host.partitions(gpu)
    except RecoverableError as error:
        log.error("can't list the partitions of a GPU", extra={"gpu": gpu.uuid, "error": str(error)})
        return ()
