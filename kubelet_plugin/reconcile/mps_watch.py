"""The MPS daemons of shared GPUs, looked at with each scan of the node's GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from driver.errors import RecoverableError
from driver.model.gpu import Gpu
from driver.model.gpu_events_and_conditions import ConditionType
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.claims.mps_shares import MpsShares, parts_by_mps
from kubelet_plugin.status.events import EventReason, PluginEvents

log = logging.getLogger(__name__)


class MpsWatch:
    """Starts MPS daemons again that have ended, and ends those that no claim uses.

    The shared device of a GPU whose daemon or server has ended has a condition, until another one runs and has the
    limits of all claims that used the one before.
    """

    def __init__(
        self,
        stores: ClaimStores,
        mps: MpsShares,
        events: PluginEvents,
        report_condition: Callable[[str, ConditionType, str | None], None],
    ) -> None:
        self._stores, self._mps, self._events, self._report_condition = stores, mps, events, report_condition
        self._unserved: dict[str, set[str]] = {}
        """By the name of the shared device, the UIDs of claims whose daemon has ended and that have no other yet."""

    def handle_scan(self, answering: Sequence[Gpu]) -> None:
        """Check the daemons of the GPUs that answer. What fails is tried again with the next scan."""
        for gpu in answering:
            name = f"gpu-{self._stores.inventory.number(gpu)}-shared"
            if name not in self._unserved and not self._mps.may_have_daemon(gpu):
                continue
            try:
                with self._stores.locks.hold([gpu.uuid], f"checking the MPS daemon of {gpu.uuid}"):
                    self._check(gpu, name)
            except RecoverableError as error:
                log.warning("can't check the MPS daemon of a GPU", extra={"gpu": gpu.uuid, "error": str(error)})

    def _check(self, gpu: Gpu, name: str) -> None:
        """The caller holds the lock of ``gpu``. Raises HardwareError, MpsError."""
        records = {record.uid: record for record in self._stores.prepared() if parts_by_mps(gpu, record)}
        if not records:
            self._all_served(name)
        if lost := self._mps.check(gpu):
            self._report_lost(gpu, name, lost, list(records.values()))
        waiting = self._unserved.get(name, set())
        for uid in waiting & records.keys():
            self._mps.apply(gpu, records[uid])
            waiting.remove(uid)
        self._all_served(name)

    def _report_lost(self, gpu: Gpu, name: str, lost: str, records: Sequence[ClaimRecord]) -> None:
        self._unserved[name] = {record.uid for record in records}
        reason = f"{lost}, and no other one has the limits of all claims yet"
        self._report_condition(name, ConditionType.MPS_LOST, reason)
        message = (
            f"{lost} on GPU {gpu.uuid}: programs that used the GPU through it have failed; containers that "
            "start from now on get another one: delete the pod if its programs do not start again"
        )
        for record in records:
            self._events.claim(record.reference, EventReason.MPS_SERVER_LOST, message)

    def _all_served(self, name: str) -> None:
        if self._unserved.pop(name, None) is not None:
            self._report_condition(name, ConditionType.MPS_LOST, None)
