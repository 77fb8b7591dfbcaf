"""The checkpoint: the record of each claim (its devices, their partitions, its phase), one file per claim on disk.

A record is written before the hardware is changed (phase "preparing") and again when the claim is usable
("prepared"); both writes are durable. It is marked before a release, and removed after the claim's partitions. An
unreadable file is set aside and kept until the claim's record was rebuilt (``reconcile.recovery``). The cost of a write
does not depend on other claims.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import msgspec

from driver.errors import EnvironmentFault, StateError
from driver.model.device import Device
from driver.model.gpu import Partition, Placement
from driver.model.gpu_settings import ComputeMode, TimeSlice, time_slice_in_force
from driver.model.offer import OF_SEVERAL, DeviceKind
from driver.model.shared_memory import MemoryLimit, SharingStrategy
from kubelet_plugin.checkpoint.files import TEMPORARY, remove, write_atomically
from kubelet_plugin.inventory.inventory import ClaimReference

log = logging.getLogger(__name__)

VERSION = 1
"""Version of the file format. A file of a newer version is set aside. Fields may be added without a new version: older
programs skip unknown fields."""

SHARED_VERSION = 2
"""Version of the record of a claim that shares a GPU by memory, or a partition: a program that does not know such
devices must not take over a node, or it would offer their GPUs."""

ASIDE, SETTLED = ".unreadable", ".settled"
"""Suffixes of a file that was set aside, and of one whose claim was rebuilt or released since, or was adopted."""


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
    """Of a shared device: what holds the claim to its memory, as the last scan found it."""

    why_not_limited: str = ""
    """Of a shared device: what has ended the limit that the claim had."""

    threads: int | None = None
    """Of a GPU shared by MPS: the percentage of its threads that the claim requests."""

    compute_mode: ComputeMode | None = None
    """Of a GPU shared by MPS: the mode that it had before its first claim."""

    @property
    def key(self) -> str:
        """Its name among the devices of all claims of the node."""
        return f"{self.device}-{self.share_id}" if self.share_id else self.device

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
    was called, and something may be left to release. ``monitors``: its monitor devices, of whose GPUs it holds nothing.
    ``adopted``: NVIDIA's DRA driver prepared it, so pool, names and CDI spec are not ours (``adopted_claims``).
    ``pods``: UIDs of the pods that use it, if it shares a GPU by memory; ``of_one_pod``: it says that no other does.
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
    pods: tuple[str, ...] = ()
    of_one_pod: bool = False

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
        is_shared = any(device.kind in OF_SEVERAL for device in devices)
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

    def shared_gib(self, gpu_uuid: str) -> int:
        """The GiB that it has of a GPU which claims share by memory; 0: none."""
        return sum(device.gib for device in self.devices if device.gpu_uuid == gpu_uuid)

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


def device_record(device: Device, pool: str, requests: tuple[str, ...], number: int, **fields: Any) -> DeviceRecord:
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
        shares=device.shares,
        gib=device.spot.at if device.shared else 0,
        strategy=device.shared.strategy if device.shared else None,
        limit=device.shared.limit if device.shared else MemoryLimit.NONE,
        **fields,
    )


def device_key(device: str, share_id: str) -> str:
    """The name of an allocated device among those of all claims: a shared one has a part for each ``share_id``."""
    return f"{device}-{share_id}" if share_id else device


def device_of(key: str) -> str:
    """The name of the device of which ``key`` names all or a part."""
    gpu, shared, _ = key.partition("-shared-")
    return f"{gpu}-shared" if shared else key


RECORD = msgspec.json.Decoder(ClaimRecord)
"""Made here, like the decoder of every type that threads share: two that are the first to use a type end the process,
for msgspec shows the second a table that the first has not filled yet (a null pointer; seen with 0.22)."""


def decode_record(data: bytes, path: Path) -> ClaimRecord:
    """Parse one file. Raises StateError naming the file and the field."""
    try:
        record = RECORD.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StateError(f"{path}: not a checkpoint record: {error}") from error
    if record.version not in (VERSION, SHARED_VERSION):
        raise StateError(
            f"{path}: the record of claim {record} has version {record.version}, this program reads versions {VERSION} "
            f"and {SHARED_VERSION}"
        )
    if path.stem != record.uid:
        raise StateError(f"{path}: is about claim {record.uid}, its name says otherwise")
    return record


class Checkpoint:
    """The directory ``claims/`` below the state directory. Methods raise StateError."""

    def __init__(self, state_dir: Path) -> None:
        """Create the directory. Raises EnvironmentFault."""
        self._directory = state_dir / "claims"
        try:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise EnvironmentFault(f"--state-dir {state_dir}: can't be used: {error.strerror}") from error
        self._records: dict[str, ClaimRecord] = {}
        self._aside: set[str] = set()
        self._missing: set[str] = set()

    def load(self) -> list[ClaimRecord]:
        """Read all records. An unreadable one is renamed, and an error is logged."""
        try:
            for path in sorted(self._directory.iterdir()):
                if path.name.endswith(TEMPORARY):
                    remove(path, durable=False)
                elif path.suffix == ".json":
                    try:
                        record = decode_record(path.read_bytes(), path)
                    except (StateError, OSError) as error:
                        self._set_aside(path, error)
                    else:
                        self._records[record.uid] = record
                elif path.suffix == ASIDE:
                    self._aside.add(path.stem)
        except OSError as error:
            raise StateError(f"can't read the checkpoint in {self._directory}: {error.strerror}") from error
        self._aside -= self._records.keys()
        return self.records()

    @property
    def aside(self) -> frozenset[str]:
        """The uids of claims whose record was set aside and was not rebuilt or released since."""
        return frozenset(self._aside)

    @property
    def unrecorded(self) -> frozenset[str]:
        """The uids of claims that may be prepared although their record is unreadable or missing.

        Nothing of them is removed until the API server says that they do not exist.
        """
        return frozenset((self._aside | self._missing) - self._records.keys())

    def is_unrecorded(self, uid: str) -> bool:
        return uid not in self._records and (uid in self._aside or uid in self._missing)

    def note_missing(self, uid: str) -> None:
        """Count a claim as unrecorded, for example because it has a CDI spec and no record."""
        if not self.is_unrecorded(uid):
            log.error("a checkpoint record is missing", extra={"claimUID": uid})
        self._missing.add(uid)

    def settle_unrecorded(self, uid: str) -> None:
        """Count a claim no longer as unrecorded: it has a record again, or was released. A file that was set aside is
        renamed once more."""
        self._missing.discard(uid)
        if uid not in self._aside:
            return
        path = self.path(uid).with_suffix(ASIDE)
        self._rename(path, path.with_suffix(SETTLED))
        self._aside.discard(uid)

    def records(self) -> list[ClaimRecord]:
        """Every record, as last written."""
        return list(self._records.values())

    def get(self, uid: str) -> ClaimRecord | None:
        return self._records.get(uid)

    def put(self, record: ClaimRecord, *, durable: bool = True) -> None:
        """Write the record. It survives a kill of the process; if ``durable``, also a power cut."""
        try:
            write_atomically(f"{self._directory}/{record.uid}.json", msgspec.json.encode(record), durable=durable)
        except StateError:
            # A release that is needed is known in memory at least. It may be on disk all the same: fsync fails late.
            if record.needs_release:
                self._records[record.uid] = record
            raise
        self._records[record.uid] = record

    def remove(self, uid: str) -> None:
        """Remove the record. That of an adopted claim is renamed: the other driver's file names the claim for ever."""
        record = self._records.get(uid)
        if record is None or record.adopted is None:
            remove(self.path(uid), durable=True)
        else:
            self._rename(self.path(uid), self.path(uid).with_suffix(SETTLED))
        self._records.pop(uid, None)

    def was_settled_since(self, uid: str, file: Path) -> bool:
        """Whether the record of this claim was settled after ``file`` was written."""
        try:
            return self.path(uid).with_suffix(SETTLED).stat().st_mtime_ns > file.stat().st_mtime_ns
        except OSError:
            return False

    def path(self, uid: str) -> Path:
        """The file of one claim's record, whether it exists or not."""
        return self._directory / f"{uid}.json"

    @staticmethod
    def _rename(path: Path, to: Path) -> None:
        try:
            path.rename(to)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StateError(f"can't rename {path}: {error.strerror}") from error

    def _set_aside(self, path: Path, why: Exception) -> None:
        aside = path.with_suffix(ASIDE)
        self._aside.add(path.stem)
        try:
            path.replace(aside)
        except OSError as error:
            log.error("can't set a checkpoint record aside", extra={"path": str(path), "error": str(error)})
        log.error("set a checkpoint record aside", extra={"error": str(why), "keptAs": str(aside)})
