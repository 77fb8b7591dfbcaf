"""The checkpoint on disk: one file per claim, so that the cost of a write does not depend on other claims.

A record is written before the hardware is changed (phase "preparing") and again when the claim is usable
("prepared"); both writes are durable. It is marked before a release, and removed after the claim's partitions. An
unreadable file is set aside and kept until the claim's record was rebuilt (``orphans``).
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import msgspec

from driver.errors import EnvironmentFault, StateError
from kubelet_plugin.checkpoint.files import TEMPORARY, remove, write_atomically
from kubelet_plugin.checkpoint.records import ClaimRecord, decode_record

log = logging.getLogger(__name__)

ASIDE, SETTLED = ".unreadable", ".settled"
"""Suffixes of a file that was set aside, and of one whose claim was rebuilt or released since."""


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
                    self._load(path)
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

    def note_missing(self, uid: str) -> None:
        """Count a claim as unrecorded, for example because it has a CDI spec and no record."""
        if uid not in self.unrecorded:
            log.error("a checkpoint record is missing", extra={"claimUID": uid})
        self._missing.add(uid)

    def settle(self, uid: str) -> None:
        """The claim has a record again, or was released; a file that was set aside is renamed once more."""
        self._missing.discard(uid)
        if uid not in self._aside:
            return
        path = self.path(uid).with_suffix(ASIDE)
        try:
            path.rename(path.with_suffix(SETTLED))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StateError(f"can't rename {path}: {error.strerror}") from error
        self._aside.discard(uid)

    def records(self) -> list[ClaimRecord]:
        """Every record, as last written."""
        return list(self._records.values())

    def get(self, uid: str) -> ClaimRecord | None:
        return self._records.get(uid)

    def put(self, record: ClaimRecord, *, durable: bool = True) -> None:
        """Write the record. It survives a kill of the process; if ``durable``, also a power cut."""
        try:
            write_atomically(self._file(record.uid), msgspec.json.encode(record), durable=durable)
        except StateError:
            # A release that is needed is known in memory at least. It may be on disk all the same: fsync fails late.
            if record.needs_release:
                self._records[record.uid] = record
            raise
        self._records[record.uid] = record

    def remove(self, uid: str) -> None:
        remove(self._file(uid), durable=True)
        self._records.pop(uid, None)

    def path(self, uid: str) -> Path:
        """The file of one claim's record, whether it exists or not."""
        return Path(self._file(uid))

    def _file(self, uid: str) -> str:
        return f"{self._directory}/{uid}.json"

    def _load(self, path: Path) -> None:
        try:
            record = decode_record(path.read_bytes(), path)
        except (StateError, OSError) as error:
            self._set_aside(path, error)
            return
        self._records[record.uid] = record

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
