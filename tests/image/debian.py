"""Debian packages as files: fetched by apt, which checks their signatures, unpacked without running their scripts."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from driver.errors import EnvironmentFault
from tests.image.architecture import Architecture, native

MERGED = ("bin", "lib", "lib64", "sbin")
"""Debian 12 keeps these below /usr and links to them from /; its packages still name the old places."""
COMMAND_S = 300.0
APT_GET, DPKG_DEB = "/usr/bin/apt-get", "/usr/bin/dpkg-deb"


@dataclass(frozen=True)
class Archive:
    """A package that apt offers: the name of its file, which has name, version and architecture, and its SHA-256."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Package:
    """An unpacked package: what its control file says."""

    name: str
    version: str
    architecture: str
    sha256: str


class Apt:
    """apt-get for the packages of one architecture, whose files it keeps in ``folder``.

    The lists are those of this machine, or in ``folder``, too, for another architecture.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # apt would fetch as another user, who can't write into the cache.
        self._options = ["-o", "APT::Sandbox::User=root"]
        if architecture != native():
            lists = folder / f"lists-{architecture.name}"
            (lists / "partial").mkdir(parents=True, exist_ok=True)
            settings = {
                "APT::Architecture": architecture.name,
                "APT::Architectures": architecture.name,
                "Dir::State::lists": str(lists),
                "Dir::State::status": "/dev/null",
                "Dir::Cache::pkgcache": "",
                "Dir::Cache::srcpkgcache": "",
            }
            self._options += [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]

    def ready(self, names: Sequence[str]) -> list[Archive]:
        """What apt offers of ``names``, the files in the folder. Raises EnvironmentFault.

        Lists that are older than the mirror name what it no longer has: they are renewed once.
        """
        archives = self.offered(names)
        try:
            self._fetch(archives)
        except EnvironmentFault:
            self.renew()
            archives = self.offered(names)
            self._fetch(archives)
        return archives

    def offered(self, names: Sequence[str]) -> list[Archive]:
        """What apt would fetch for ``names`` now; raises EnvironmentFault where it does not know them."""
        if not Path(APT_GET).exists():
            raise EnvironmentFault(f"{APT_GET}: not there; build on Debian 12, or with deploy/image/Dockerfile")
        answer = self._run("download", "--print-uris", *names, check=False)
        if answer.returncode != 0:
            self.renew()
            answer = self._run("download", "--print-uris", *names, check=False)
        if answer.returncode != 0:
            raise EnvironmentFault(
                f"apt-get has not the packages of deploy/image/packages.txt: {answer.stderr.strip()}; "
                "build on Debian 12, or with deploy/image/Dockerfile"
            )
        columns = [line.split() for line in answer.stdout.splitlines() if line.startswith("'")]
        return sorted(
            (Archive(file, sha.removeprefix("SHA256:")) for _, file, _, sha in columns),
            key=lambda archive: archive.file,
        )

    def renew(self) -> None:
        """Renew the lists of packages; raises EnvironmentFault."""
        self._run("update")

    def _fetch(self, archives: Iterable[Archive]) -> None:
        missing = [archive for archive in archives if not _intact(self._folder / archive.file, archive.sha256)]
        if missing:
            self._run("download", *map(_wanted, missing), folder=self._folder)
        for archive in missing:
            file = self._folder / archive.file
            if not _intact(file, archive.sha256):
                raise EnvironmentFault(f"{file}: is not the file that apt-get named; run apt-get update")

    def _run(self, *arguments: str, folder: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        # Not in the folder unless it is to get files: apt-get says nothing of those that it has.
        return _run([APT_GET, *self._options, *arguments], folder, check)


def unpack(file: Path, root: Path) -> Package:
    """Unpack a package's files below ``root``, all owned by whoever runs this, and leave its record for scanners."""
    content = subprocess.run([DPKG_DEB, "--fsys-tarfile", str(file)], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            path = _place(member.name)
            if not member.isdir():
                _write(archive, member, root / path, root)
    control = _run([DPKG_DEB, "--field", str(file)]).stdout
    fields = dict(line.split(": ", 1) for line in control.splitlines() if ": " in line and not line.startswith(" "))
    record = root / "var/lib/dpkg/status.d" / fields["Package"]
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(control)
    return Package(fields["Package"], fields["Version"], fields["Architecture"], _sha256(file))


def link_merged(root: Path) -> None:
    """/bin and the like, as links into /usr."""
    for name in MERGED:
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")


def _place(name: str) -> str:
    path = str(PurePosixPath(name))  # "./lib/x" becomes "lib/x"
    return f"usr/{path}" if path.split("/")[0] in MERGED else path


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path, root: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if member.issym():
        path.symlink_to(member.linkname)
    elif member.islnk():
        path.hardlink_to(root / _place(member.linkname))
    elif content := archive.extractfile(member):
        path.write_bytes(content.read())
        path.chmod(0o755 if member.mode & 0o111 else 0o644)
    else:
        raise EnvironmentFault(f"{member.name} is no file, link or folder; the image takes nothing else")


def _wanted(archive: Archive) -> str:
    """name=version, as apt-get takes it; in a file's name the colon of an epoch is escaped."""
    name, version, _ = archive.file.split("_")
    return f"{name}={version.replace('%3a', ':')}"


def _intact(file: Path, sha256: str) -> bool:
    return file.exists() and _sha256(file) == sha256


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _run(command: list[str], folder: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    if check and done.returncode != 0:
        raise EnvironmentFault(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr.strip()}")
    return done
