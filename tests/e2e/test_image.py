"""The built container image: what is in it, what is not, and that it runs."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.image import recipe, sbom
from tests.image.build import Built, ensure_image
from tests.image.tree import listing
from tests.image.wheels import CHROOT
from tests.support.in_pods import CACHE, IMAGE

# Not because of a cluster: it needs root, Debian and its packages, as a cluster does.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

IMPORT_ALL = """
import pkgutil, sys
for name in ("controller", "deviceclasses", "driver", "kubelet_plugin", "tessera"):
    for module in pkgutil.walk_packages(__import__(name).__path__, name + "."):
        if not module.name.endswith("__main__"):
            __import__(module.name)
from kubernetes.config import load_kube_config
"""


@pytest.fixture(scope="module")
def built() -> Built:
    return ensure_image(CACHE, [IMAGE])


@pytest.fixture(scope="module")
def unpacked(built: Built, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tarfile.TarInfo]]:
    """The image's file system, and everything in its layers."""
    root, members = tmp_path_factory.mktemp("image"), []
    for layer in layers(built.archive):
        members += layer.getmembers()
        layer.extractall(root, filter="tar")
    root.chmod(0o755)  # as / is
    return root, members


@pytest.fixture(scope="module")
def root(unpacked: tuple[Path, list[tarfile.TarInfo]]) -> Path:
    return unpacked[0]


@pytest.fixture(scope="module")
def members(unpacked: tuple[Path, list[tarfile.TarInfo]]) -> list[tarfile.TarInfo]:
    return unpacked[1]


def layers(archive: Path) -> Iterator[tarfile.TarFile]:
    with tarfile.open(archive) as image:
        blobs = {member.name: image.extractfile(member) for member in image}

        def read(digest: str) -> bytes:
            blob = blobs[f"blobs/sha256/{digest.removeprefix('sha256:')}"]
            assert blob is not None
            return blob.read()

        index = blobs["index.json"]
        assert index is not None
        [entry] = json.loads(index.read())["manifests"]
        for layer in json.loads(read(entry["digest"]))["layers"]:
            with tarfile.open(fileobj=io.BytesIO(read(layer["digest"]))) as found:
                yield found


def run(root: Path, *command: str, user: str = "65532:65532") -> subprocess.CompletedProcess[str]:
    """The command in the image's file system, alone."""
    whole = [CHROOT, f"--userspec={user}", str(root), *command]
    return subprocess.run(whole, env={"PATH": "/usr/bin"}, capture_output=True, text=True, timeout=120, check=False)


def test_nothing_in_it_gives_rights_to_whoever_runs_or_writes_it(members: list[tarfile.TarInfo]) -> None:
    modes = {member.name: member.mode for member in members if not member.issym()}
    assert not [
        name for name, mode in modes.items() if mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IWGRP | stat.S_IWOTH)
    ]
    assert {(member.uid, member.gid) for member in members} == {(0, 0)}
    assert all(member.isfile() or member.isdir() or member.issym() for member in members)


def test_its_programs_are_python_and_tessera(members: list[tarfile.TarInfo]) -> None:
    programs = {member.name for member in members if "bin" in Path(member.name).parent.parts and not member.isdir()}
    assert programs == {"usr/bin/python3.11", "usr/bin/tessera"}


def test_it_has_no_installer_and_no_compiler_in_python_either(root: Path) -> None:
    for module in ("pip", "setuptools", "ensurepip", "uv"):
        assert "No module named" in run(root, "/usr/bin/python3.11", "-m", module).stderr


def test_every_library_finds_those_it_needs(root: Path) -> None:
    [loader] = {f"/{path.relative_to(root)}" for path in root.glob("usr/lib*/ld-linux-*")}
    found = [path for path in root.rglob("*.so*") if path.is_file() and not path.is_symlink()]
    assert len(found) > 50
    answers = {path: run(root, loader, "--list", f"/{path.relative_to(root)}") for path in found}
    assert not [
        f"{path}: {done.stdout}{done.stderr}"
        for path, done in answers.items()
        if "not found" in done.stdout + done.stderr
    ]


def test_all_of_tessera_can_be_imported_and_nothing_is_compiled_then(root: Path) -> None:
    before = listing(root)
    done = run(root, "/usr/bin/python3.11", "-c", IMPORT_ALL, user="0:0")
    assert done.returncode == 0, done.stderr
    assert listing(root) == before


def test_whoever_runs_it_gets_the_command(root: Path) -> None:
    done = run(root, "/usr/bin/tessera", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "controller" in done.stdout


def test_its_bill_of_materials_names_every_package_with_its_version(built: Built, root: Path) -> None:
    bill = json.loads(built.sbom.read_text())
    assert (root / sbom.PLACE).read_text() == built.sbom.read_text()
    components = {component["name"]: component for component in bill["components"]}
    debian = {name for name, each in components.items() if each["purl"].startswith("pkg:deb/")}
    assert debian == set(recipe.packages()) == {file.name for file in (root / "var/lib/dpkg/status.d").iterdir()}
    assert all(len(components[name]["hashes"][0]["content"]) == 64 for name in debian)
    locked = {line.split()[0] for line in recipe.LOCK.read_text().splitlines() if "==" in line}
    assert {f"{name}=={each['version']}" for name, each in components.items() if name not in debian} == locked
    assert bill["metadata"]["component"]["name"] == "tessera-dra"


def test_the_list_of_files_is_what_is_in_it(built: Built, root: Path) -> None:
    assert built.files.read_text().splitlines() == [str(entry) for entry in listing(root)]


def test_a_second_build_without_a_change_builds_nothing(built: Built) -> None:
    assert ensure_image(CACHE, [IMAGE], refused) == built


@contextmanager
def refused(step: str) -> Iterator[None]:
    raise AssertionError(f"{step} was made again")
    yield


@pytest.mark.slow
def test_two_builds_of_the_same_are_the_same(built: Built, tmp_path: Path) -> None:
    again = ensure_image(tmp_path, [IMAGE])
    assert again.files.read_text() == built.files.read_text()
    assert again.digest == built.digest
    assert os.path.samestat(tmp_path.stat(), again.folder.parents[1].stat())
