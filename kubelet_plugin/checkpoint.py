"""What is prepared or being prepared, on disk: one file a claim, so that no claim pays for another.

A record is written before the hardware is touched (phase "preparing") and again when the claim is usable
("prepared"); it goes when the claim's partitions are gone. Both writes are durable.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import msgspec

from driver.errors import EnvironmentFault, StateError
from driver.model.device import Device, DeviceKind
from driver.model.gpu import Partition, Placement
from kubelet_plugin.files import TEMPORARY, remove, write_atomically
from kubelet_plugin.inventory import Holder

log = logging.getLogger(__name__)

VERSION = 1
"""Of the file format. A file of a newer version is set aside, never guessed at."""


class DeviceRecord(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One allocated device and, once it was cut, the partition behind it."""

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
    existing: bool = False
    """A partition that stood there before and is given out as it is: it is never removed."""

    @property
    def placement(self) -> Placement | None:
        """None for a full GPU."""
        return None if self.start is None or self.size is None else Placement(self.start, self.size)

    @property
    def partition(self) -> Partition | None:
        """The partition as far as it is known to exist; None for a full GPU or before the cut."""
        place = self.placement
        if self.profile_id is None or place is None or self.gpu_instance_id is None:
            return None
        return Partition(
            self.gpu_uuid, self.profile_id, place, self.gpu_instance_id, self.compute_instance_id, self.uuid
        )

    def with_partition(self, partition: Partition | None) -> DeviceRecord:
        """This record with the ids of what was cut; a full GPU (None) has none."""
        if partition is None:
            return self
        return msgspec.structs.replace(
            self,
            gpu_instance_id=partition.gpu_instance_id,
            compute_instance_id=partition.compute_instance_id,
            uuid=partition.uuid,
        )


class ClaimRecord(msgspec.Struct, frozen=True, rename="camel"):
    """One claim's file."""

    version: int
    namespace: str
    name: str
    uid: str
    phase: Literal["preparing", "prepared"]
    devices: tuple[DeviceRecord, ...]

    @property
    def holder(self) -> Holder:
        return Holder(self.uid, self.namespace, self.name)

    @property
    def gpu_uuids(self) -> frozenset[str]:
        return frozenset(device.gpu_uuid for device in self.devices)


def device_record(
    device: Device, pool: str, requests: tuple[str, ...], number: int, *, existing: bool = False
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
        existing=existing,
    )


class Checkpoint:
    """The directory ``claims/`` below the state directory. Methods raise StateError."""

    def __init__(self, state_dir: Path) -> None:
        """Creates the directory. Raises EnvironmentFault where that is impossible."""
        self._directory = state_dir / "claims"
        try:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise EnvironmentFault(f"--state-dir {state_dir}: can't be used: {error.strerror}") from error
        self._records: dict[str, ClaimRecord] = {}

    def load(self) -> list[ClaimRecord]:
        """Every record on disk. One that makes no sense is set aside under another name, loudly."""
        try:
            for path in sorted(self._directory.iterdir()):
                if path.name.endswith(TEMPORARY):
                    remove(path, durable=False)
                elif path.suffix == ".json":
                    self._load(path)
        except OSError as error:
            raise StateError(f"can't read the checkpoint in {self._directory}: {error}") from error
        return self.records()

    def records(self) -> list[ClaimRecord]:
        """Every record, as last written."""
        return list(self._records.values())

    def get(self, uid: str) -> ClaimRecord | None:
        return self._records.get(uid)

    def put(self, record: ClaimRecord) -> None:
        """Durable when this returns."""
        write_atomically(self.path(record.uid), msgspec.json.encode(record), 0o600, durable=True)
        self._records[record.uid] = record

    def remove(self, uid: str) -> None:
        remove(self.path(uid), durable=True)
        self._records.pop(uid, None)

    def path(self, uid: str) -> Path:
        """The file of one claim's record, whether it exists or not."""
        return self._directory / f"{uid}.json"

    def _load(self, path: Path) -> None:
        try:
            record = decode_record(path.read_bytes(), path)
        except (StateError, OSError) as error:
            aside = path.with_suffix(".unreadable")
            path.replace(aside)
            log.error("set a checkpoint record aside", extra={"error": str(error), "keptAs": str(aside)})
            return
        self._records[record.uid] = record


def decode_record(data: bytes, path: Path) -> ClaimRecord:
    """Parse one file. Raises StateError naming the file and the field."""
    try:
        record = msgspec.json.decode(data, type=ClaimRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StateError(f"{path}: not a checkpoint record: {error}") from error
    if record.version != VERSION:
        raise StateError(f"{path}: version is {record.version}, this program reads version {VERSION}")
    if path.stem != record.uid:
        raise StateError(f"{path}: is about claim {record.uid}, its name says otherwise")
    return record
