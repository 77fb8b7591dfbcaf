"""MIG partitions and time-slice intervals of GPUs. Every method can be repeated; the caller holds the GPU's lock."""

from __future__ import annotations

import logging

from driver.errors import HardwareError
from driver.hardware.node_gpus import Host
from driver.hardware.nvml_errors import ABSENT
from driver.model.device import Device
from driver.model.gpu import Gpu, MigMode, Partition, Placement, Profile
from driver.model.offer import DeviceKind
from driver.model.time_slice_and_compute_mode import ComputeMode, TimeSlice, in_force
from kubelet_plugin.checkpoint.records import Checkpoint, ClaimRecord, DeviceRecord
from kubelet_plugin.claims.steps import Step, Steps
from kubelet_plugin.inventory.inventory import Inventory

log = logging.getLogger(__name__)


class Partitions:
    """Creates and removes MIG partitions, and switches MIG mode."""

    def __init__(self, host: Host, inventory: Inventory, steps: Steps) -> None:
        self._host = host
        self._inventory = inventory
        self._step = steps

    def check_free(self, device: Device) -> None:
        """Refuse a device whose memory slices are used by a partition that Tessera did not create.

        Call it before the intent is written: a partition at the placement afterwards is the claim's own.
        """
        if device.profile is None or device.placement is None:
            foreign = self._host.partitions(device.gpu)
        else:
            found = self._host.find_partition(device.gpu, device.profile, device.placement)
            foreign = [found] if found else []
        if foreign:
            raise occupied(device, foreign[0])

    def ensure(self, device: Device, *, create: bool) -> Partition | None:
        """Make ``device`` usable and return its partition, or None for a full GPU or a share.

        Without ``create`` a missing partition is an error: it was not created by Tessera.
        """
        partition = None
        if device.profile is None or device.placement is None:
            self._set_mig_mode(device.gpu, enabled=False)
            if device.kind is DeviceKind.SHARE:
                self._check_shareable(device)
        elif create:
            self._set_mig_mode(device.gpu, enabled=True)
            partition = self._ensure_partition(device, device.profile, device.placement)
        else:
            partition = self._existing(device, device.profile, device.placement)
        if device.gpu.mig_capable:
            mode = MigMode.DISABLED if partition is None else MigMode.ENABLED
            self._inventory.set_mig_mode(device.gpu, mode)
        return partition

    def remove(self, gpu: Gpu, record: DeviceRecord) -> None:
        """Remove the partition at the record's placement, complete or not; a missing one is no error."""
        partition = self._recorded(gpu, record)
        if partition is None:
            return
        if partition.compute_instance_id is not None:
            with self._step(Step.DESTROY_COMPUTE_INSTANCE, gpu=gpu.uuid, device=record.device):
                self._host.destroy_compute_instance(gpu, partition)
        with self._step(Step.DESTROY_GPU_INSTANCE, gpu=gpu.uuid, device=record.device):
            self._host.destroy_gpu_instance(gpu, partition)
        log.info("removed partition", extra={"gpu": gpu.uuid, "device": record.device, "uuid": partition.uuid})

    def _recorded(self, gpu: Gpu, record: DeviceRecord) -> Partition | None:
        if record.profile is None or record.profile_id is None or record.placement is None:
            return None
        # Names vary with the driver's version; a record may be older than the driver.
        profile = gpu.profile_named(record.profile) or gpu.profile_with_id(record.profile_id)
        if profile is None:
            # NVML may have omitted the profile just once, during discovery: that does not mean the partition is gone.
            raise HardwareError(
                f"{gpu.uuid}: NVML knows no profile {record.profile} (id {record.profile_id}) at present; "
                f"{record.device} is removed once it does"
            )
        return self._host.find_partition(gpu, profile, record.placement)

    def _set_mig_mode(self, gpu: Gpu, *, enabled: bool) -> None:
        if not gpu.mig_capable or self._host.mig_enabled(gpu) == enabled:
            return
        if not gpu.toggles_freely:
            raise HardwareError(
                f"{gpu.uuid}: MIG mode is {'off' if enabled else 'on'}, and this {gpu.architecture} GPU needs a reset "
                "while nothing uses it to switch; --mig-gpus says which GPUs are meant for MIG"
            )
        with self._step(Step.SET_MIG_MODE, gpu=gpu.uuid, mode="on" if enabled else "off"):
            self._host.set_mig_mode(gpu, enabled=enabled)
        log.info("switched MIG mode", extra={"gpu": gpu.uuid, "mode": "on" if enabled else "off"})

    def _check_shareable(self, device: Device) -> None:
        mode = self._host.compute_mode(device.gpu)
        if mode is not ComputeMode.DEFAULT:
            raise HardwareError(
                f"{device}: the compute mode of {device.gpu.uuid} is {mode.name}, which keeps several processes from "
                f"using it: set it back (nvidia-smi -i {device.gpu.uuid} -c DEFAULT) or offer no shares of this GPU"
            )

    def _existing(self, device: Device, profile: Profile, placement: Placement) -> Partition:
        partition = self._host.find_partition(device.gpu, profile, placement)
        if partition is None or not partition.complete:
            raise HardwareError(
                f"{device}: the partition, which Tessera published but did not create, is gone; create it again "
                f"(nvidia-smi mig -cgi, -cci) or delete the pod"
            )
        return partition

    def _ensure_partition(self, device: Device, profile: Profile, placement: Placement) -> Partition:
        gpu = device.gpu
        partition = self._host.find_partition(gpu, profile, placement)
        if partition is None:
            try:
                with self._step(Step.CREATE_GPU_INSTANCE, gpu=gpu.uuid, device=device.name):
                    partition = self._host.create_gpu_instance(gpu, profile, placement)
            except HardwareError as error:
                raise self._explained(device, error) from error
            if partition.placement != placement:
                self._host.destroy_gpu_instance(gpu, partition)
                raise HardwareError(
                    f"{device}: NVML cut memory slices {partition.placement} instead of {placement}; "
                    "it was removed again"
                )
        if not partition.complete:
            with self._step(Step.CREATE_COMPUTE_INSTANCE, gpu=gpu.uuid, device=device.name):
                partition = self._host.create_compute_instance(gpu, partition)
            log.info("cut partition", extra={"gpu": gpu.uuid, "device": device.name, "uuid": partition.uuid})
        return partition

    def _explained(self, device: Device, error: HardwareError) -> HardwareError:
        """Name the partition in the way: NVML's own error does not."""
        try:
            overlapping = [p for p in self._host.partitions(device.gpu) if p.placement.mask & device.mask]
        except HardwareError:
            return error
        return occupied(device, overlapping[0]) if overlapping else error


