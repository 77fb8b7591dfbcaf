"""Demos of several people on one machine, and what a demo names at its end."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import helm_python
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from tests.demo import __main__ as demo
from tests.demo import curation, fifty_four, helm, preempt, usage
from tests.demo.screen import Screen
from tests.harness import claim, cluster, preflight, settings
from tests.harness.processes import record_of
from tests.harness.state import ClusterState
from tests.support.in_pods import Release, values

DEMOS = {
    "demo": demo.main,
    "demo-54": fifty_four.main,
    "demo-curation": curation.main,
    "demo-helm": helm.main,
    "demo-preempt": preempt.main,
    "demo-usage": usage.main,
}


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of all clusters, on a machine that can run them; ``tmp_path`` is too long for sockets."""
    monkeypatch.setattr(preflight, "prepare", lambda *_: None)
    before = signal.getsignal(signal.SIGTERM)
    with TemporaryDirectory() as folder:
        monkeypatch.setattr(cluster, "ensure_binaries", lambda *_: Path(folder))
        for module in (claim, settings):
            monkeypatch.setattr(module, "BASE", Path(folder))
        yield Path(folder)
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("arguments", [[], ["--name", "mine"]], ids=["default", "mine"])
@pytest.mark.parametrize(("default", "main"), DEMOS.items(), ids=DEMOS)
def test_a_demo_whose_name_is_taken_says_at_once_how_to_choose_another(
    base: Path, state: ClusterState, default: str, main: click.Command, arguments: list[str]
) -> None:
    name = arguments[-1] if arguments else default
    (base / name).mkdir()
    running = replace(state, directory=str(base / name), owner=record_of("owner", os.getpid()))
    running.write()
    answer = CliRunner().invoke(main, arguments)
    assert answer.exit_code == 2
    assert answer.stderr.endswith(
        f"cluster {name} runs already; choose another name for yours (NAME=...), "
        f"or end that one with `make cluster-down NAME={name}`\n"
    )
    assert "took" not in answer.output, "no step has been taken"
    assert (base / name / "state.json").exists(), "the other cluster is left alone"


def test_the_picture_of_demo_usage_is_where_the_demo_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    [image] = [option.default for option in usage.main.params if option.name == "image"]
    usage._draw(Screen(), Path(str(image)), [])
    [said] = re.findall(r"The picture is in\s+(\S+)\.", capsys.readouterr().out)
    assert [tmp_path / said] == list(tmp_path.iterdir()), "the folder in which make runs, not that of the cluster"


def test_demo_helm_prints_a_command_with_all_values_that_it_installs(state: ClusterState) -> None:
    release = Release(cluster.Cluster(state), helm.GPUS)
    words = shlex.split(release.helm_command().replace("\\\n", ""))
    assert words[:7] == ["helm", "install", "tessera", "deploy/tessera", "-n", "tessera", "--create-namespace"]
    assert set(words[7::2]) == {"--set-json"}
    installed = {key: value for word in words[8::2] for key, value in helm_python.parse_set_json(word).items()}
    assert installed == values(helm.GPUS)
