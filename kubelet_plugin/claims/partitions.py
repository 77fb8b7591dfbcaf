"""MIG partitions of GPUs, and their MIG mode.

Every method except ``switch_mig_mode`` can be repeated. The caller of a method that changes a GPU holds the GPU's lock;
without it, what a method returns may be outdated at once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

from pynvml import NVML_ERROR_IN_USE, NVML_ERROR_INSUFFICIENT_RESOURCES

from driver.errors import HardwareError
from driver.hardware.device_nodes import CONTROL_NODES, DeviceNode
from driver.hardware.host import Host
from driver.model.device import Device
from driver.model.gpu import Gpu, MigMode, Partition, Placement, Profile
from driver.model.gpu_settings import ComputeMode
from driver.model.offer import DeviceKind
from driver.model.shared_memory import SharingStrategy
from kubelet_plugin.changes import GpuChange, HardwareOutcomes
from kubelet_plugin.checkpoint.records import DeviceRecord
from kubelet_plugin.inventory.inventory import Inventory
from kubelet_plugin.step_names import NodeStep, StepRunner

log = logging.getLogger(__name__)


class Partitions:
    """Creates and removes MIG partitions, and switches MIG mode.

    ``publishes_existing``: partitions that Tessera did not create are published, so a partition without a record may be
    one of them.
    """

    def __init__(
        self,
        host: Host,
        inventory: Inventory,
        outcomes: HardwareOutcomes,
        steps: StepRunner,
        *,
        publishes_existing: bool,
    ) -> None:
        self.host, self._inventory, self._outcomes, self._step = host, inventory, outcomes, steps
        self.publishes_existing = publishes_existing

    def check_free(self, device: Device, uid: str) -> bool | None:
        """Refuse a device if a partition that Tessera did not create is in its place.

        For a partition this is one of the same profile at the same placement (if another one overlaps it, NVML refuses
        the cut), for a full GPU or a share any partition of the GPU. Call it before the intent is written: a partition
        at the placement afterwards is the claim's own. Returns whether the GPU is in MIG mode; None: nothing was read,
        because other claims than ``uid`` share the partition.
        """
        gpu = device.gpu
        if device.kind is DeviceKind.SHARED_PARTITION and self._inventory.others_with(uid, device.name):
            return None
        if device.profile is None or device.placement is None:
            mig_enabled = self.host.mig_enabled(gpu)
            foreign: Sequence[Partition] = tuple(self.host.all_instances(gpu)) if mig_enabled else ()
        else:
            mig_enabled, foreign = self.host.find_if_mig_enabled(gpu, device.profile, device.placement)
        if foreign:
            raise occupied(device, foreign[0])
        return mig_enabled

    def make(self, device: Device, entry: DeviceRecord, mig_enabled: bool | None = None) -> Partition | None:
        """Make ``device`` usable and return its partition, or None for a full GPU or a share.

        ``mig_enabled``: the MIG mode that ``check_free`` read, which also says that no partition is at the placement;
        None: both are read. If ``entry`` is preexisting, nothing is created: its partition must exist.
        """
        gpu = device.gpu
        if device.profile is None or device.placement is None:
            self._set_mig_mode(gpu, enabled=False, now=mig_enabled)
            if device.kind in (DeviceKind.SHARE, DeviceKind.SHARED):
                self._check_shareable(device)
            return None
        if entry.preexisting:
            partition = self.find(device)
            if partition is None or not partition.complete:
                raise HardwareError(
                    f"{device}: the partition, which Tessera published but did not create, is gone; create it again "
                    "(nvidia-smi mig -cgi, -cci) or delete the pod"
                )
            return partition
        self._set_mig_mode(gpu, enabled=True, now=mig_enabled)
        if device.kind is DeviceKind.SHARED_PARTITION:
            instances = self.host.find_instances(gpu, device.profile, device.placement)
            partition = replace(instances[0], compute_instance_id=None, uuid=None) if instances else None
        else:
            partition = self.find(device) if mig_enabled is None else None
        return self._completed(device, partition or self._cut(device, device.profile, device.placement))

    def verify(self, device: Device, entry: DeviceRecord) -> Partition | None:
        """Check what was made for a prepared claim, and make again what was lost.

        A full GPU or a share has no partition: its MIG mode is read, and switched off again, only if the last scan
        found it on.
        """
        recorded = entry.partition
        if recorded is not None:
            if recorded.complete and self.host.is_current(device.gpu, recorded):
                return recorded
        elif device.profile is None and not device.gpu.mig_mode.in_force:
            if device.kind in (DeviceKind.SHARE, DeviceKind.SHARED):
                self._check_shareable(device)
            return None
        return self.make(device, entry)

    def find(self, device: Device, uuid: str | None = None) -> Partition | None:
        """The partition at the placement of ``device``; None also for a device that is no partition.

        Of a shared one the compute instance with this ``uuid``.
        """
        if device.profile is None or device.placement is None:
            return None
        instances = self.host.find_instances(device.gpu, device.profile, device.placement)
        if device.kind is DeviceKind.SHARED_PARTITION:
            return next((instance for instance in instances if uuid is not None and instance.uuid == uuid), None)
        return next(iter(instances), None)

    def nodes(self, gpu: Gpu, partition: Partition | None) -> Sequence[DeviceNode]:
        """The device nodes that a container needs to use ``partition``, or the GPU as a whole."""
        nodes = self.host.nodes
        return nodes.of_gpu(gpu) if partition is None else nodes.of_partition(gpu, partition)

    def monitor_device_nodes(self, uuid: str) -> Sequence[DeviceNode]:
        """The device nodes that a container needs to monitor a GPU and the partitions that it has now.

        Empty while the GPU does not answer or is reserved for another driver; only the nodes of the GPU itself if its
        partitions can't be listed: the claim gets what there is.
        """
        gpu, inventory = self._inventory.gpu(uuid), self._inventory
        reason = "it is not on this node" if gpu is None else inventory.fault(gpu) or inventory.reserved_reason("", gpu)
        if gpu is None or reason is not None:
            log.warning("a monitor starts without a GPU", extra={"gpu": uuid, "error": reason})
            return ()
        try:
            complete = [partition for partition in self.host.partitions(gpu) if partition.complete]
            return self.host.nodes.of_monitored(gpu, complete)
        except HardwareError as error:
            log.warning("a monitor starts without a GPU's partitions", extra={"gpu": uuid, "error": str(error)})
            return self.host.nodes.of_gpu(gpu)

    def remove(self, gpu: Gpu, record: DeviceRecord, kept: Collection[DeviceRecord] = ()) -> None:
        """Remove the partition at the record's placement, complete or not; a missing one is no error.

        ``kept``: what other claims have of a shared partition: it stays, without compute instances that nobody has.
        """
        uuids = {other.uuid for other in kept}
        instances = [instance for instance in self._instances_of(gpu, record) if instance.uuid not in uuids]
        for partition in instances:
            try:
                if partition.compute_instance_id is not None:
                    with self._step(NodeStep.DESTROY_COMPUTE_INSTANCE, gpu=gpu.uuid, device=record.device):
                        self.host.destroy_compute_instance(gpu, partition)
                if not kept and partition is instances[-1]:
                    with self._step(NodeStep.DESTROY_GPU_INSTANCE, gpu=gpu.uuid, device=record.device):
                        self.host.destroy_gpu_instance(gpu, partition)
            except HardwareError as error:
                raise self._with_lsof_hint(gpu, partition, error) from error
            log.info("removed partition", extra={"gpu": gpu.uuid, "device": record.device, "uuid": partition.uuid})

    def _instances_of(self, gpu: Gpu, record: DeviceRecord) -> Sequence[Partition]:
        if record.profile is None or record.profile_id is None or record.placement is None:
            return ()
        # Names vary with the driver's version; a record may be older than the driver.
        profile = gpu.profile_named(record.profile) or gpu.profile_with_id(record.profile_id)
        if profile is None:
            # NVML may have omitted the profile just once, during discovery: that does not mean the partition is gone.
            raise HardwareError(
                f"{gpu.uuid}: NVML knows no profile {record.profile} (id {record.profile_id}) at present; "
                f"{record.device} is removed once it does"
            )
        return self.host.find_instances(gpu, profile, record.placement)

    def switch_mig_mode(self, gpu: Gpu) -> None:
        """Switch the MIG mode of a GPU without partitions to the other one."""
        enabled = self.host.mig_enabled(gpu)
        self._set_mig_mode(gpu, enabled=not enabled, now=enabled)

    def _set_mig_mode(self, gpu: Gpu, *, enabled: bool, now: bool | None) -> None:
        """``now``: the current mode; None: it has to be read."""
        if not gpu.mig_capable:
            return
        if (self.host.mig_enabled(gpu) if now is None else now) != enabled:
            if not gpu.toggles_freely:
                raise HardwareError(
                    f"{gpu.uuid}: MIG mode is {'off' if enabled else 'on'}, and this {gpu.architecture} GPU needs a "
                    "reset while nothing uses it to switch; --mig-gpus says which GPUs are meant for MIG"
                )
            try:
                with self._step(NodeStep.SET_MIG_MODE, gpu=gpu.uuid, mode="on" if enabled else "off"):
                    self.host.set_mig_mode(gpu, enabled=enabled)
            except HardwareError as error:
                explained = self._with_lsof_hint(gpu, None, error)
                self._outcomes.change_failed(gpu, GpuChange.SWITCH, explained)
                raise explained from error
            self._outcomes.change_succeeded(gpu, GpuChange.SWITCH)
            log.info("switched MIG mode", extra={"gpu": gpu.uuid, "mode": "on" if enabled else "off"})
        elif gpu.mig_mode.in_force == enabled:
            return
        self._inventory.set_mig_mode(gpu, MigMode.ENABLED if enabled else MigMode.DISABLED)

    def _with_lsof_hint(self, gpu: Gpu, partition: Partition | None, error: HardwareError) -> HardwareError:
        """``error``, with the command that finds the process if one is in the way."""
        if error.code != NVML_ERROR_IN_USE:
            return error
        try:
            paths = [node.path for node in self.nodes(gpu, partition) if node.path not in CONTROL_NODES]
        except HardwareError:
            paths = [f"/dev/nvidia{gpu.minor}"]
        return HardwareError(f"{error}; on the node: lsof {' '.join(paths)}", error.code)

    def _check_shareable(self, device: Device) -> None:
        if device.shared is not None and device.shared.strategy is SharingStrategy.MPS:
            return  # MpsShares sets the mode
        mode = self.host.compute_mode(device.gpu)
        if mode is not ComputeMode.DEFAULT:
            raise HardwareError(
                f"{device}: the compute mode of {device.gpu.uuid} is {mode.name}, which keeps several processes from "
                f"using it: set it back (nvidia-smi -i {device.gpu.uuid} -c DEFAULT) or offer no shares of this GPU"
            )

    def _cut(self, device: Device, profile: Profile, placement: Placement) -> Partition:
        """Create the GPU instance."""
        gpu = device.gpu
        try:
            with self._step(NodeStep.CREATE_GPU_INSTANCE, gpu=gpu.uuid, device=device.name):
                partition = self.host.create_gpu_instance(gpu, profile, placement)
        except HardwareError as error:
            raise self._explained(device, error) from error
        if partition.placement != placement:
            self.host.destroy_gpu_instance(gpu, partition)
            wrong = HardwareError(
                f"{device}: NVML cut memory slices {partition.placement}, not {placement}; the partition was removed"
            )
            self._outcomes.change_failed(gpu, GpuChange.CUT, wrong)
            raise wrong
        return partition

    def _completed(self, device: Device, partition: Partition) -> Partition:
        """Create the compute instance if it is missing."""
        if partition.compute_instance_id is not None and partition.uuid is not None:
            return partition
        gpu = device.gpu
        try:
            with self._step(NodeStep.CREATE_COMPUTE_INSTANCE, gpu=gpu.uuid, device=device.name):
                complete = self.host.create_compute_instance(gpu, partition)
        except HardwareError as error:
            if device.kind is DeviceKind.SHARED_PARTITION and error.code == NVML_ERROR_INSUFFICIENT_RESOURCES:
                cause = "compute instances that no claim has take its place; those that are not in use are removed"
                raise HardwareError(f"{device}: {error}; {cause}", error.code) from error
            self._outcomes.change_failed(gpu, GpuChange.CUT, error)
            raise
        self._outcomes.change_succeeded(gpu, GpuChange.CUT)
        log.info("cut partition", extra={"gpu": gpu.uuid, "device": device.name, "uuid": complete.uuid})
        return complete

    def _explained(self, device: Device, error: HardwareError) -> HardwareError:
        """The error to report: it names a partition that overlaps ``device``, which NVML's own error does not do.

        Without such a partition the cut counts as a failure of the hardware, unless resources are insufficient while
        the GPU has other partitions: they may use up a resource that only some can have, such as media extensions.
        """
        try:
            partitions = self.host.partitions(device.gpu)
            overlapping = [partition for partition in partitions if partition.placement.mask & device.mask]
        except HardwareError:
            partitions, overlapping = (), []
        if overlapping:
            return occupied(device, overlapping[0])
        if not (partitions and error.code == NVML_ERROR_INSUFFICIENT_RESOURCES):
            self._outcomes.change_failed(device.gpu, GpuChange.CUT, error)
        return error


def occupied(device: Device, partition: Partition) -> HardwareError:
    """The error for a device whose memory slices are used by a partition that Tessera did not create."""
    names = {profile.id: profile.name for profile in device.gpu.profiles}
    return HardwareError(
        f"{device}: memory slices {partition.placement} of {device.gpu.uuid} are taken by GPU instance "
        f"{partition.gpu_instance_id} ({names.get(partition.profile_id, 'unknown profile')}), which no claim of "
        "Tessera's holds; remove it (nvidia-smi mig -dci, -dgi), offer it as it is (--existing-partitions publish), or "
        "leave this GPU out (--exclude-gpus)"
    )
