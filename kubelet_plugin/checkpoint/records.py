"""What the checkpoint records of each claim: its devices, their partitions, its phase."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from driver.model.device import Device, share_index
from driver.model.gpu import Partition, Placement
from driver.model.gpu_settings import TimeSlice, time_slice_in_force
from driver.model.offer import DeviceKind
from driver.model.shared_memory import MemoryLimit, SharingStrategy
from kubelet_plugin.inventory.inventory import ClaimReference

log = logging.getLogger(__name__)

VERSION = 1
"""Version of the file format. A file of a newer version is set aside. Fields may be added without a new version: older
programs skip unknown fields."""

SHARED_VERSION = 2
"""Version of the record of a claim that shares a GPU by memory: a program that does not know such devices must not take
over a node, or it would offer their GPUs."""


class DeviceRecord(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One allocated device and, once it was created, its partition."""

    requests: tuple[str, ...]
    pool: str
    device: str
    number: int
    gpu_uuid: str = msgspec.field(name="gpuUUID")
    kind: DeviceKind
    profile: str | None = None
    profile_id: int | None = None
    start: int | None = None
    size: int | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    uuid: str | None = None
    preexisting: bool = msgspec.field(default=False, name="existing")
    """A partition that Tessera did not create: it is never removed."""

    shares: int = 1
    """Number of equal shares of the GPU, of which this is one; later changes of settings do not affect it."""

    time_slice: TimeSlice | None = None
    """The interval that the claim requests."""

    share_id: str = msgspec.field(default="", name="shareID")
    """Of a shared device: the scheduler's name of the part that this is; a claim may have several."""

    gib: int = 0
    """Of a shared device: the GiB that the claim has."""

    strategy: SharingStrategy | None = None
    """Of a shared device: how claims share the compute of its GPU."""

    limit: MemoryLimit = MemoryLimit.NONE
    """Of a shared device: what holds the claim to its memory."""

    @property
    def key(self) -> str:
        """Its name among the devices of all claims of the node."""
        return device_key(self.device, self.share_id)

    @property
    def placement(self) -> Placement | None:
        """None for a full GPU and for a share."""
        return None if self.start is None or self.size is None else Placement(self.start, self.size)

    @property
    def partition(self) -> Partition | None:
        """The partition as far as it is known to exist; None before it is created and for other devices."""
        place = self.placement
        if self.profile_id is None or place is None or self.gpu_instance_id is None:
            return None
        return Partition(
            self.gpu_uuid, self.profile_id, place, self.gpu_instance_id, self.compute_instance_id, self.uuid
        )

    def with_partition(self, partition: Partition | None) -> DeviceRecord:
        """This record with the ids of the partition; a full GPU or a share (None) has none."""
        if partition is None or (partition.uuid is not None and partition.uuid == self.uuid):
            return self
        return msgspec.structs.replace(
            self,
            gpu_instance_id=partition.gpu_instance_id,
            compute_instance_id=partition.compute_instance_id,
            uuid=partition.uuid,
        )


class MonitorRecord(msgspec.Struct, frozen=True, rename="camel"):
    """One allocated monitor device."""

    requests: tuple[str, ...]
    pool: str
    device: str
    gpu_uuid: str = msgspec.field(name="gpuUUID")

    share_id = ""
    """Nobody consumes anything of it."""

    @property
    def key(self) -> str:
        """As that of a DeviceRecord."""
        return self.device


