"""The architectures that images are built for, and the check that the contents of an image fit its own."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from driver.errors import EnvironmentFault

ELF_MAGIC, LITTLE_ENDIAN = b"\x7fELF", 1
SHOWN = 5
"""Files that an error names."""


@dataclass(frozen=True)
class Architecture:
    """An architecture.

    name      what Debian, Go and OCI call it
    machine   what Linux and Python's wheels call it
    elf       its number in the header of ELF files (e_machine)
    """

    name: str
    machine: str
    elf: int


AMD64 = Architecture("amd64", "x86_64", 62)
ARM64 = Architecture("arm64", "aarch64", 183)
ARCHITECTURES = (AMD64, ARM64)


@dataclass(frozen=True)
class Verified:
    """How many files were compared with the architecture of their image."""

    elf_files: int
    wheels: int


def native() -> Architecture:
    """The architecture of this machine; raises EnvironmentFault if no image is built for it."""
    machine = platform.machine()
    for architecture in ARCHITECTURES:
        if architecture.machine == machine:
            return architecture
    supported = ", ".join(architecture.machine for architecture in ARCHITECTURES)
    raise EnvironmentFault(f"this machine is {machine}; images are built on {supported}")


def verify(root: Path, architecture: Architecture) -> Verified:
    """Check that every ELF file and every wheel below ``root`` is for ``architecture``; raises EnvironmentFault."""
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    machines = {path: number for path in files if (number := _elf_machine(path)) is not None}
    tags = {path: list(_platforms(path)) for path in files if path.name == "WHEEL"}
    wrong = [f"{path.relative_to(root)}: ELF machine {number}" for path, number in machines.items()
             if number != architecture.elf]  # fmt: skip
    wrong += [f"{path.relative_to(root)}: wheel for {', '.join(platforms)}" for path, platforms in tags.items()
              if not all(name == "any" or name.endswith(f"_{architecture.machine}") for name in platforms)]  # fmt: skip
    if wrong:
        raise EnvironmentFault(
            f"{len(wrong)} files are not for {architecture.name} (ELF machine {architecture.elf}, wheels for any or "
            f"{architecture.machine}): {'; '.join(sorted(wrong)[:SHOWN])}"
        )
    return Verified(len(machines), len(tags))


def _elf_machine(path: Path) -> int | None:
    """The machine of an ELF file; None for other files."""
    with path.open("rb") as file:
        header = file.read(20)
    if not header.startswith(ELF_MAGIC):
        return None
    return int.from_bytes(header[18:20], "little" if header[5] == LITTLE_ENDIAN else "big")


def _platforms(wheel: Path) -> Iterator[str]:
    """The platforms in the tags of a wheel's metadata."""
    for line in wheel.read_text().splitlines():
        name, _, value = line.partition(": ")
        if name == "Tag":
            yield value.rpartition("-")[2]
