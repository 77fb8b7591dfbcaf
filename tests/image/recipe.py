"""How the image's files come about: the one recipe, run by the Dockerfile's first stage and by ``make image``.

``python3 -m tests.image.recipe FOLDER`` writes into FOLDER one folder for each layer, and beside them what they hold,
for the architecture of this machine.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.image import debian, sbom, tree, wheels
from tests.image.architecture import Architecture, Verified, native, verify

PROJECT = Path(__file__).parents[2]
LISTS = PROJECT / "deploy" / "image"
PACKAGES, PRUNED, LOCK = LISTS / "packages.txt", LISTS / "pruned.txt", LISTS / "requirements.lock"
BUILD_LOCK = PROJECT / "requirements.lock"
"""Pins what builds the project's wheel."""

LAYERS = ("debian", "python", "tessera")
"""From what changes least to what changes most."""
FILES, SBOM = "files.txt", "sbom.cdx.json"
USER = 65532
"""Who a container is unless its pod says otherwise; the node plugin's pod does."""

ACCOUNTS = {
    "etc/passwd": f"root:x:0:0:root:/:/nonexistent\nnonroot:x:{USER}:{USER}:nonroot:/:/nonexistent\n",
    "etc/group": f"root:x:0:\nnonroot:x:{USER}:\n",
}
MOUNT_POINTS = ("dev", "proc", "run", "sys", "tmp")

Step = Callable[[str], contextlib.AbstractContextManager[object]]


@contextlib.contextmanager
def silent(_: str) -> Iterator[None]:
    """A step that nobody hears of."""
    yield


def assemble(folder: Path, debs: Path, architecture: Architecture, step: Step = silent) -> Verified:
    """Make the layers in ``folder``, which must be empty; ``debs`` keeps Debian's archives for the next time.

    The project's wheel stays in ``folder``. Needs root, for an image's Python compiles everything in a chroot: its own,
    or for another architecture that of an image for this machine. Raises EnvironmentFault with what is missing or for
    another architecture. ``step`` surrounds each part of the work.
    """
    root = folder / "root"
    with step("Debian packages"):
        unpacked = _debian_part(root, debs, architecture)
    with step("Python packages"):
        wheels.install_dependencies(root, LOCK, architecture)
    with step("Tessera's wheel"):
        wheels.build_project(PROJECT, BUILD_LOCK, folder)
        wheels.install_project(root, folder, architecture)
        tree.prune(root, tree.Pruning(PRUNED.read_text()))
        wheels.settle_records(root)
    with step("bytecode"):
        _compile(root, debs, architecture)
    with step("list of contents"):
        verified = verify(root, architecture)
        _describe(root, folder, unpacked)
        _furnish(root)
        tree.settle(root)
        entries = tree.listing(root)
        (folder / FILES).write_text("".join(f"{entry}\n" for entry in entries))
        tree.divide(root, folder, layer_of)
        shutil.rmtree(root)
        for layer in LAYERS:
            tree.settle(folder / layer)
    return verified


def layer_of(path: str) -> str:
    """The layer of a file, by its path relative to /."""
    inside = path.removeprefix(f"{wheels.SITE}/")
    if path in ("usr/bin/tessera", sbom.PLACE) or inside.split("/")[0].startswith(OWN):
        return "tessera"
    return "debian" if inside == path else "python"


OWN = ("controller", "deviceclasses", "driver", "kubelet_plugin", "tessera")
"""What the names of the project's packages and of its metadata start with."""


def _compile(root: Path, debs: Path, architecture: Architecture) -> None:
    if architecture == native():
        wheels.compile_all(root)
        return
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        native_root = Path(folder) / "root"
        _debian_part(native_root, debs, native())
        tree.prune(native_root, tree.Pruning(PRUNED.read_text()))
        wheels.compile_foreign(root, native_root)


def _debian_part(root: Path, debs: Path, architecture: Architecture) -> list[debian.Package]:
    archives = debian.Apt(debs, architecture).ready(packages())
    files = [debs / archive.file for archive in archives]
    root.mkdir()
    debian.link_merged(root)
    return [debian.unpack(file, root) for file in files]


def packages() -> list[str]:
    """The names of the Debian packages."""
    return tree.lines_of(PACKAGES.read_text())


def _furnish(root: Path) -> None:
    for place, text in ACCOUNTS.items():
        (root / place).write_text(text)
    for place in MOUNT_POINTS:
        (root / place).mkdir(exist_ok=True)


def _describe(root: Path, folder: Path, unpacked: list[debian.Package]) -> None:
    text = sbom.bill(unpacked, wheels.distributions(root))
    for file in (root / sbom.PLACE, folder / SBOM):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def main(folder: str) -> None:
    made = Path(folder)
    made.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as debs:
        assemble(made, Path(debs), native())


if __name__ == "__main__":
    main(*sys.argv[1:])
