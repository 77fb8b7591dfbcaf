"""What is prepared or being prepared, on disk: one file a claim, so that no claim pays for another.

A record is written before the hardware is touched (phase "preparing") and again when the claim is usable
("prepared"); both writes are durable. It is marked when it is to be released, and goes when the claim's partitions are
gone. A file that makes no sense is set aside and kept, until the claim's record was rebuilt (``kubelet_plugin.aside``).
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import msgspec

from driver.errors import EnvironmentFault, StateError
from kubelet_plugin.files import TEMPORARY, remove, write_atomically
from kubelet_plugin.records import ClaimRecord, decode_record

log = logging.getLogger(__name__)

ASIDE, SETTLED = ".unreadable", ".settled"
"""Suffixes of a file that was set aside, and of one whose claim has been dealt with since."""


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
        self._aside: set[str] = set()

    def load(self) -> list[ClaimRecord]:
        """Every record on disk. One that makes no sense is set aside under another name, loudly."""
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
        """The uids of claims whose record was set aside and that nobody has dealt with since."""
        return frozenset(self._aside)

    def settle(self, uid: str) -> None:
        """The claim whose record was set aside has been dealt with; the file is kept, under another name."""
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
        """Outlives the process when this returns; if ``durable`` a power cut, too."""
        try:
            write_atomically(self.path(record.uid), msgspec.json.encode(record), 0o600, durable=durable)
        except StateError:
            # What is owed is known in memory at least; and it may be on disk all the same: fsync is late to fail.
            if record.owed:
                self._records[record.uid] = record
            raise
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
    """Raises StateError naming the first record that this version can't read: another version's, or a damaged one.

    Only reads, beside the plugin at work.
    """
    try:
        for path in sorted((state_dir / "claims").glob("[!.]*.json")):
            with suppress(FileNotFoundError):  # released meanwhile
                decode_record(path.read_bytes(), path)
    except OSError as error:
        raise StateError(f"can't read the checkpoint in {state_dir}: {error.strerror}") from error
