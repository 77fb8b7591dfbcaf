"""Recovery after a restart: bring memory in line with checkpoint, hardware and CDI directory.

Partitions that Tessera did not create are never destroyed: a partition without a record is left alone (see ``scan``).
A CDI spec without a record belongs to a claim that may be running: it stays, and its devices are held, until the API
server has said whether the claim exists (see ``orphans``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from driver.errors import RecoverableError
from driver.model.device import Device
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.claims.cleanup import ClaimCleanup
from kubelet_plugin.claims.context import PluginContext
from kubelet_plugin.claims.steps import Step

log = logging.getLogger(__name__)


def recover(context: PluginContext, cleanup: ClaimCleanup, records: Iterable[ClaimRecord]) -> None:
    """Hold the devices of ``records`` and undo unfinished claims. Call it once, before the first prepare.

    A claim that was being prepared is undone: the kubelet got no answer and will ask again. So is one that was being
    unprepared. Never raises for a single claim: what fails is logged and stays held.
    """
    records = list(records)
    for record in records:
        context.inventory.hold(record.reference, _devices(context, record))
    with context.step(Step.TIDY_CDI_SPECS):
        _tidy_specs(context)
    for record in records:
        with context.step(Step.RECOVER_RECORD, claim=str(record)):
            if record.needs_release:
                _finish_release(cleanup, record)


def hold_recorded(context: PluginContext) -> None:
    """Hold the devices of records and of CDI specs without a record, also on GPUs that have come back since the start.

    May run concurrently with prepare and unprepare: a record that changes meanwhile is read again.
    """
    for uid in context.checkpoint.unrecorded:
        context.hold_unrecorded(uid)
        if uid not in context.checkpoint.unrecorded and context.checkpoint.get(uid) is None:
            context.inventory.release(uid)
    for uid in [record.uid for record in context.checkpoint.records()]:
        while (record := context.checkpoint.get(uid)) is not None:
            context.inventory.hold(record.reference, _devices(context, record))
            if context.checkpoint.get(uid) is record:
                break
        else:
            context.inventory.release(uid)


def _devices(context: PluginContext, record: ClaimRecord) -> list[Device]:
    found = []
    for entry in record.devices:
        device = context.recorded_device(entry)
        if device is not None:
            found.append(device)
            continue
        log.error(
            "a held device is not on this node any more",
            extra={"claim": str(record), "device": entry.device, "gpu": entry.gpu_uuid},
        )
    return found


def _finish_release(cleanup: ClaimCleanup, record: ClaimRecord) -> None:
    try:
        cleanup.finish_release(record.uid)
    except RecoverableError as error:
        log.error("can't release what is left of a claim yet", extra={"claim": str(record), "error": str(error)})


def _tidy_specs(context: PluginContext) -> None:
    """Remove half-written specs; hold the devices of specs whose claim has no readable record."""
    try:
        context.cdi.remove_half_written()
        for uid in context.cdi.claim_uids():
            if context.checkpoint.get(uid) is None:
                context.checkpoint.note_missing(uid)
    except RecoverableError as error:
        log.error("can't tidy the CDI directory", extra={"error": str(error)})
    for uid in context.checkpoint.unrecorded:
        context.hold_unrecorded(uid)
