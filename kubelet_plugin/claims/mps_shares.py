"""What claims need of a GPU that they share by MPS: its daemon, their limits, the compute mode.

Every method can be repeated; the caller holds the GPU's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from driver.errors import MpsError
from driver.model.device import Device
from driver.model.gpu import Gpu
from driver.model.gpu_settings import ComputeMode
from driver.model.shared_memory import GIB, SharingStrategy
from kubelet_plugin.checkpoint.records import Checkpoint, ClaimRecord, DeviceRecord
from kubelet_plugin.claims.compute_modes import ComputeModes
from kubelet_plugin.mps.client import MpsAccess, MpsClient, MpsShare, lost_gpus, namespace_of, protocol_for
from kubelet_plugin.mps.protocol import DaemonState
from kubelet_plugin.step_names import NodeStep, StepRunner

log = logging.getLogger(__name__)


def parts_by_mps(gpu: Gpu, record: ClaimRecord) -> list[DeviceRecord]:
    """The parts of ``gpu`` that a claim has, if claims share it by MPS."""
    return [entry for entry in record.devices if entry.strategy is SharingStrategy.MPS and entry.gpu_uuid == gpu.uuid]


class MpsShares:
    """Limits follow from the records alone, so a kill at any instruction leaves nothing to remember.

    The record of a claim is written before its GPU is changed, and removed after that is undone. A release does not
    wait for an MPS pod: with a pod that has ended its daemons and limits are gone, and ``check`` ends what is left in
    one that answers later.
    """

    def __init__(self, modes: ComputeModes, client: MpsClient, checkpoint: Checkpoint, steps: StepRunner) -> None:
        self._modes, self._client, self._checkpoint, self._step = modes, client, checkpoint, steps
        self._seen: dict[str, DaemonState] = {}
        """By GPU, the daemon and servers that claims have used."""

    def mode_to_restore(self, device: Device) -> ComputeMode | None:
        """The compute mode to be recorded for a claim of ``device``: as before the first one. None: MPS is not used.

        Raises HardwareError: MPS can't share the GPU; MpsError.
        """
        if device.shared is None or device.shared.strategy is not SharingStrategy.MPS:
            return None
        modes = (part.compute_mode for r in self._checkpoint.records() for part in parts_by_mps(device.gpu, r))
        recorded = next((mode for mode in modes if mode is not None), None)
        if recorded is not None:
            return recorded
        present = self._modes.to_restore(device.gpu)
        # Set by us, perhaps, for a claim whose record was lost.
        kept = self._kept_mode(device.gpu) if present is ComputeMode.EXCLUSIVE_PROCESS else None
        return present if kept is None else kept

    def apply(self, gpu: Gpu, record: ClaimRecord) -> Mapping[str, MpsAccess]:
        """Admit ``record`` to the daemon of ``gpu``; returns what containers get, by key of the device.

        Raises HardwareError, MpsError.
        """
        parts = parts_by_mps(gpu, record)
        if not parts:
            return {}
        with self._step(NodeStep.SET_MEMORY_LIMIT, gpu=gpu.uuid, claim=record):
            self._modes.hold(gpu)
        with self._step(NodeStep.SET_MEMORY_LIMIT, gpu=gpu.uuid, claim=record):
            protocol, mode = protocol_for(gpu.driver_version), parts[0].compute_mode
            daemon = self._client.ensure_daemon(gpu.uuid, protocol, mode)
            self._seen.setdefault(gpu.uuid, daemon)
        with self._step(NodeStep.SET_MEMORY_LIMIT, gpu=gpu.uuid, claim=record):
            shares = [*self._others(gpu, record), *map(_share, parts)]
            admit = self._client.admit
            return {part.key: admit(daemon, namespace_of(part.share_id), _share(part), shares) for part in parts}

    def release(self, gpu: Gpu, record: ClaimRecord) -> None:
        """Take back what ``apply`` did; end the daemon and restore the compute mode after the last claim.

        Raises HardwareError.
        """
        parts = parts_by_mps(gpu, record)
        if not parts:
            return
        others, mode = self._others(gpu, record), parts[0].compute_mode
        try:
            with self._step(NodeStep.LIFT_MEMORY_LIMIT, gpu=gpu.uuid, claim=record):
                for part in parts:
                    self._client.dismiss(DaemonState(gpu.uuid), namespace_of(part.share_id), others)
                if not others and not self._checkpoint.unrecorded:
                    self._end(gpu, restore_kept_mode=mode is None)
        except MpsError as error:
            log.warning("can't take a claim from MPS yet", extra={"claim": str(record), "error": str(error)})
        if not others and mode is not None:
            with self._step(NodeStep.LIFT_MEMORY_LIMIT, gpu=gpu.uuid, claim=record):
                self._modes.restore(gpu, mode)

    def daemon(self, gpu: Gpu) -> DaemonState:
        """What runs for ``gpu``. Raises MpsError."""
        return next(iter(self._client.daemons(gpu.uuid)), DaemonState(gpu.uuid))

    def may_have_daemon(self, gpu: Gpu) -> bool:
        """Whether ``check`` has anything to do, without a request."""
        return self._client.has_directory(gpu.uuid) or bool(self._users(gpu))

    def check(self, gpu: Gpu) -> str:
        """End what no claim uses, and return why the programs of claims have failed since the last call; "": they have
        not. Then ``apply`` is necessary for each claim. Raises HardwareError, MpsError.
        """
        # Claims without a record may use the daemon and their namespaces.
        users, all_known = self._users(gpu), not self._checkpoint.unrecorded
        if not users and not all_known:
            return ""
        if not users:
            self._end(gpu, restore_kept_mode=True)
            return ""
        now = self.daemon(gpu)
        lost = lost_gpus([self._seen.get(gpu.uuid, now)], [now]).get(gpu.uuid, "")
        self._seen[gpu.uuid] = now
        admitted = {namespace_of(part.share_id) for record in users for part in parts_by_mps(gpu, record)}
        for namespace in set(now.namespaces) - admitted if all_known else ():
            self._client.dismiss(now, namespace, [])
        return lost if lost or now.pid else "no MPS control daemon runs"

    def _kept_mode(self, gpu: Gpu) -> ComputeMode | None:
        """The compute mode that is kept with the daemon of ``gpu``. Raises MpsError."""
        kept = [state.mode for state in self._client.daemons(gpu.uuid)] if self._client.has_directory(gpu.uuid) else []
        return next((mode for mode in ComputeMode if mode in kept), None)

    def _end(self, gpu: Gpu, *, restore_kept_mode: bool) -> None:
        """End the daemon of ``gpu``. ``restore_kept_mode``: no record has the compute mode of the GPU.

        Raises HardwareError, MpsError.
        """
        kept = self._kept_mode(gpu) if restore_kept_mode else None
        if kept is not None:
            self._modes.restore(gpu, kept)
        self._client.end_daemon(gpu.uuid)
        self._seen.pop(gpu.uuid, None)

    def _others(self, gpu: Gpu, record: ClaimRecord) -> Sequence[MpsShare]:
        """What other claims have of ``gpu``."""
        others: Iterable[ClaimRecord] = (other for other in self._users(gpu) if other.uid != record.uid)
        return [_share(part) for other in others if not other.releasing for part in parts_by_mps(gpu, other)]

    def _users(self, gpu: Gpu) -> list[ClaimRecord]:
        """The claims that share ``gpu`` by MPS, also those that are being released."""
        return [record for record in self._checkpoint.records() if parts_by_mps(gpu, record)]


def _share(part: DeviceRecord) -> MpsShare:
    return MpsShare(part.gib * GIB, part.threads)
