"""Finding one's feet after a restart: checkpoint, hardware and CDI directory brought together again.

What Tessera did not create is never destroyed: a partition without a record is left alone (see ``scan``).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import replace

from driver.errors import RecoverableError
from driver.model.device import Device, devices_of
from driver.model.gpu import Gpu, Partition
from kubelet_plugin.checkpoint import ClaimRecord, DeviceRecord
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
    _check(node, [record for record in records if record.phase == "prepared"])


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
        device = _device(node, entry)
        if device is not None:
            found.append(device)
            continue
        log.error(
            "a held device is not on this node any more",
            extra={"claim": f"{record.namespace}/{record.name}", "device": entry.device, "gpu": entry.gpu_uuid},
        )
    return found


def _device(node: Node, entry: DeviceRecord) -> Device | None:
    """The device of a record. Where its profile has another name now, it is held under the name it was given out by."""
    known = node.inventory.device(entry.device)
    if known is not None and known.gpu.uuid == entry.gpu_uuid:
        return known
    gpu = node.inventory.gpu(entry.gpu_uuid)
    for device in devices_of(gpu, entry.number) if gpu is not None else ():
        if device.profile is not None and device.profile.id == entry.profile_id and device.placement == entry.placement:
            return replace(device, name=entry.device)
    return None


def _undo(preparer: Preparer, record: ClaimRecord) -> None:
    claim = f"{record.namespace}/{record.name}"
    try:
        preparer.undo(record)
        log.warning("undid a claim whose preparation was cut short", extra={"claim": claim})
    except RecoverableError as error:
        log.error("can't undo a claim whose preparation was cut short", extra={"claim": claim, "error": str(error)})


def _check(node: Node, prepared: Iterable[ClaimRecord]) -> None:
    """Say so where a prepared claim lost something; its next prepare makes it again."""
    specs = _tidy_specs(node)
    standing = {gpu.uuid: _partitions(node, gpu) for gpu in node.inventory.gpus}
    for record in prepared:
        claim = f"{record.namespace}/{record.name}"
        if record.uid not in specs:
            log.warning("the CDI spec of a prepared claim is gone", extra={"claim": claim})
        for entry in record.devices:
            if entry.partition is not None and entry.partition not in standing.get(entry.gpu_uuid, [entry.partition]):
                log.warning("the partition of a prepared claim is gone", extra={"claim": claim, "device": entry.device})


def _tidy_specs(node: Node) -> list[str]:
    """The claims that have a CDI spec; one that no record explains is removed."""
    uids: list[str] = []
    try:
        uids = node.cdi.claim_uids()
        for uid in uids:
            if node.checkpoint.get(uid) is None:
                node.cdi.remove(uid)
                log.warning("removed a CDI spec that no claim has", extra={"uid": uid})
    except RecoverableError as error:
        log.error("can't tidy the CDI directory", extra={"error": str(error)})
    return uids


def _partitions(node: Node, gpu: Gpu) -> Collection[Partition]:
    try:
        return node.host.partitions(gpu)
    except RecoverableError as error:
        log.error("can't list the partitions of a GPU", extra={"gpu": gpu.uuid, "error": str(error)})
        return ()
