"""``tessera version``: what it says with a cluster, without rights, and without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from tessera.cli import main
from tests.support.api_server import Exchange, ObjectApi
from tests.unit.tessera.test_cli import KUBECONFIG

PODS = "/api/v1/namespaces/tessera/pods"


def asked(folder: Path, *flags: str, url: str = "https://127.0.0.1:1") -> list[dict[str, Any]]:
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump({**KUBECONFIG, "clusters": [{"name": "c", "cluster": {"server": url}}]}))
    answer = CliRunner().invoke(main, ["version", "--kubeconfig", str(file), "-o", "json", *flags])
    assert answer.exit_code == 0, answer.output
    said: list[dict[str, Any]] = json.loads(answer.stdout)
    return said


def test_the_versions_of_the_command_need_no_cluster(tmp_path: Path) -> None:
    said = asked(tmp_path, "--client")
    assert {line["where"] for line in said} == {"this command"}
    assert {"Python", "tessera-dra", "nvidia-ml-py"} <= {line["what"] for line in said}


def test_a_cluster_that_does_not_answer_is_named_with_the_error(tmp_path: Path) -> None:
    last = asked(tmp_path)[-1]
    assert (last["where"], last["what"]) == ("cluster", "unknown")
    assert last["version"]


def test_images_of_pods_are_counted_and_a_missing_right_is_named(tmp_path: Path) -> None:
    with ObjectApi() as api:
        for name, image in (("a", "tessera:1"), ("b", "tessera:1"), ("c", "tessera:2")):
            api.store(f"{PODS}/{name}", spec={"containers": [{"image": image}]})
        said = asked(tmp_path, url=api.server.url)
        assert [(line["what"], line["version"]) for line in said if line["what"].startswith("image")] == [
            ("image of 2 pods", "tessera:1"),
            ("image of 1 pod", "tessera:2"),
        ]

        def refuse(exchange: Exchange) -> None:
            exchange.refuse(403, "this account may not list pods")

        api.once("list", refuse)
        assert "may not list pods" in asked(tmp_path, url=api.server.url)[-1]["version"]
