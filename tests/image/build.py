"""The image as an OCI archive in the cache: built without a Docker engine, and only where its inputs changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

from driver.errors import EnvironmentFault
from tessera.tables_and_drawings import columns
from tests.image import debian, oci, recipe

KEPT_BUILDS = 4
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
    """A built image: ``folder`` has the archive (image.tar), its SBOM and the list of its files.

    digest       of the manifest: what a registry knows the image by
    layers       bytes of each layer, unpacked and compressed
    """

    folder: Path
    digest: str
    layers: dict[str, tuple[int, int]]

    @property
    def archive(self) -> Path:
        return self.folder / "image.tar"

    @property
    def sbom(self) -> Path:
        return self.folder / recipe.SBOM

    @property
    def files(self) -> Path:
        return self.folder / recipe.FILES


def ensure_image(cache: Path, names: Sequence[str], step: recipe.Step = recipe.silent) -> Built:
    """The image under ``names``, from ``cache`` or built into it, half a minute; raises EnvironmentFault.

    A build appears in the cache complete or not at all; of two at once the second waits for the first.
    """
    if os.geteuid() != 0:
        raise EnvironmentFault("building the image needs root: its own Python compiles it in a chroot")
    own = cache / "image"
    with _locked(own):
        offered = debian.ready(recipe.packages(), own / "debs")
        folder = own / _key(offered, names)
        if not folder.is_dir():
            _build(folder, own / "debs", names, step)
        os.utime(folder)
        _forget_old(own)
    found = json.loads((folder / "built.json").read_text())
    return Built(folder, found["digest"], {name: tuple(sizes) for name, sizes in found["layers"].items()})


def summary(built: Built) -> str:
    """Sizes by layer, the digest, where its bill of materials and the list of its files are."""
    rows = [[name, *(f"{size / MB:.1f} MB" for size in sizes)] for name, sizes in built.layers.items()]
    total = [f"{sum(sizes) / MB:.1f} MB" for sizes in zip(*built.layers.values(), strict=True)]
    table = columns(["LAYER", "UNPACKED", "COMPRESSED"], [*rows, ["all", *total]])
    return f"{table}\ndigest  {built.digest}\nSBOM    {built.sbom}\nfiles   {built.files}"


def _build(folder: Path, debs: Path, names: Sequence[str], step: recipe.Step) -> None:
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as temporary:
        work = Path(temporary) / "image"
        work.mkdir()
        recipe.assemble(work, debs, step)
        with step("layers and archive"):
            _pack(work, names)
        work.rename(folder)


def _pack(work: Path, names: Sequence[str]) -> None:
    """Make the archive of the layers' folders, and let these go."""
    tars = {name: oci.tar_of(work / name) for name in recipe.LAYERS}
    layers = {name: oci.Layer.compressed(tar) for name, tar in tars.items()}
    content, digest = oci.archive(list(layers.values()), CONFIG, names)
    (work / "image.tar").write_bytes(content)
    sizes = {name: [len(tars[name]), len(layers[name].blob)] for name in layers}
    (work / "built.json").write_text(json.dumps({"digest": digest, "layers": sizes}))
    for name in recipe.LAYERS:
        shutil.rmtree(work / name)


def _key(offered: Sequence[debian.Archive], names: Sequence[str]) -> str:
    """Different for different inputs: Debian's archives, the locks, the sources, this recipe, the image's names."""
    hashed = hashlib.sha256()
    for line in (*map(str, offered), *names):
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
    builds = [each.parent for each in own.glob("*/built.json")]
    for old in sorted(builds, key=lambda each: each.stat().st_mtime)[:-KEPT_BUILDS]:
        shutil.rmtree(old)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as handle:
        flock(handle, LOCK_EX)
        yield
