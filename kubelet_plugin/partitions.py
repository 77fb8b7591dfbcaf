"""Making a device ready on the hardware and taking it away again. Every method can be repeated.

Callers hold the lock of the GPU.
"""

from __future__ import annotations

import logging

from driver.errors import HardwareError
from driver.hardware.host import ComputeMode, Host
from driver.model.device import Device, DeviceKind
from driver.model.gpu import Gpu, Partition, Placement, Profile
from kubelet_plugin.records import DeviceRecord
from kubelet_plugin.steps import Step, Steps

log = logging.getLogger(__name__)


class Partitions:
    """The hardware side of preparing."""

    def __init__(self, host: Host, steps: Steps) -> None:
        self._host = host
        self._step = steps

    def check_free(self, device: Device) -> None:
        """Refuse a device whose memory slices are in use by a partition Tessera knows nothing of.

        To be called before the intent is written: whatever is at the placement afterwards is ours.
        """
        if device.profile is None or device.placement is None:
            foreign = self._host.partitions(device.gpu)
        else:
            found = self._host.find_partition(device.gpu, device.profile, device.placement)
            foreign = [found] if found else []
        if foreign:
            raise occupied(device, foreign[0])

    def ensure(self, device: Device, *, cut: bool = True) -> Partition | None:
        """Make ``device`` usable and return its partition, or None for a full GPU or a share.

        Without ``cut`` a partition that is not there is an error: somebody else made it.
        """
        if device.profile is None or device.placement is None:
            self._mig_mode(device.gpu, enabled=False)
            if device.kind is DeviceKind.SHARE:
                self._check_shareable(device)
            return None
        if not cut:
            return self._standing(device, device.profile, device.placement)
        self._mig_mode(device.gpu, enabled=True)
        return self._ensure_partition(device, device.profile, device.placement)

    def remove(self, gpu: Gpu, record: DeviceRecord) -> None:
        """Remove what stands at the record's placement, complete or not; nothing there is no error."""
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
            # NVML may have kept it back just once, while it was asked what the GPU is: what stands there is not gone.
            raise HardwareError(
                f"{gpu.uuid}: NVML knows no profile {record.profile} (id {record.profile_id}) at present; "
                f"{record.device} is removed once it does"
            )
        return self._host.find_partition(gpu, profile, record.placement)

    def _mig_mode(self, gpu: Gpu, *, enabled: bool) -> None:
        if not gpu.mig_capable or self._host.mig_enabled(gpu) == enabled:
            return
        if not gpu.toggles_freely:
            raise HardwareError(
                f"{gpu.uuid}: MIG mode is {'off' if enabled else 'on'}, and this {gpu.architecture} GPU needs a reset "
                "with nobody using it to switch; --mig-gpus says which GPUs are meant for MIG"
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

    def _standing(self, device: Device, profile: Profile, placement: Placement) -> Partition:
        partition = self._host.find_partition(device.gpu, profile, placement)
        if partition is None or not partition.complete:
            raise HardwareError(
                f"{device}: the partition that was given out as somebody else made it is gone; make it again "
                f"(nvidia-smi mig -cgi, -cci) or delete the pod"
            )
        return partition

    def _ensure_partition(self, device: Device, profile: Profile, placement: Placement) -> Partition:
        gpu = device.gpu
        partition = self._host.find_partition(gpu, profile, placement)
        if partition is None:
            partition = self._cut(device, profile, placement)
        if not partition.complete:
            with self._step(Step.CREATE_COMPUTE_INSTANCE, gpu=gpu.uuid, device=device.name):
                partition = self._host.create_compute_instance(gpu, partition)
            log.info("cut partition", extra={"gpu": gpu.uuid, "device": device.name, "uuid": partition.uuid})
        return partition

    def _cut(self, device: Device, profile: Profile, placement: Placement) -> Partition:
        try:
            with self._step(Step.CREATE_GPU_INSTANCE, gpu=device.gpu.uuid, device=device.name):
                partition = self._host.create_gpu_instance(device.gpu, profile, placement)
        except HardwareError as error:
            raise self._explained(device, error) from error
        if partition.placement != placement:
            self._host.destroy_gpu_instance(device.gpu, partition)
            raise HardwareError(
                f"{device}: NVML cut memory slices {partition.placement} instead of {placement}; it was removed again"
            )
        return partition

    def _explained(self, device: Device, error: HardwareError) -> HardwareError:
        """Name the partition in the way, which NVML's own error does not."""
        try:
            overlapping = [p for p in self._host.partitions(device.gpu) if p.placement.mask & device.mask]
        except HardwareError:
            return error
        return occupied(device, overlapping[0]) if overlapping else error


def occupied(device: Device, partition: Partition) -> HardwareError:
    """The error for a device whose slices are taken by something Tessera did not make."""
    names = {profile.id: profile.name for profile in device.gpu.profiles}
    return HardwareError(
        f"{device}: memory slices {partition.placement} of {device.gpu.uuid} are taken by GPU instance "
        f"{partition.gpu_instance_id} ({names.get(partition.profile_id, 'unknown profile')}), which no claim of "
        "Tessera's holds; remove it (nvidia-smi mig -dci, -dgi) or leave this GPU out"
    )
