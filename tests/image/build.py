"""The image as an OCI archive in the cache: built without a Docker engine, and only where its inputs changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

from driver.errors import EnvironmentFault
from tessera.tables_and_drawings import columns
from tests.image import debian, oci, recipe
from tests.image.architecture import Architecture, Verified, native

KEPT_BUILDS = 6
ARCHIVE, FACTS = "image.tar", "built.json"
"""Of a build: the image without a name, and what is known of it."""
MB = 1_000_000
REPOSITORY = "docker.io/library/tessera"
"""What containerd makes of the name ``tessera``."""
CONFIG = {
    "Entrypoint": ["/usr/bin/tessera"],
    "Env": ["PATH=/usr/bin"],
    "User": str(recipe.USER),
    "WorkingDir": "/",
    "Labels": {"org.opencontainers.image.title": "Tessera", "org.opencontainers.image.licenses": "Apache-2.0"},
}
"""The same as in the Dockerfile; a test compares them."""
SOURCES = (
    "controller",
    "deviceclasses",
    "driver",
    "kubelet_plugin",
    "tessera",
    "deploy/image",
    "deploy/tessera/classes",
    "tests/image",
)
FILES = ("pyproject.toml", "README.md", "LICENSE", "requirements.lock", ".uv-version")


@dataclass(frozen=True)
class Built:
    """A built image: ``folder`` has its SBOM, the list of its files and the project's wheel that it has.

    archive      with the names that were asked for
    digest       of the manifest: what a registry knows the image by
    layers       bytes of each layer, unpacked and compressed
    verified     what was found to be for its architecture
    """

    folder: Path
    archive: Path
    digest: str
    layers: dict[str, tuple[int, int]]
    verified: Verified

    @property
    def sbom(self) -> Path:
        return self.folder / recipe.SBOM

    @property
    def files(self) -> Path:
        return self.folder / recipe.FILES

    @property
    def wheel(self) -> Path:
        [wheel] = self.folder.glob("*.whl")
        return wheel


def ensure_image(
    cache: Path, names: Sequence[str], step: recipe.Step = recipe.silent, architecture: Architecture | None = None
) -> Built:
    """The image under ``names``, from ``cache`` or built into it, half a minute; raises EnvironmentFault.

    For the architecture of this machine unless another is given. A build appears in the cache complete or not at all;
    of two at once the second waits for the first.
    """
    if os.geteuid() != 0:
        raise EnvironmentFault("building the image needs root: a Python in a chroot compiles it")
    own = cache / "image"
    machine = architecture or native()
    with _locked(own):
        offered = debian.Apt(own / "debs", machine).ready(recipe.packages())
        folder = own / _key(offered, machine)
        if not folder.is_dir():
            _build(folder, own / "debs", machine, step)
        archive = _named(folder, names)
        os.utime(folder)
        _forget_old(own)
    facts = json.loads((folder / FACTS).read_text())
    layers = {name: tuple(sizes) for name, sizes in facts["layers"].items()}
    return Built(folder, archive, facts["digest"], layers, Verified(**facts["verified"]))


def renew_lists(cache: Path, architecture: Architecture) -> None:
    """Let the next build know Debian's newest packages; raises EnvironmentFault."""
    builds = cache / "image"
    with _locked(builds):
        debian.Apt(builds / "debs", architecture).renew()


def summary(built: Built) -> str:
    """Sizes by layer, the digest, where its bill of materials and the list of its files are."""
    rows = [[name, *(f"{size / MB:.1f} MB" for size in sizes)] for name, sizes in built.layers.items()]
    total = [f"{sum(sizes) / MB:.1f} MB" for sizes in zip(*built.layers.values(), strict=True)]
    table = columns(["LAYER", "UNPACKED", "COMPRESSED"], [*rows, ["all", *total]])
    return f"{table}\ndigest  {built.digest}\nSBOM    {built.sbom}\nfiles   {built.files}"


def _build(folder: Path, debs: Path, architecture: Architecture, step: recipe.Step) -> None:
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as temporary:
        work = Path(temporary) / "image"
        work.mkdir()
        verified = recipe.assemble(work, debs, architecture, step)
        with step("layers and archive"):
            _pack(work, architecture, verified)
        work.rename(folder)


def _pack(work: Path, architecture: Architecture, verified: Verified) -> None:
    """Make the archive of the layers' folders, and let these go."""
    tars = {name: oci.tar_of(work / name) for name in recipe.LAYERS}
    layers = {name: oci.Layer.compressed(tar) for name, tar in tars.items()}
    image = oci.Image.of(list(layers.values()), CONFIG, architecture)
    (work / ARCHIVE).write_bytes(image.archive([]))
    sizes = {name: [len(tars[name]), len(layers[name].blob)] for name in layers}
    facts = {"digest": image.digest, "layers": sizes, "verified": asdict(verified)}
    (work / FACTS).write_text(json.dumps(facts))
    for name in recipe.LAYERS:
        shutil.rmtree(work / name)


def _named(folder: Path, names: Sequence[str]) -> Path:
    """The archive of the build in ``folder`` under ``names``."""
    if not names:
        return folder / ARCHIVE
    archive = folder / f"{oci.digest(json.dumps(names).encode())[7:23]}.tar"
    if not archive.exists():
        incomplete = archive.with_suffix(".incomplete")
        incomplete.write_bytes(oci.Image.read((folder / ARCHIVE).read_bytes()).archive(names))
        incomplete.rename(archive)
    return archive


def _key(offered: Sequence[debian.Archive], architecture: Architecture) -> str:
    """Different for different inputs: architecture, Debian's archives, the locks, the sources, this recipe."""
    hashed = hashlib.sha256()
    for line in (*map(str, offered), architecture.name):
        hashed.update(f"{line}\n".encode())
    for path in sorted(_inputs()):
        hashed.update(f"{path.relative_to(recipe.PROJECT)}\n".encode())
        hashed.update(hashlib.sha256(path.read_bytes()).digest())
    return hashed.hexdigest()[:16]


def _inputs() -> Iterator[Path]:
    for name in FILES:
        yield recipe.PROJECT / name
    for folder in SOURCES:
        found = (path for path in (recipe.PROJECT / folder).rglob("*") if path.is_file())
        yield from (path for path in found if "__pycache__" not in path.parts)


def _forget_old(own: Path) -> None:
    builds = [facts.parent for facts in own.glob(f"*/{FACTS}")]
    for old in sorted(builds, key=lambda build: build.stat().st_mtime)[:-KEPT_BUILDS]:
        shutil.rmtree(old)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as handle:
        flock(handle, LOCK_EX)
        yield
