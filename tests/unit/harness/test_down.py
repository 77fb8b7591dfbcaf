"""``make cluster-down`` with a name that no cluster has."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.harness import __main__ as command


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command, "BASE", tmp_path)
    return tmp_path


def down(*arguments: str) -> Result:
    return CliRunner().invoke(command.main, ["down", *arguments])


def test_a_wrong_name_fails_and_the_right_ones_are_told(base: Path) -> None:
    for name in ("demo-54", "demo-helm"):
        (base / name).mkdir()
    answer = down("--name", "no-such-one")
    assert answer.exit_code == 1
    assert answer.output == (
        "no cluster no-such-one is here; there are: demo-54, demo-helm (make cluster-down NAME=demo-54)\n"
    )
    assert sorted(each.name for each in base.iterdir()) == ["demo-54", "demo-helm"], "and nothing is left of it"


def test_where_there_is_no_cluster_at_all_it_says_so(base: Path) -> None:
    answer = down()
    assert (answer.exit_code, answer.output) == (1, "no cluster tessera is here; there is none at all\n")


def test_who_does_not_mind_is_told_the_same_without_an_error(base: Path) -> None:
    assert down("--name", "no-such-one", "--if-there").exit_code == 0


def test_all_of_none_is_fine(base: Path) -> None:
    assert (down("--all").exit_code, list(base.iterdir())) == (0, [])
