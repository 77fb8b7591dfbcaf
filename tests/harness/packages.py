"""Debian packages that a cluster needs beside the programs it builds."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from driver.errors import EnvironmentFault
from tests.harness.layout import BASE
from tests.harness.locks import file_lock
from tests.harness.progress import Progress

APT_GET = Path("/usr/bin/apt-get")
WAIT = ("--option", "DPkg::Lock::Timeout=300")
"""For what a fresh machine installs by itself meanwhile."""
CNI_PLUGINS = Path("/usr/lib/cni")


@dataclass(frozen=True)
class Package:
    """A Debian package and a file of it: any of ``files`` shows that it is there, whoever installed it."""

    name: str
    files: tuple[Path, ...]

    def present(self) -> bool:
        return any(file.exists() for file in self.files)


PACKAGES = (
    # Debian's runc is linked with libseccomp; one built from its Go module is not, and refuses every container.
    Package("runc", (Path("/usr/sbin/runc"), Path("/usr/bin/runc"), Path("/usr/local/sbin/runc"))),
    Package("busybox-static", (Path("/usr/share/doc/busybox-static"),)),
    Package("containernetworking-plugins", (CNI_PLUGINS / "loopback",)),
    Package("ca-certificates", (Path("/etc/ssl/certs/ca-certificates.crt"),)),
)

BROWSER = (
    Package("chromium", (Path("/usr/bin/chromium"),)),
    Package("chromium-driver", (Path("/usr/bin/chromedriver"),)),
    Package("fonts-dejavu-core", (Path("/usr/share/fonts/truetype/dejavu"),)),
)
"""What the tests of the web page need in addition."""


def missing_packages(packages: tuple[Package, ...] = PACKAGES) -> list[str]:
    """The names of the packages that are not there."""
    return [package.name for package in packages if not package.present()]


def ensure_packages(
    progress: Progress, packages: tuple[Package, ...] = PACKAGES, lock: Path = BASE / ".packages.lock"
) -> None:
    """Install what is missing; who asks at the same time waits for it. Raises EnvironmentFault.

    Two apt-get at once don't work: the first to end takes away the archives that the other has fetched.
    """
    if missing_packages(packages):
        with file_lock(lock):
            if missing := missing_packages(packages):
                install_packages(missing, progress)


def install_packages(names: list[str], progress: Progress) -> None:
    """Install ``names`` with apt-get; raises EnvironmentFault with the end of its output."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with progress.part(f"installing packages: {' '.join(names)}", 20) as part:
        for arguments in (["update"], ["install", "--yes", "--no-install-recommends", *names]):
            process = subprocess.Popen(
                [str(APT_GET), "--quiet", *WAIT, *arguments], env=environment, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            with process, process.stdout as output:  # type: ignore[union-attr]
                lines = []
                for line in output:
                    lines.append(line.rstrip())
                    part.tick(lines[-1][:60])
            if process.returncode != 0:
                raise EnvironmentFault(f"apt-get {' '.join(arguments)} failed:\n" + "\n".join(lines[-10:]))
