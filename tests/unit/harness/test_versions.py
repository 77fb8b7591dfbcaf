"""``make test-versions`` and ``make test-smoke``, with a shell in place of pytest."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests import versions
from tests.harness.binaries import cached
from tests.harness.settings import Settings
from tests.harness.versions import OLDER

TESTS = 'echo "== 3 tests on $KUBE =="; test "$KUBE$TESSERA_BINARIES" = 1.34.4 || test "$KUBE" = 1.36.3'


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home with every version in its cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TESSERA_BINARIES", "/programs of another version")
    monkeypatch.setattr(versions, "PYTEST", ("sh", "-c", TESTS))
    folder = Settings().cache
    for release in OLDER:
        cached(release, folder).mkdir(parents=True)
    return folder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(versions.main, arguments)


def test_a_version_that_fails_does_not_keep_others_from_being_tested_and_is_told_in_the_end() -> None:
    answer = run()
    assert answer.exit_code == 1
    assert "\nKubernetes 1.34.4 (1 of 3)\n" in answer.output
    summary = [line.partition(" (")[0] for line in answer.output.splitlines()[-3:]]
    assert summary == [
        "Kubernetes 1.34.4: ok, 3 tests on 1.34.4",
        "Kubernetes 1.35.4: FAILED, 3 tests on 1.35.4",
        "Kubernetes 1.36.3: ok, 3 tests on 1.36.3",
    ]


def test_the_smoke_tests_run_on_one_version_if_it_is_built(cache: Path) -> None:
    answer = run("--smoke")
    assert answer.exit_code == 1, "the tests of 1.35.4 fail here"
    assert "Kubernetes 1.35.4: FAILED, 3 tests on 1.35.4" in answer.output
    cached(versions.SMOKE_RELEASE, cache).rmdir()
    answer = run("--smoke")
    assert answer.exit_code == 0
    assert answer.output == "Kubernetes 1.35.4 is not built: smoke tests skipped (make binaries KUBE=1.35.4)\n"
