"""The parts of a release: a chart that names its image, images that are for their machine, and how it is published."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from driver.errors import EnvironmentFault
from tests.image import oci
from tests.image.architecture import AMD64, ARCHITECTURES, ARM64, Verified, native, verify
from tests.image.recipe import PROJECT
from tests.release import chart

DIGEST = f"sha256:{'5a' * 32}"
REPOSITORY = "registry.example/gpu/tessera"
VERSION = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())["version"]
WORKFLOW = PROJECT / ".github" / "workflows" / "release.yml"
JOBS: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]
PROGRAM = Path("/bin/true").resolve()
PINNED = re.compile(r"^ +- uses: [a-z/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    file = tmp_path / f"tessera-{VERSION}.tgz"
    file.write_bytes(chart.package(REPOSITORY, DIGEST, VERSION))
    return file


def test_the_packaged_chart_installs_the_image_of_its_release(package: Path) -> None:
    assert chart.images(package) == {f"{REPOSITORY}@{DIGEST}"}


def test_the_packaged_chart_is_the_same_each_time(package: Path) -> None:
    assert chart.package(REPOSITORY, DIGEST, VERSION) == package.read_bytes()


def test_the_packaged_chart_differs_from_the_chart_in_nothing_but_its_image(package: Path) -> None:
    packaged, here = helm_python.Chart.load(package).values, helm_python.Chart.load(chart.CHART).values
    assert packaged | {"image": None} == here | {"image": None}
    assert packaged["image"] == here["image"] | {"repository": REPOSITORY, "digest": DIGEST}
    with tarfile.open(package) as files:
        names = {member.name for member in files}
    assert names == {f"tessera/{path.relative_to(chart.CHART)}" for path in chart.CHART.rglob("*") if path.is_file()}


def test_a_chart_of_another_version_is_not_packaged() -> None:
    with pytest.raises(
        EnvironmentFault, match=rf"Chart.yaml: version is {re.escape(VERSION)}, .* is 9\.9\.9; make them"
    ):
        chart.package(REPOSITORY, DIGEST, "9.9.9")


WRONG: dict[str, tuple[str, Callable[[Path], None]]] = {
    "program": ("usr/bin/python3.11: ELF machine", lambda root: copy(root, "usr/bin/python3.11")),
    "library": ("grpc/cygrpc.so: ELF machine", lambda root: copy(root, "grpc/cygrpc.so")),
    "wheel": ("grpcio-1.dist-info/WHEEL: wheel for manylinux_2_17_s390x",
              lambda root: wheel(root, "grpcio-1.dist-info", "manylinux_2_17_s390x")),
    "one tag of a wheel": ("wheel for manylinux_2_17_aarch64, manylinux_2_17_s390x",
                           lambda root: wheel(root, "x.dist-info", "manylinux_2_17_aarch64", "manylinux_2_17_s390x")),
}  # fmt: skip
FOREIGN = next(machine for machine in ARCHITECTURES if machine != native())


def copy(root: Path, name: str) -> None:
    """A program of this machine."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(PROGRAM, root / name)


def wheel(root: Path, name: str, *platforms: str) -> None:
    """What a wheel with tags of these platforms leaves when it is installed."""
    (root / name).mkdir()
    tags = "".join(f"Tag: cp311-cp311-{platform}\n" for platform in platforms)
    (root / name / "WHEEL").write_text(f"Wheel-Version: 1.0\n{tags}")


@pytest.mark.parametrize("case", WRONG)
def test_a_file_for_another_machine_is_refused(case: str, tmp_path: Path) -> None:
    said, put = WRONG[case]
    put(tmp_path)
    with pytest.raises(EnvironmentFault, match=f"1 files are not for {FOREIGN.name} .*{said}"):
        verify(tmp_path, FOREIGN)


def test_files_for_the_machine_and_for_any_are_counted(tmp_path: Path) -> None:
    copy(tmp_path, "usr/bin/python3.11")
    wheel(tmp_path, "a.dist-info", f"manylinux_2_17_{native().machine}", f"manylinux2014_{native().machine}")
    wheel(tmp_path, "b.dist-info", "any")
    assert verify(tmp_path, native()) == Verified(elf_files=1, wheels=2)


def test_an_archive_for_one_machine_names_the_index_of_all_and_has_one_image() -> None:
    images = {
        machine: oci.Image.of([oci.Layer.plain(oci.tar({"a": (machine.name.encode(), 0o644)}))], {}, machine)
        for machine in (AMD64, ARM64)
    }
    index = oci.Image.index(list(images.values()))
    with tarfile.open(fileobj=io.BytesIO(index.only(images[ARM64]).archive(["x:1"]))) as archive:
        names = {member.name.replace("blobs/sha256/", "sha256:") for member in archive}
        [entry] = json.load(archive.extractfile("index.json"))["manifests"]  # type: ignore[arg-type]
    assert entry["digest"] == index.digest
    listed = json.loads(index.blobs[index.digest])["manifests"]
    assert [(item["platform"]["architecture"], item["digest"]) for item in listed] == [
        (machine.name, image.digest) for machine, image in images.items()
    ]
    assert names >= {index.digest, *images[ARM64].blobs}
    assert not names & images[AMD64].blobs.keys()


def test_the_workflow_pins_what_it_uses_and_may_write_only_where_it_publishes() -> None:
    lines = [line for line in WORKFLOW.read_text().splitlines() if "uses:" in line]
    assert lines
    assert [line for line in lines if not PINNED.match(line)] == []
    assert {name: job["permissions"] for name, job in JOBS.items()} == {
        "build": {"contents": "read"},
        "registry": {"packages": "write"},
        "files": {"contents": "write"},
    }
    assert yaml.safe_load(WORKFLOW.read_text())["permissions"] == {}
