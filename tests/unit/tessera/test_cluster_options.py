"""The commands for admins ask the cluster that kubectl would ask."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tessera.cli import main
from tests.harness.certs import Authority

NOBODY = "https://127.0.0.1:1"


ASKING = [
    "status",
    "uninstall --check",
    "cordon node-a/gpu-0",
    "uncordon node-a/gpu-0",
    "drain node-a/gpu-0",
    "sim fleet --nodes 1",
]

each_that_asks = pytest.mark.parametrize("command", ASKING)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of somebody who has no kubeconfig yet, on no cluster's node."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def kubeconfig(folder: Path) -> Path:
    """Of a cluster whose API server is down."""
    authority = str(Authority(folder / "ca").pair.certificate)
    config = {
        "clusters": [{"name": "c", "cluster": {"server": NOBODY, "certificate-authority": authority}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = folder / ".kube" / "config"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(config))
    return path


@each_that_asks
def test_without_a_kubeconfig_they_take_the_usual_one_and_say_that_nobody_answers(command: str, home: Path) -> None:
    kubeconfig(home)
    answer = CliRunner().invoke(main, command.split())
    assert answer.exit_code == 3
    assert f"no answer from {NOBODY}: Connection refused; check --kubeconfig" in answer.output
    assert "the cluster can't be reached" in answer.output


@each_that_asks
def test_who_has_no_kubeconfig_at_all_is_told_where_it_is_looked_for(command: str, home: Path) -> None:
    answer = CliRunner().invoke(main, command.split())
    assert answer.exit_code == 3
    assert "no kubeconfig: neither --kubeconfig, $KUBECONFIG nor ~/.kube/config, and not in a pod" in answer.output


@each_that_asks
def test_a_file_that_the_environment_names_is_blamed_on_the_environment(
    command: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(home / "gone"))
    answer = CliRunner().invoke(main, command.split())
    assert answer.exit_code == 3
    assert f"$KUBECONFIG {home / 'gone'} can't be used: No such file" in answer.output
    assert "--kubeconfig" not in answer.output


@each_that_asks
def test_the_help_says_where_the_kubeconfig_comes_from(command: str) -> None:
    words = command.split()[: 2 if command.startswith("sim") else 1]
    assert "Default: $KUBECONFIG, ~/.kube/config" in " ".join(
        CliRunner().invoke(main, [*words, "--help"]).output.split()
    )
