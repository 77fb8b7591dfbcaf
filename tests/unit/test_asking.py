"""The commands for admins ask the cluster that kubectl would ask."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tessera.cli import main
from tests.harness.certs import Authority

NOBODY = "https://127.0.0.1:1"


@pytest.mark.parametrize("command", ["status", "uninstall --check", "cordon node-a/gpu-0", "uncordon node-a/gpu-0"])
def test_without_a_kubeconfig_they_take_the_usual_one(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = str(Authority(tmp_path / "ca").pair.certificate)
    config = {
        "clusters": [{"name": "c", "cluster": {"server": NOBODY, "certificate-authority": authority}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    answer = CliRunner().invoke(main, command.split())
    assert NOBODY in answer.output
    assert answer.exit_code != 0
