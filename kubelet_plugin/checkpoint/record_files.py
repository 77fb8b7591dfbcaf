"""The checkpoint: the record of each claim, one file per claim on disk.

A record is written before the hardware is changed (phase "preparing") and again when the claim is usable
("prepared"); both writes are durable. It is marked before a release, and removed after the claim's partitions. An
unreadable file is set aside and kept until the claim's record was rebuilt (``reconcile.recovery``). The cost of a write
does not depend on other claims.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import msgspec

from driver.errors import EnvironmentFault, StateError
from kubelet_plugin.checkpoint.files import TEMPORARY, remove, write_atomically
from kubelet_plugin.checkpoint.records import SHARED_VERSION, VERSION, ClaimRecord

log = logging.getLogger(__name__)

ASIDE, SETTLED = ".unreadable", ".settled"
"""Suffixes of a file that was set aside, and of one whose claim was rebuilt or released since, or was adopted."""

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


def check_readable(state_dir: Path) -> None:
    """Raise StateError for the first record that this version can't read: of another version, or damaged.

    Only reads, while another instance is active.
    """
    try:
        for path in sorted((state_dir / "claims").glob("[!.]*.json")):
            with suppress(FileNotFoundError):  # released meanwhile
                decode_record(path.read_bytes(), path)
    except OSError as error:
        raise StateError(f"can't read the checkpoint in {state_dir}: {error.strerror}") from error
