"""The container image's recipe: what goes in, and that its two builds, Dockerfile and ``make image``, can't part."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shlex
import tarfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.image import build, debian, oci, recipe
from tests.image.architecture import ARM64, native
from tests.image.tree import Pruning, divide, listing, prune, settle

DOCKERFILE = (recipe.LISTS / "Dockerfile").read_text()


def locked(file: Path) -> dict[str, str]:
    """Every pinned distribution with its version and hashes."""
    text = re.sub(r"^ *#.*\n", "", file.read_text(), flags=re.MULTILINE)
    pins = re.split(r"\n(?=\S)", text.strip())
    return {pin.partition("==")[0]: pin for pin in pins}


def needed(name: str) -> set[str]:
    """All distributions that ``name`` and those below it need here."""
    found: set[str] = set()
    ahead = [name]
    while ahead:
        wanted = [Requirement(text) for text in requires(ahead.pop()) or ()]
        names = {
            each.name.lower().replace("_", "-") for each in wanted if each.marker is None or each.marker.evaluate()
        }
        ahead += names - found
        found |= names
    return found


def instructions(name: str) -> list[str]:
    """What the last stage of the Dockerfile says with this instruction."""
    last = DOCKERFILE.replace("\\\n", " ").rpartition("\nFROM ")[2]
    return [line.removeprefix(f"{name} ") for line in last.splitlines() if line.startswith(f"{name} ")]


def test_the_image_gets_what_the_tests_ran_with() -> None:
    everything, image = locked(recipe.BUILD_LOCK), locked(recipe.LOCK)
    assert {name: everything[name] for name in image} == image


def test_the_image_gets_what_tessera_needs_at_run_time_and_no_more() -> None:
    assert locked(recipe.LOCK).keys() == needed("tessera-dra")


def test_an_image_by_dockerfile_is_run_as_one_by_make_image() -> None:
    assert [json.loads(line) for line in instructions("ENTRYPOINT")] == [build.CONFIG["Entrypoint"]]
    assert instructions("USER") == [build.CONFIG["User"]]
    assert instructions("ENV") == build.CONFIG["Env"]
    assert instructions("WORKDIR") == [build.CONFIG["WorkingDir"]]
    labels = dict(pair.split("=", 1) for line in instructions("LABEL") for pair in shlex.split(line))
    assert labels == build.CONFIG["Labels"]


def test_an_image_by_dockerfile_has_the_layers_of_the_recipe() -> None:
    assert instructions("COPY") == [f"--from=build /layers/{layer} /" for layer in recipe.LAYERS]
    assert "python -m tests.image.recipe /layers" in DOCKERFILE


def test_docker_is_shown_everything_that_the_image_depends_on() -> None:
    shown = {line[1:] for line in (recipe.PROJECT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert shown == {*build.SOURCES, *build.FILES, "tests/__init__.py"}


def test_the_last_pattern_that_matches_decides() -> None:
    pruning = Pruning("# licences stay\nusr/share/*\n!usr/share/doc/*/copyright\n")
    assert pruning.leaves_out("usr/share/man/man1/python.1")
    assert not pruning.leaves_out("usr/share/doc/zlib1g/copyright")
    assert not pruning.leaves_out("usr/bin/python3.11")


def test_folders_that_lose_all_their_files_go_too(tmp_path: Path) -> None:
    write(tmp_path, "usr/share/man/man1/x", "usr/lib/x")
    prune(tmp_path, Pruning("usr/share/*"))
    assert [entry.path for entry in listing(tmp_path)] == ["usr", "usr/lib", "usr/lib/x"]


def test_files_of_two_builds_differ_in_nothing(tmp_path: Path) -> None:
    for name, mode in (("one", 0o600), ("two", 0o666)):
        root = tmp_path / name
        write(root, "a/data", "a/tool")
        (root / "a/data").chmod(mode)
        (root / "a/tool").chmod(mode | 0o100)
        settle(root)
    assert listing(tmp_path / "one") == listing(tmp_path / "two")
    assert {path.stat().st_mtime for path in (tmp_path / "one").rglob("*")} == {0}
    assert oci.tar_of(tmp_path / "one") == oci.tar_of(tmp_path / "two")
    assert [oct(entry.mode & 0o7777) for entry in listing(tmp_path / "one")] == ["0o755", "0o644", "0o755"]


def test_each_file_and_each_empty_folder_is_in_one_layer(tmp_path: Path) -> None:
    root, layers = tmp_path / "root", tmp_path / "layers"
    site = "usr/local/lib/python3.11/dist-packages"
    write(root, "usr/bin/tessera", "usr/bin/python3.11", f"{site}/grpc/a.py", f"{site}/driver/a.py",
          f"{site}/tessera_dra-1.dist-info/RECORD")  # fmt: skip
    (root / "tmp").mkdir()
    divide(root, layers, recipe.layer_of)
    found = {
        layer: {e.path for e in listing(layers / layer) if not e.path.endswith(("usr", "bin", "lib"))}
        for layer in recipe.LAYERS
    }
    assert {"tmp", "usr/bin/python3.11"} == found["debian"]
    assert f"{site}/grpc/a.py" in found["python"]
    assert {"usr/bin/tessera", f"{site}/driver/a.py", f"{site}/tessera_dra-1.dist-info/RECORD"} <= found["tessera"]


@pytest.mark.parametrize("layer", [oci.Layer.plain, oci.Layer.compressed])
def test_an_archive_names_its_image_and_every_blob_is_what_its_name_says(layer: type[oci.Layer]) -> None:
    image = oci.Image.of([layer(oci.tar({"a": (b"a", 0o644)}))], build.CONFIG, ARM64)  # type: ignore[call-arg]
    with tarfile.open(fileobj=io.BytesIO(image.archive(["docker.io/library/x:1"]))) as archive:
        blobs = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    [entry] = json.loads(blobs["index.json"])["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == "docker.io/library/x:1"
    assert entry["digest"] == image.digest
    named = {f"sha256:{Path(name).name}": blob for name, blob in blobs.items() if name.startswith("blobs/")}
    assert all(oci.digest(blob) == name for name, blob in named.items())
    config = json.loads(named[json.loads(named[image.digest])["config"]["digest"]])
    assert (config["config"], config["architecture"]) == (build.CONFIG, "arm64")


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


APT = """#!/bin/sh
case "$*" in
  *--print-uris*) echo "'http://mirror/a_$(cat {lists})_all.deb' a_$(cat {lists})_all.deb 2 SHA256:{sha}" ;;
  *update*) echo 2 > {lists} ;;
  *a=2*) printf ok > a_2_all.deb ;;
  *) echo "404 Not Found" >&2; exit 100 ;;
esac
"""
"""An apt whose lists name version 1, of which the mirror has only 2."""


def test_lists_that_are_older_than_the_mirror_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists, program, sha = tmp_path / "lists", tmp_path / "apt-get", hashlib.sha256(b"ok").hexdigest()
    lists.write_text("1")
    program.write_text(APT.format(lists=lists, sha=sha))
    program.chmod(0o755)
    monkeypatch.setattr(debian, "APT_GET", str(program))
    assert debian.Apt(tmp_path / "debs", native()).ready(["a"]) == [debian.Archive("a_2_all.deb", sha)]
    assert (tmp_path / "debs" / "a_2_all.deb").read_text() == "ok"
