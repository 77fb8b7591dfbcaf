"""The built container image: what is in it, what is not, and that it runs."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.image import recipe, sbom
from tests.image.architecture import AMD64, ARM64, Architecture, native
from tests.image.build import Built, ensure_image
from tests.image.debian import Apt, unpack
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


Run = Callable[..., subprocess.CompletedProcess[str]]
MACHINES = [
    pytest.param(machine, marks=[pytest.mark.slow] if machine != native() else []) for machine in (AMD64, ARM64)
]
"""The programs of an image for another machine are emulated, which takes ten times as long."""


@pytest.fixture(scope="module", params=MACHINES, ids=lambda machine: machine.name)
def architecture(request: pytest.FixtureRequest) -> Architecture:
    machine: Architecture = request.param
    return machine


@pytest.fixture(scope="module")
def built(architecture: Architecture) -> Built:
    return ensure_image(CACHE, [IMAGE], architecture=architecture)


@pytest.fixture(scope="module")
def emulator(architecture: Architecture, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A program that runs those of ``architecture``, if this machine can not."""
    if architecture == native():
        return None
    debs, folder = CACHE / "emulator", tmp_path_factory.mktemp("emulator")
    [package] = Apt(debs, native()).ready(["qemu-user-static"])
    unpack(debs / package.file, folder)
    return folder / f"usr/bin/qemu-{architecture.machine}-static"


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


@pytest.fixture
def run(root: Path, emulator: Path | None) -> Run:
    """A command in the image's file system, alone; an emulator is there only while it runs."""
    guest = root / "emulator"

    def run_alone(*command: str, user: str = "65532:65532") -> subprocess.CompletedProcess[str]:
        whole = [CHROOT, f"--userspec={user}", str(root), *command]
        if emulator:
            shutil.copy(emulator, guest)
            whole[3:3] = ["/emulator", *interpreter(root / command[0].removeprefix("/"))]
        try:
            return subprocess.run(
                whole, env={"PATH": "/usr/bin"}, capture_output=True, text=True, timeout=120, check=False
            )
        finally:
            guest.unlink(missing_ok=True)

    return run_alone


def interpreter(program: Path) -> list[str]:
    """What Linux starts for a script, and an emulator does not."""
    first, _, _ = program.read_bytes().partition(b"\n")
    return first.removeprefix(b"#!").decode().split() if first.startswith(b"#!") else []


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


def test_it_has_no_installer_and_no_compiler_in_python_either(run: Run) -> None:
    for module in ("pip", "setuptools", "ensurepip", "uv"):
        assert "No module named" in run("/usr/bin/python3.11", "-m", module).stderr


def test_every_library_finds_those_it_needs(root: Path, run: Run) -> None:
    [loader] = {f"/{path.relative_to(root)}" for path in root.glob("usr/lib*/ld-linux-*")}
    found = [path for path in root.rglob("*.so*") if path.is_file() and not path.is_symlink()]
    assert len(found) > 50
    answers = {path: run(loader, "--list", f"/{path.relative_to(root)}") for path in found}
    assert not [
        f"{path}: {done.stdout}{done.stderr}"
        for path, done in answers.items()
        if "not found" in done.stdout + done.stderr
    ]


def test_all_of_tessera_can_be_imported_and_nothing_is_compiled_then(root: Path, run: Run) -> None:
    before = listing(root)
    done = run("/usr/bin/python3.11", "-c", IMPORT_ALL, user="0:0")
    assert done.returncode == 0, done.stderr
    assert listing(root) == before


def test_whoever_runs_it_gets_the_command(run: Run) -> None:
    done = run("/usr/bin/tessera", "--help")
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


def test_bytecode_does_not_depend_on_the_machine_that_compiled_it() -> None:
    compiled = [bytecode(ensure_image(CACHE, [IMAGE], architecture=machine).files) for machine in (AMD64, ARM64)]
    in_both = compiled[0].keys() & compiled[1].keys()
    assert len(in_both) > 2000
    assert [name for name in in_both if compiled[0][name] != compiled[1][name]] == []
    only_one = {Path(name).name.partition(".")[0] for name in compiled[0].keys() ^ compiled[1].keys()}
    assert all(name.startswith("_sysconfigdata_") for name in only_one), only_one


def bytecode(files: Path) -> dict[str, str]:
    """The hash of each compiled module, by its path."""
    lines = (line.split() for line in files.read_text().splitlines() if line.endswith(".pyc"))
    return {path: content for _, _, content, path in lines}


def test_a_second_build_without_a_change_builds_nothing(built: Built, architecture: Architecture) -> None:
    assert ensure_image(CACHE, [IMAGE], refused, architecture) == built


@contextmanager
def refused(step: str) -> Iterator[None]:
    raise AssertionError(f"{step} was made again")
    yield


@pytest.mark.slow
def test_two_builds_of_the_same_are_the_same(built: Built, architecture: Architecture, tmp_path: Path) -> None:
    again = ensure_image(tmp_path, [IMAGE], architecture=architecture)
    assert again.files.read_text() == built.files.read_text()
    assert again.digest == built.digest
    assert os.path.samestat(tmp_path.stat(), again.folder.parents[1].stat())