def occupied(device: Device, partition: Partition) -> HardwareError:
    """The error for a device whose memory slices are used by a partition that Tessera did not create."""
    names = {profile.id: profile.name for profile in device.gpu.profiles}
    return HardwareError(
        f"{device}: memory slices {partition.placement} of {device.gpu.uuid} are taken by GPU instance "
        f"{partition.gpu_instance_id} ({names.get(partition.profile_id, 'unknown profile')}), which no claim of "
        "Tessera's holds; remove it (nvidia-smi mig -dci, -dgi) or leave this GPU out"
    )


class TimeSlices:
    """The time-slice interval of GPUs: the one that the claims on a GPU request, otherwise the default.

    The interval follows from the checkpoint alone, so a kill at any instruction leaves nothing to remember: the record
    of a claim is written before its interval is set, and removed after the interval is restored.
    """

    def __init__(self, host: Host, checkpoint: Checkpoint, steps: Steps) -> None:
        self._host = host
        self._checkpoint = checkpoint
        self._step = steps

    def apply(self, gpu: Gpu, record: ClaimRecord) -> None:
        """Set the interval that ``gpu`` has with ``record``. Raises HardwareError."""
        if (requested := record.requested_time_slice(gpu.uuid)) is not TimeSlice.DEFAULT:
            others = self._requested_by_others(gpu, record)
            # Set again at a repeat: a reset of the GPU may have undone it.
            if in_force([others, requested]) is not others or record.phase == "prepared":
                self._set(Step.SET_TIME_SLICE, gpu, in_force([others, requested]))

    def release(self, gpu: Gpu, record: ClaimRecord) -> None:
        """Set the interval that ``gpu`` has without ``record``. Raises HardwareError."""
        if (requested := record.requested_time_slice(gpu.uuid)) is not TimeSlice.DEFAULT:
            others = self._requested_by_others(gpu, record)
            if in_force([others, requested]) is not others:
                self._restore(gpu, others)

    def _restore(self, gpu: Gpu, interval: TimeSlice) -> None:
        try:
            self._set(Step.RESTORE_TIME_SLICE, gpu, interval)
        except HardwareError as error:
            # A GPU that accepts no interval never had one: it must not block the release of a refused claim.
            if error.code not in ABSENT:
                raise

    def _set(self, step: Step, gpu: Gpu, interval: TimeSlice) -> None:
        with self._step(step, gpu=gpu.uuid, interval=interval.value):
            self._host.set_time_slice(gpu, interval)
        log.info("set the time-slice interval", extra={"gpu": gpu.uuid, "interval": interval.value})

    def _requested_by_others(self, gpu: Gpu, record: ClaimRecord) -> TimeSlice:
        others = (other for other in self._checkpoint.records() if other.uid != record.uid)
        return in_force(other.requested_time_slice(gpu.uuid) for other in others if other.phase == "prepared")
