"""What ``make cluster-up`` prints, ``make cluster-down`` with a name that no cluster has, and what make hands on."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from tessera.cli import main
from tessera.cli import node as node_plugin
from tests.harness import __main__ as command
from tests.harness.cluster import Cluster
from tests.harness.state import ClusterState

PROJECT = Path(__file__).parents[3]


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


def plugins(state: ClusterState) -> list[dict[str, Any]]:
    """The options of the node plugins that the lines of ``up`` start, as `tessera node` reads them."""
    commands = [shlex.split(line)[1:] for line in command._how_to_use(Cluster(state)) if "tessera node" in line]
    ends_with_cluster = f"TESSERA_TEST_CLUSTER={state.directory}"
    assert all(words[:3] == [ends_with_cluster, ".venv/bin/tessera", "node"] for words in commands)
    # click keeps the help option of a command's first context: without a parent `-h` would be unknown to later tests.
    parent = click.Context(main, **main.context_settings)
    return [node_plugin.make_context("node", words[3:], parent=parent).params for words in commands]


def test_node_plugins_of_two_clusters_share_no_folder_when_started_as_printed(state: ClusterState) -> None:
    other = replace(state, directory=f"{state.directory}-other", network=4)
    started = [*plugins(state), *plugins(other)]
    assert [options["node_name"] for options in started] == ["node-0", "node-1"] * 2
    for folder in ("kubelet_dir", "cdi_dir", "host_root"):
        assert len({options[folder] for options in started}) == 4, folder
    kubeconfigs = [str(options["kubeconfig"]) for options in started]
    assert kubeconfigs == [f"{of.directory}/admin.kubeconfig" for of in (state, state, other, other)]


@pytest.mark.parametrize(
    ("goals", "arguments"),
    [
        ("demo", "tests.demo"),
        ("demo NAME=mine KEEP=1", "tests.demo --name mine --keep"),
        ("demo-54 NAME=mine", "tests.demo.fifty_four --name mine"),
        ("demo-54 NOTEBOOKS=memory", "tests.demo.fifty_four --notebooks memory"),
        ("demo-curation NAME=mine", "tests.demo.curation --name mine"),
        ("demo-helm NAME=mine", "tests.demo.helm --name mine"),
        ("demo-preempt NAME=mine KEEP=1", "tests.demo.preempt --name mine --keep"),
        ("bench-preempt CASES=8 PARTS=mix", "tests.bench.preempt --cases 8 --part mix"),
        ("demo-usage NAME=mine SVG=a.svg", "tests.demo.usage --name mine --svg a.svg"),
        ("cluster-up", "tests.harness up"),
        ("cluster-up NAME=mine NODES=3", "tests.harness up --name mine --nodes 3"),
        ("cluster-down NAME=mine", "tests.harness down --name mine"),
    ],
)
def test_make_hands_on_names_and_numbers(goals: str, arguments: str) -> None:
    dry_run = ["/usr/bin/make", "--dry-run", *goals.split()]
    done = subprocess.run(dry_run, cwd=PROJECT, env={"PATH": os.defpath}, capture_output=True, text=True, check=True)
    assert " ".join(done.stdout.splitlines()[-1].split()).endswith(f"python -m {arguments}")
