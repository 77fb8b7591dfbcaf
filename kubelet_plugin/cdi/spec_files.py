"""The CDI directory, from which the container runtime reads the spec of each claim."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from driver.errors import EnvironmentFault, StateError
from kubelet_plugin.cdi.spec_format import CLASS, CdiDevice, SpecFormat, devices_in, mounted_in
from kubelet_plugin.checkpoint import files

log = logging.getLogger(__name__)

SPEC_MODE = 0o644
"""The container runtime may run as another user."""


class CdiDirectory:
    """The specs of this driver in the CDI directory, and those of NVIDIA's driver for adopted claims; other specs are
    never changed. Methods raise StateError."""

    def __init__(self, directory: Path, specs: SpecFormat, restored: Callable[[], None] = lambda: None) -> None:
        """Create the directory if it is missing. Raises EnvironmentFault if that fails.

        ``restored`` is called whenever the directory was missing later and has been created again.
        """
        self.specs, self._directory, self._restored = specs, directory, restored
        self._prefix = f"{specs.driver}-{CLASS}_"
        self._compared: dict[str, int] = {}
        self._current: dict[str, tuple[object, ...]] = {}
        """By claim, its file (inode, size, time of the last change) and what all specs had in common when compared."""
        try:
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentFault(f"--cdi-dir {directory}: can't be created: {error.strerror}") from error

    def write(self, uid: str, devices: Sequence[CdiDevice], *, reserved: bool = False) -> bool:
        """Write the claim's file unless it has this content already.

        Returns whether a file was written because somebody else had removed or changed it: not if an earlier version of
        the plugin wrote it, or if the driver files have changed. ``reserved``: space was reserved for it.
        """
        path, spec = self._path(uid), self.specs.encode(uid, devices)
        before = files.read_if_exists(path)
        is_damaged = before is None or hash(before) != self._compared.get(uid, hash(before))
        self._compared[uid] = hash(spec)
        if before == spec:
            if reserved:
                self.unreserve(uid)
            return False
        try:
            # The directory is in memory (/var/run); the checkpoint survives a reboot.
            files.write_atomically(path, spec, durable=False, mode=SPEC_MODE, reserved=reserved)
        except StateError:
            if not self.restore():
                raise
            files.write_atomically(path, spec, durable=False, mode=SPEC_MODE)
        return is_damaged

    def reserve(self, uid: str, devices: int) -> None:
        """Allocate space for the next ``write`` of a spec with so many devices, or raise StateError."""
        try:
            files.reserve(self._path(uid), self.specs.room(devices), SPEC_MODE)
        except StateError:
            if not self.restore():
                raise
            files.reserve(self._path(uid), self.specs.room(devices), SPEC_MODE)

    def unreserve(self, uid: str) -> None:
        """Free the bytes that ``reserve`` allocated and ``write`` did not use."""
        files.unreserve(self._path(uid))

    def probe(self) -> None:
        """Raise StateError unless a file can be written to the directory."""
        self.restore()
        files.probe(self._path("probe"))

    def restore(self) -> bool:
        """Create the directory again if it is missing, and return whether it was; ``ClaimReconciler`` writes the specs
        again."""
        try:
            if self._directory.is_dir():
                return False
            self._directory.mkdir(mode=0o755, parents=True)
        except FileExistsError:  # created by another thread; a file in its place makes the write fail
            return True
        except OSError as error:
            raise StateError(f"can't create {self._directory} again: {error.strerror}") from error
        log.warning("created the CDI directory again", extra={"path": str(self._directory)})
        self._restored()
        return True

    def detached(self) -> str | None:
        """Why the existing directory takes no files: it is a mount whose source was deleted. None otherwise."""
        try:
            links = self._directory.stat().st_nlink
        except OSError:
            return None
        return None if links else f"{self._directory} was deleted on the host; a new container gets a new mount of it"

    def has(self, uid: str) -> bool:
        try:
            return Path(self._path(uid)).exists()
        except OSError as error:
            raise StateError(f"can't read {self._path(uid)}: {error.strerror}") from error

    def is_current(self, uid: str) -> bool:
        """Whether the claim's spec is as it should be: as this process has written or compared it, with the present
        driver files."""
        try:
            status = Path(self._path(uid)).stat()
        except OSError:
            return False
        # What is read below may be newer, which the next call then finds.
        seen = status.st_ino, status.st_size, status.st_mtime_ns, self._compared.get(uid), self.specs.common
        if self._current.get(uid) == seen:
            return True
        spec = files.read_if_exists(self._path(uid))
        is_current = spec is not None and hash(spec) == self._compared.get(uid) and self.specs.is_current(spec)
        if is_current:
            self._current[uid] = seen
        return is_current

    def mounted(self, uid: str) -> list[str]:
        """The host paths that the claim's spec mounts; empty without a valid spec."""
        return mounted_in(files.read_if_exists(self._path(uid)) or b"")

    def devices(self, uid: str) -> dict[str, str]:
        """The devices in the claim's spec, name to UUID; empty if there is no spec or it is invalid."""
        try:
            return devices_in(Path(self._path(uid)).read_bytes(), uid)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StateError(f"can't read {self._path(uid)}: {error.strerror}") from error

    def remove(self, uid: str) -> None:
        self._compared.pop(uid, None)
        self._current.pop(uid, None)
        files.remove(self._path(uid), durable=False)
        self.unreserve(uid)

    def has_adopted(self, uid: str) -> bool:
        """Whether NVIDIA's driver wrote a spec for the claim, and it still exists."""
        return self._adopted_path(uid).exists()

    def remove_adopted(self, uid: str) -> None:
        """Remove the spec that NVIDIA's driver wrote for the claim; a missing one is no error."""
        files.remove(self._adopted_path(uid), durable=False)

    def claim_uids(self) -> list[str]:
        """The UIDs of the claims that have a spec of this driver."""
        ours = (name for name in self._names() if name.startswith(self._prefix) and name.endswith(".json"))
        return [name.removeprefix(self._prefix).removesuffix(".json") for name in ours]

    def remove_half_written(self) -> None:
        """Remove partially written specs after a crash. Only at start: later a prepare may be writing one."""
        for name in self._names():
            if name.startswith(f".{self._prefix}") and name.endswith(files.TEMPORARY):
                files.remove(self._directory / name, durable=False)

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self._directory.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StateError(f"can't list {self._directory}: {error.strerror}") from error

    def _adopted_path(self, uid: str) -> Path:
        return self._directory / f"k8s.{self._prefix}{uid}.yaml"

    def _path(self, uid: str) -> str:
        return f"{self._directory}/{self._prefix}{uid}.json"
