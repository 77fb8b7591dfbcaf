"""The files of a release, made of images from the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from driver.errors import EnvironmentFault
from tessera.tables_and_drawings import columns
from tests.image import oci
from tests.image.architecture import ARCHITECTURES, Architecture, native
from tests.image.build import Built, ensure_image
from tests.image.recipe import Step, silent
from tests.release import chart

SUMS = "SHA256SUMS"
KB = 1000
SILENT: Mapping[Architecture, Step] = dict.fromkeys(ARCHITECTURES, silent)


@dataclass(frozen=True)
class Dist:
    """The files of a release in ``folder``.

    image    repository and digest of the index of its images, by which the chart names them
    built    the image of each architecture
    """

    folder: Path
    version: str
    image: str
    built: Mapping[Architecture, Built]

    @property
    def chart(self) -> Path:
        return self.folder / f"tessera-{self.version}.tgz"

    @property
    def wheel(self) -> Path:
        return self.folder / self.built[native()].wheel.name

    def archive(self, architecture: Architecture | None = None) -> Path:
        """The archive with the image of one architecture, or with all."""
        return self.folder / f"tessera-{self.version}{_suffix(architecture)}.tar"

    def sbom(self, architecture: Architecture) -> Path:
        return self.folder / f"tessera-{self.version}{_suffix(architecture)}.cdx.json"

    @property
    def files(self) -> list[Path]:
        """All files but the checksums."""
        images = (file for machine in self.built for file in (self.archive(machine), self.sbom(machine)))
        return sorted([self.chart, self.wheel, self.archive(), *images])

    @property
    def sums(self) -> Path:
        return self.folder / SUMS


def write(cache: Path, folder: Path, repository: str, steps: Mapping[Architecture, Step] = SILENT) -> Dist:
    """Write a release whose images are in ``repository`` into ``folder``; raises EnvironmentFault.

    ``steps`` surround the parts of the work for an image, which is in ``cache`` if it was built before.
    """
    built = {machine: ensure_image(cache, [], steps[machine], machine) for machine in ARCHITECTURES}
    images = {machine: oci.Image.read(image.archive.read_bytes()) for machine, image in built.items()}
    index = oci.Image.index(list(images.values()))
    dist = Dist(folder, version("tessera-dra"), f"{repository}@{index.digest}", built)
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{repository}:{dist.version}", dist.image]
    dist.archive().write_bytes(index.archive(names))
    for machine, image in images.items():
        dist.archive(machine).write_bytes(index.only(image).archive(names))
        dist.sbom(machine).write_bytes(built[machine].sbom.read_bytes())
    dist.wheel.write_bytes(_same(image.wheel.read_bytes() for image in built.values()))
    dist.chart.write_bytes(chart.package(repository, index.digest, dist.version))
    if (installed := chart.images(dist.chart)) != {dist.image}:
        raise EnvironmentFault(f"{dist.chart} installs {', '.join(sorted(installed))}; it should install {dist.image}")
    dist.sums.write_text("".join(f"{_sha256(file)}  {file.name}\n" for file in dist.files))
    return dist


def summary(dist: Dist) -> str:
    """The files with their sizes, the image, and what was verified of each architecture."""
    rows = [[file.name, f"{file.stat().st_size / KB:,.0f} kB"] for file in (*dist.files, dist.sums)]
    return "\n".join([columns(["FILE", "SIZE"], rows), f"image  {dist.image}", *_verified(dist)])


def _verified(dist: Dist) -> Iterator[str]:
    here = native()
    for machine, built in dist.built.items():
        facts = f"{built.verified.elf_files} ELF files and {built.verified.wheels} wheels are for {machine.machine}"
        run = "" if machine == here else f"; not run, because this machine is {here.machine}"
        yield f"{machine.name}  {facts}{run}"


def _same(contents: Iterator[bytes]) -> bytes:
    """The wheel, which was built once for each image."""
    wheel, *others = contents
    if any(other != wheel for other in others):
        raise EnvironmentFault("two builds of Tessera's wheel differ: the sources changed in the meantime; try again")
    return wheel


def _suffix(architecture: Architecture | None) -> str:
    return f"-linux-{architecture.name}" if architecture else ""


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
