"""``tessera sim``: what people and scripts see of simulated nodes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from driver.errors import EnvironmentFault
from driver.simulator.node import SimulatedNode, describe
from tessera.sim.fault import find_roots
from tessera.sim.node_commands import holders, render, sim
from tessera.tables_and_drawings import Span, cell_width, draw_placement, draw_slices
from tests.support.nvml_client import G1, G3, create, cut, enable_mig, one_h100, process_on, start_process


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(sim, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    return one_h100(tmp_path / "node")


def test_list_names_the_nodes_and_what_they_are_made_of() -> None:
    lines = run("list").output.splitlines()
    assert lines[0].split() == ["NAME", "PRODUCT", "GPUS", "MEMORY", "DESCRIPTION"]
    dgx = next(line for line in lines if line.startswith("dgx-h100 "))
    assert re.split(r"  +", dgx)[:4] == ["dgx-h100", "NVIDIA H100 80GB HBM3", "8", "79.6 GiB"]


def test_list_as_json_is_a_list_of_objects() -> None:
    nodes = json.loads(run("list", "-o", "json").output)
    dgx = next(node for node in nodes if node["name"] == "dgx-h100")
    assert (dgx["product"], dgx["gpuCount"], dgx["memoryMiB"]) == ("NVIDIA H100 80GB HBM3", 8, 81559)
    assert "1g.10gb+me" in dgx["migProfiles"]


def test_smi_shows_gpus_partitions_and_how_they_lie(node: SimulatedNode) -> None:
    gpu = enable_mig(node.nvml)
    upper, lower = cut(node.nvml, gpu, G3, 4, 4), cut(node.nvml, gpu, G1, 0, 1)
    start_process(node, upper.uuid, pid=9, memory=3 * 2**30)
    output = run("smi", "--host-root", node.root).output
    assert "\x1b" not in output
    for text in (
        "1 x NVIDIA H100 80GB HBM3",
        node.description.gpu_uuid(0),
        "0000:1b:00.0",
        "3072 / 81559 MiB",
        "Enabled",
        upper.uuid,
        lower.uuid,
        "....#### 4:4",
        "#....... 0:1",
        "GPU 0  [1g.10gb|.......|.......|.......|3g.40gb------------------------]",
    ):
        assert text in output


def test_smi_says_that_there_are_no_partitions(node: SimulatedNode) -> None:
    output = run("smi", "--host-root", node.root).output
    assert "Disabled" in output
    assert output.endswith("No partitions.\n")


def test_smi_marks_a_mode_that_waits(node: SimulatedNode) -> None:
    gpu = node.nvml.nvmlDeviceGetHandleByIndex(0)
    with process_on(node, node.description.gpu_uuid(0)):
        node.nvml.nvmlDeviceSetMigMode(gpu, 1)
    output = run("smi", "--host-root", node.root).output
    assert "Disabled*" in output
    assert "another MIG mode is pending" in output


def test_smi_as_json_is_a_list_of_gpus(node: SimulatedNode) -> None:
    gpu = enable_mig(node.nvml)
    partition = cut(node.nvml, gpu, G3, 4, 4)
    create(node.nvml, gpu, G1, 0, 1)
    (shown,) = json.loads(run("smi", "--host-root", node.root, "-o", "json").output)
    assert (shown["node"], shown["index"], shown["migMode"]) == ("h100-1", 0, "Enabled")
    assert shown["migDevices"] == [
        {
            "gpuInstance": 7,
            "computeInstance": None,
            "profile": "1g.10gb",
            "placement": {"start": 0, "size": 1},
            "memory": 9984,
            "uuid": None,
            "holder": None,
            "processes": [],
        },
        {
            "gpuInstance": 1,
            "computeInstance": 0,
            "profile": "3g.40gb",
            "placement": {"start": 4, "size": 4},
            "memory": 40448,
            "uuid": partition.uuid,
            "holder": None,
            "processes": [],
        },
    ]


def test_smi_names_the_claims_that_hold_a_partition(node: SimulatedNode, tmp_path: Path) -> None:
    partition = cut(node.nvml, enable_mig(node.nvml), G3, 4, 4)
    device = {
        "requests": ["gpu"],
        "pool": "n1",
        "device": "gpu-0-mig-3g40gb-4",
        "number": 0,
        "gpuUUID": node.description.gpu_uuid(0),
        "kind": "mig",
        "profile": "3g.40gb",
        "uuid": partition.uuid,
    }
    write_claims(node, tmp_path / "state", device)
    assert "team-a/training" in run("smi", "--host-root", node.root).output
    assert holders(node.root) == {partition.uuid: "team-a/training"}


def test_smi_names_the_claim_that_holds_a_whole_gpu(node: SimulatedNode, tmp_path: Path) -> None:
    uuid = node.description.gpu_uuid(0)
    device = {"requests": ["gpu"], "pool": "n1", "device": "gpu-0", "number": 0, "gpuUUID": uuid, "kind": "gpu"}
    write_claims(node, tmp_path / "state", device)
    assert holders(node.root) == {uuid: "team-a/training"}


def write_claims(node: SimulatedNode, state: Path, device: dict[str, Any]) -> None:
    """A node plugin's files: one claim that can be read and one that can't."""
    (state / "claims").mkdir(parents=True)
    claim = {"version": 1, "namespace": "team-a", "name": "training", "uid": "u1", "phase": "prepared"}
    (state / "claims/u1.json").write_text(json.dumps(claim | {"devices": [device]}))
    (state / "claims/u2.json").write_text("{")
    (node.root / "sim/plugin.json").write_text(json.dumps({"stateDir": str(state), "driverName": "gpu.tessera.dev"}))


def test_nobody_holds_anything_without_a_plugin(node: SimulatedNode) -> None:
    assert holders(node.root) == {}
    (node.root / "sim/plugin.json").write_text("[]")
    assert holders(node.root) == {}


def test_colours_are_for_terminals_only(node: SimulatedNode) -> None:
    enable_mig(node.nvml)
    text = render(node, describe(node, {}))
    assert "\x1b" in text
    assert "\x1b" not in click.unstyle(text)


def test_smi_finds_every_node_that_runs_here(tmp_path: Path) -> None:
    for name in ("b", "a"):
        one_h100(tmp_path / name)
    assert find_roots(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(EnvironmentFault, match="tessera node --node-name NODE --kubeconfig FILE --gpus sim:NAME"):
        find_roots(tmp_path / "nowhere")


def test_smi_of_a_directory_without_a_node_says_so(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="no simulated node in"):
        run("smi", "--host-root", tmp_path)


@pytest.mark.parametrize("command", ["list", "smi"])
def test_help_gives_examples(command: str) -> None:
    assert "Examples:" in run(command, "--help").output


def test_drawings_line_up_and_show_what_is_free() -> None:
    assert draw_slices(4, [], 4) == "[....|....|....|....]"
    spans = [Span(4, 4, "3g.40gb"), Span(0, 1, "1g.10gb+me")]
    assert cell_width(spans) == 10
    assert draw_slices(8, spans, 4) == "[1g.~|....|....|....|3g.40gb------------]"
    assert len(draw_slices(8, spans, cell_width(spans))) == len(draw_slices(8, [], 10))
    assert draw_placement(8, 4, 2) == "....##.."
