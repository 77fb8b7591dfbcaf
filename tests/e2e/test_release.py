"""What ``make release`` builds: files that fit each other, the same each time."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.image import recipe, wheels
from tests.image.architecture import ARCHITECTURES
from tests.release import chart
from tests.release.build import Dist, write
from tests.support.in_pods import CACHE

# Not because of a cluster: it needs root, Debian and its packages, as a cluster does.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

REPOSITORY = "registry.example/gpu/tessera"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Dist:
    return write(CACHE, tmp_path_factory.mktemp("dist"), REPOSITORY)


def descriptors(archive: Path) -> list[dict[str, Any]]:
    """What the archive's own index lists."""
    with tarfile.open(archive) as files:
        index = files.extractfile("index.json")
        assert index is not None
        manifests: list[dict[str, Any]] = json.loads(index.read())["manifests"]
        return manifests


def test_the_checksums_fit_all_files(dist: Dist) -> None:
    done = subprocess.run(
        ["/usr/bin/sha256sum", "--check", "--strict", dist.sums.name], cwd=dist.folder, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert {file.name for file in dist.folder.iterdir()} == {*(file.name for file in dist.files), dist.sums.name}


def test_the_chart_installs_the_images_of_the_archives(dist: Dist) -> None:
    assert chart.images(dist.chart) == {dist.image}
    for archive in (dist.archive(), *map(dist.archive, ARCHITECTURES)):
        assert {f"{REPOSITORY}@{entry['digest']}" for entry in descriptors(archive)} == {dist.image}


def test_the_same_sources_make_the_same_files(dist: Dist, tmp_path: Path) -> None:
    assert write(CACHE, tmp_path, REPOSITORY).sums.read_text() == dist.sums.read_text()


def test_a_second_build_of_the_wheel_is_the_same(dist: Dist, tmp_path: Path) -> None:
    wheels.build_project(recipe.PROJECT, recipe.BUILD_LOCK, tmp_path)
    assert (tmp_path / dist.wheel.name).read_bytes() == dist.wheel.read_bytes()


def test_the_wheel_installs_the_command(dist: Dist, tmp_path: Path) -> None:
    uv = [sys.executable, "-m", "uv", "--quiet"]
    subprocess.run([*uv, "venv", "--python", sys.executable, str(tmp_path)], check=True)
    target = ["--python", str(tmp_path / "bin/python"), "--constraint", str(recipe.LOCK)]
    subprocess.run([*uv, "pip", "install", *target, str(dist.wheel)], check=True)
    done = subprocess.run([str(tmp_path / "bin/tessera"), "--version"], capture_output=True, text=True, check=True)
    assert dist.version in done.stdout


@pytest.mark.slow
def test_a_release_built_from_nothing_is_the_same(dist: Dist, tmp_path: Path) -> None:
    again = write(tmp_path / "cache", tmp_path / "dist", REPOSITORY)
    assert again.sums.read_text() == dist.sums.read_text()
