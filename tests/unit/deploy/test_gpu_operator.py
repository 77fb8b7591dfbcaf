"""The values for a cluster with NVIDIA's GPU Operator: what they make of the chart, and what the docs say of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.chart import Values, rendered

PROJECT = Path(__file__).parents[3]
EXAMPLES = PROJECT / "deploy" / "examples" / "gpu-operator"
DOCS = (PROJECT / "docs" / "migrate.md").read_text()
ROW = re.compile(r"\| `([A-Za-z.]+)` \| `([^`]+)` \| `[^`]+` \|")


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """As helm merges two files of values."""
    both = {
        key: merged(first[key], value) if isinstance(first.get(key), dict) else value for key, value in second.items()
    }
    return {**first, **both}


def values_of(*names: str) -> Values:
    values: dict[str, Any] = {}
    for name in names:
        values = merged(values, yaml.safe_load((EXAMPLES / f"{name}-values.yaml").read_text()))
    return values


def node_plugin(*names: str) -> Mapping[str, Any]:
    objects = rendered(values_of(*names))
    [daemon_set] = (item for item in objects if item["kind"] == "DaemonSet")
    pod: Mapping[str, Any] = daemon_set["spec"]["template"]["spec"]
    return pod


def test_the_plugin_finds_the_operators_driver_and_leaves_before_it_is_unloaded() -> None:
    pod = node_plugin("tessera")
    assert "--driver-root=/run/nvidia/driver" in pod["containers"][0]["args"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.deploy.client": "true"}
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in pod["tolerations"]


def test_while_nodes_move_the_plugin_runs_only_where_the_command_has_set_its_label() -> None:
    ours = {"gpu.tessera.dev/node": "true"}
    assert node_plugin("tessera", "moving")["nodeSelector"] == {"nvidia.com/gpu.deploy.client": "true", **ours}
    assert node_plugin("moving")["nodeSelector"] == ours


def leaves(content: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value if isinstance(value, str) else json.dumps(value)


def test_each_value_for_the_operator_has_its_row_in_the_docs() -> None:
    documented = dict(ROW.findall(DOCS))
    assert documented == dict(leaves(values_of("gpu-operator")))
