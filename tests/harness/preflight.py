"""What a machine must have before a cluster is started on it: all failures at once, each with its remedy."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from driver.errors import EnvironmentFault
from tests.harness.addresses import API_PORT, Network, is_free
from tests.harness.binaries import cached
from tests.harness.cgroups import Cgroups
from tests.harness.layout import BASE
from tests.harness.packages import APT_GET, ensure_packages, missing_packages
from tests.harness.processes import MARKER, environ_of
from tests.harness.progress import Progress
from tests.harness.settings import Settings

MODPROBE = Path("/usr/sbin/modprobe")
GB = 1_000_000_000
BUILD_DISK = 10 * GB
"""Bytes free for a first build: Go's own cache 5 GB, modules 2 GB, the programs 0.6 GB, a cluster at work 1 GB."""
RUN_DISK = 2 * GB
TOTAL_MEMORY = int(3.6 * GB)
"""A machine sold with 4 GB reports about this much: its kernel keeps the rest."""
FREE_MEMORY = int(1.2 * GB)
"""What one cluster with a node takes, with its pods."""
NODE_MEMORY = int(0.2 * GB)
"""What each further node takes: containerd, kubelet, a node plugin."""


@dataclass(frozen=True)
class Failure:
    """Something that is missing, and what to do about it."""

    check: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.check}: {self.found}; {self.remedy}"


@dataclass(frozen=True)
class Machine:
    """What the checks look at, so that tests can show them another machine."""

    user: int
    memory_total: int
    memory_available: int
    cgroups: Cgroups
    filesystems: frozenset[str]
    port_free: Callable[[str, int], bool]
    disk_free: Callable[[Path], int]
    missing_packages: tuple[str, ...]
    foreign_kubelet: int | None

    @classmethod
    def here(cls) -> Machine:
        """This machine, now."""
        memory = _meminfo()
        return cls(
            user=os.geteuid(),
            memory_total=memory["MemTotal"],
            memory_available=memory["MemAvailable"],
            cgroups=Cgroups.detect(),
            filesystems=filesystems(),
            port_free=is_free,
            disk_free=_disk_free,
            missing_packages=tuple(missing_packages()),
            foreign_kubelet=_foreign_kubelet(),
        )


def failures(machine: Machine, settings: Settings) -> list[Failure]:
    """Everything that stands in the way of a cluster with these settings on that machine; empty is good."""
    checks = (_user, _disk, _memory, _cgroup, _overlay, _ports, _packages, _kubelet)
    return [failure for check in checks for failure in check(machine, settings)]


def prepare(settings: Settings, progress: Progress) -> None:
    """Mend what can be mended, then raise EnvironmentFault with one line for each failure that is left.

    As root it installs missing packages and loads the overlayfs module, which a fresh Debian has but not loaded.
    """
    if os.geteuid() == 0:
        if APT_GET.exists():
            ensure_packages(progress)
        if "overlay" not in filesystems() and MODPROBE.exists():
            subprocess.run([str(MODPROBE), "overlay"], capture_output=True, check=False)  # the check below tells
    found = failures(Machine.here(), settings)
    if found:
        lines = "\n".join(f"  - {failure}" for failure in found)
        raise EnvironmentFault(f"this machine can't run a cluster yet:\n{lines}")


def _user(machine: Machine, _: Settings) -> Iterable[Failure]:
    if machine.user != 0:
        yield Failure("root", f"running as user {machine.user}", "run it as root: containers and mounts need that")


def _disk(machine: Machine, settings: Settings) -> Iterable[Failure]:
    builds = settings.binaries is None and not cached(settings.release, settings.cache).is_dir()
    for folder, needed in ((settings.cache, BUILD_DISK if builds else 0), (BASE, RUN_DISK)):
        free = machine.disk_free(folder)
        if free < needed:
            text = f"{free / GB:.1f} GB free for {folder}, {needed / GB:.0f} GB needed"
            yield Failure("disk", text, "free some, or keep the programs elsewhere with --cache")


def _memory(machine: Machine, settings: Settings) -> Iterable[Failure]:
    needed = FREE_MEMORY + max(settings.nodes - 1, 0) * NODE_MEMORY
    if machine.memory_total < TOTAL_MEMORY:
        yield Failure("memory", f"{machine.memory_total / GB:.1f} GB in all", "use a machine with 4 GB or more")
    elif machine.memory_available < needed:
        text = f"{machine.memory_available / GB:.1f} GB available, {needed / GB:.1f} GB needed"
        fewer = f" or start fewer than {settings.nodes} nodes" if settings.nodes > 1 else ""
        yield Failure("memory", text, f"end other programs or clusters (python -m tests.harness status){fewer}")


def _cgroup(machine: Machine, _: Settings) -> Iterable[Failure]:
    if not machine.cgroups.mounts:
        yield Failure("cgroup", "no cgroup file system is mounted", "mount -t cgroup2 none /sys/fs/cgroup")
    elif machine.cgroups.missing:
        text = f"{machine.cgroups.version} lacks {', '.join(machine.cgroups.missing)}"
        yield Failure("cgroup", text, "boot a kernel with these controllers (see /proc/cgroups)")


def _overlay(machine: Machine, _: Settings) -> Iterable[Failure]:
    if "overlay" not in machine.filesystems:
        yield Failure("overlayfs", "the kernel doesn't offer it", "modprobe overlay")


def _ports(machine: Machine, _: Settings) -> Iterable[Failure]:
    if not any(machine.port_free(Network(number).api, API_PORT) for number in range(8)):
        text = f"port {API_PORT} is taken on every loopback address"
        yield Failure(
            "ports", text, f"stop what listens there (ss -ltnp 'sport = :{API_PORT}'), or bind it to one address"
        )


def _packages(machine: Machine, _: Settings) -> Iterable[Failure]:
    if machine.missing_packages:
        names = " ".join(machine.missing_packages)
        yield Failure("packages", f"missing: {names}", f"apt-get update && apt-get install --yes {names}")


def _kubelet(machine: Machine, _: Settings) -> Iterable[Failure]:
    if machine.foreign_kubelet is not None:
        text = f"process {machine.foreign_kubelet} is a kubelet that the harness didn't start"
        yield Failure("kubelet", text, "use another machine: both would claim /var/lib/kubelet/device-plugins")


def filesystems() -> frozenset[str]:
    """The file systems that the kernel offers now."""
    return frozenset(Path("/proc/filesystems").read_text().split())


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {name.rstrip(":"): int(value) * 1024 for name, value, *_ in lines}


def _disk_free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _foreign_kubelet() -> int | None:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "comm").read_text().strip()
        except OSError:
            continue
        if name == "kubelet" and _is_foreign(environ_of(int(folder.name))):
            return int(folder.name)
    return None


def _is_foreign(environ: list[str]) -> bool:
    """One of our own that is just ending shows no environment any more."""
    return any(environ) and not any(entry.startswith(f"{MARKER}=") for entry in environ)