class Adoption(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What the record of NVIDIA's DRA driver says of a claim that it prepared.

    ``cdi_device_ids``: its answer to the kubelet, by device. ``must_end``: why the claim can not be taken over as it
    is; empty: it can. ``unfinished``: its preparation never succeeded.
    """

    cdi_device_ids: dict[str, tuple[str, ...]] = msgspec.field(name="cdiDeviceIDs")
    must_end: str = ""
    unfinished: bool = False


class ClaimRecord(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One claim's file.

    ``boot`` is the machine's boot id when it was prepared: partitions do not outlive a boot. ``releasing``: unprepare
    was called, and something may be left to release. ``monitors`` are the claim's monitor devices: it holds nothing of
    their GPUs. Earlier versions skip the field. ``adopted``: NVIDIA's DRA driver prepared the claim, so pool, names and
    CDI spec of its devices are not ours (``coexistence.adopted_claims``).
    """

    version: int
    namespace: str
    name: str
    uid: str
    phase: Literal["preparing", "prepared"]
    devices: tuple[DeviceRecord, ...]
    boot: str = ""
    releasing: bool = False
    monitors: tuple[MonitorRecord, ...] = ()
    adopted: Adoption | None = None

    @classmethod
    def of(
        cls,
        reference: ClaimReference,
        phase: Literal["preparing", "prepared"],
        devices: tuple[DeviceRecord, ...],
        boot: str,
        **fields: Any,
    ) -> ClaimRecord:
        """The record of a claim of which only these ``fields`` differ from their defaults."""
        is_shared = any(device.kind is DeviceKind.SHARED for device in devices)
        version = SHARED_VERSION if is_shared else VERSION
        return cls(version, reference.namespace, reference.name, reference.uid, phase, devices, boot, **fields)

    def __str__(self) -> str:
        return str(self.reference)

    @property
    def needs_release(self) -> bool:
        """Whether it has to be undone, unless its claim is being prepared at this moment."""
        return self.releasing or self.phase == "preparing"

    def prepared_in_this_boot(self, boot: str) -> bool:
        """Whether its claim was prepared in the boot with this id: its partitions exist unless they were lost."""
        return self.phase == "prepared" and not self.releasing and self.boot in ("", boot)

    def is_of_earlier_boot(self, boot: str) -> bool:
        """Whether it was written before the boot with this id: none of its partitions exists any more."""
        return bool(self.boot and boot) and self.boot != boot

    @property
    def reference(self) -> ClaimReference:
        return ClaimReference(self.namespace, self.name, self.uid)

    def requested_time_slice(self, gpu_uuid: str) -> TimeSlice:
        return time_slice_in_force(device.time_slice for device in self.devices if device.gpu_uuid == gpu_uuid)

    @property
    def names(self) -> set[str]:
        """The names of all its devices; of a shared one the device's."""
        devices = (device.device for device in self.devices)
        return {*devices, *(monitor.device for monitor in self.monitors)}

    @property
    def pools(self) -> set[str]:
        """The pools of all its devices."""
        return {device.pool for device in self.devices} | {monitor.pool for monitor in self.monitors}

    @property
    def gpu_uuids(self) -> frozenset[str]:
        """The GPUs of which it holds something."""
        return frozenset(device.gpu_uuid for device in self.devices)


def device_record(
    device: Device,
    pool: str,
    requests: tuple[str, ...],
    number: int,
    *,
    preexisting: bool = False,
    time_slice: TimeSlice | None = None,
    share_id: str = "",
) -> DeviceRecord:
    return DeviceRecord(
        requests=requests,
        pool=pool,
        device=device.name,
        number=number,
        gpu_uuid=device.gpu.uuid,
        kind=device.kind,
        profile=device.profile.name if device.profile else None,
        profile_id=device.profile.id if device.profile else None,
        start=device.placement.start if device.placement else None,
        size=device.placement.size if device.placement else None,
        preexisting=preexisting,
        shares=device.shares,
        time_slice=time_slice,
        share_id=share_id,
        gib=device.spot.at if device.shared else 0,
        strategy=device.shared.strategy if device.shared else None,
        limit=device.shared.limit if device.shared else MemoryLimit.NONE,
    )


def device_key(device: str, share_id: str) -> str:
    """The name of an allocated device among those of all claims: a shared one has a part for each ``share_id``."""
    return f"{device}-{share_id}" if share_id else device


def held_strategies(records: Iterable[ClaimRecord]) -> dict[str, SharingStrategy]:
    """How claims share the compute of the GPUs of which they have memory, by UUID."""
    devices = (device for record in records for device in record.devices)
    return {device.gpu_uuid: device.strategy for device in devices if device.strategy is not None}


def held_shares(records: Iterable[ClaimRecord]) -> dict[str, dict[int, int]]:
    """The shares in ``records``, by GPU: the number of each and of how many it is one."""
    found: dict[str, dict[int, int]] = {}
    for device in (device for record in records for device in record.devices):
        if device.kind is DeviceKind.SHARE:
            found.setdefault(device.gpu_uuid, {})[share_index(device.device)] = device.shares
    return found


def slices_of_instance(records: Iterable[ClaimRecord], gpu_uuid: str, gpu_instance_id: int) -> int | None:
    """Bit mask of the memory slices of a GPU instance that a claim has; None where no claim has it."""
    for record in records:
        for device in record.devices:
            if (device.gpu_uuid, device.gpu_instance_id) == (gpu_uuid, gpu_instance_id) and device.placement:
                return device.placement.mask
    return None
