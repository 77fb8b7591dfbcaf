"""``tessera sim fault``: setting, listing and clearing faults of a node that runs."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pynvml
import pytest
from click.testing import CliRunner, Result

from driver.errors import UsageError
from driver.simulator.node import SimulatedNode
from tessera.sim.fault import fault
from tessera.sim.node_commands import sim
from tests.support.nvml_client import G3, cut, enable_mig, gpu_instances, one_h100, process_on


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    return one_h100(tmp_path / "node")


def run(node: SimulatedNode, *arguments: str) -> Result:
    command = ["fault", "--host-root", str(node.root), *arguments]
    result = CliRunner().invoke(sim, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_a_call_is_made_to_fail_listed_and_cleared(node: SimulatedNode) -> None:
    assert run(node, "fail", "nvmlDeviceGetCount", "--code", "unknown", "--times", "2").output == "fault 1\n"
    with pytest.raises(pynvml.NVMLError_Unknown):
        node.nvml.nvmlDeviceGetCount()
    (row,) = json.loads(run(node, "list", "-o", "json").output)
    assert (row["id"], row["call"], row["code"], row["times"]) == (1, "nvmlDeviceGetCount", "UNKNOWN", 1)
    assert "nvmlDeviceGetCount  UNKNOWN" in run(node, "list").output
    run(node, "clear", "1")
    assert run(node, "list").output == "No faults.\n"
    assert node.nvml.nvmlDeviceGetCount() == 1


def test_codes_are_names_or_numbers(node: SimulatedNode) -> None:
    run(node, "fail", "--code", "15", "--gpu", "0")
    run(node, "fail", "--code", "NVML_ERROR_IN_USE", "--gpu", "0")
    assert [row["code"] for row in json.loads(run(node, "list", "-o", "json").output)] == ["GPU_IS_LOST", "IN_USE"]
    with pytest.raises(UsageError, match="--code: 'broken' is unknown; known: UNINITIALIZED"):
        run(node, "fail", "--code", "broken")


def test_a_gpu_is_lost_removed_returned_and_added(node: SimulatedNode) -> None:
    run(node, "remove", "--gpu", "0")
    assert node.nvml.nvmlDeviceGetCount() == 0
    assert "(removed)" in run(node, "list").output
    run(node, "return", "--gpu", "0")
    assert run(node, "add", "--pci-bus-id", "0000:e5:00.0").output == "GPU 1\n"
    assert node.nvml.nvmlDeviceGetCount() == 2
    run(node, "lose", "--gpu", "1")
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        node.nvml.nvmlDeviceGetHandleByIndex(1)
    with pytest.raises(UsageError, match=r"pciBusId: Expected `str` matching"):
        run(node, "add", "--pci-bus-id", "E5:00.0")


def test_events_are_raised_by_name(node: SimulatedNode) -> None:
    gpu, events = node.nvml.nvmlDeviceGetHandleByIndex(0), node.nvml.nvmlEventSetCreate()
    node.nvml.nvmlDeviceRegisterEvents(gpu, node.nvml.nvmlDeviceGetSupportedEventTypes(gpu), events)
    run(node, "xid", "13", "--gpu", "0")
    run(node, "event", "MigConfigChange", "--gpu", "0")
    run(node, "recovery", "gpu_reset", "--gpu", "0")
    heard = [node.nvml.nvmlEventSetWait_v2(events, 0).eventType for _ in range(3)]
    recovery = pynvml.nvmlEventTypeGpuRecoveryAction
    assert heard == [pynvml.nvmlEventTypeXidCriticalError, pynvml.nvmlEventMigConfigChange, recovery]
    with pytest.raises(UsageError, match="action: 'Prayer' is unknown; known: NONE, GPU_RESET, NODE_REBOOT"):
        run(node, "recovery", "Prayer", "--gpu", "0")
    with pytest.raises(UsageError, match="event: 'Fire' is unknown; known: SingleBitEccError"):
        run(node, "event", "Fire", "--gpu", "0")


def test_a_busy_partition_outlives_a_destroy_but_no_reboot(node: SimulatedNode) -> None:
    gpu = enable_mig(node.nvml)
    partition = cut(node.nvml, gpu, G3, 0, 4)
    run(node, "busy", partition.uuid)
    with pytest.raises(pynvml.NVMLError_InUse):
        node.nvml.nvmlComputeInstanceDestroy(partition.compute_instance)
    with process_on(node, partition.uuid), pytest.raises(UsageError, match="can't be reset"):
        run(node, "reset", "--gpu", "0")
    run(node, "reset", "--gpu", "0")
    assert gpu_instances(node.nvml, gpu) == {}
    run(node, "slow", "nvmlDeviceGetCount", "--seconds", "0.01")
    run(node, "reboot")
    assert node.nvml.nvmlDeviceGetMigMode(gpu) == [0, 0]


def test_a_partition_that_is_not_there_cannot_be_kept_busy(node: SimulatedNode) -> None:
    with pytest.raises(UsageError, match="MIG-foo: no partition has that UUID; the node has none now"):
        run(node, "busy", "MIG-foo")
    partition = cut(node.nvml, enable_mig(node.nvml), G3, 0, 4)
    with pytest.raises(UsageError, match=f"MIG-foo: no partition has that UUID.*; there are {partition.uuid}"):
        run(node, "busy", "MIG-foo")
    assert run(node, "list").output == "No faults.\n"


def test_one_of_several_nodes_must_be_named(
    node: SimulatedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.sim.fault.SIMULATED_NODES", tmp_path)
    runner = CliRunner()
    assert runner.invoke(sim, ["fault", "list"], catch_exceptions=False).output == "No faults.\n"
    one_h100(tmp_path / "other")
    with pytest.raises(UsageError, match="several simulated nodes: choose one with --host-root"):
        runner.invoke(sim, ["fault", "list"], catch_exceptions=False)


@pytest.mark.parametrize("command", sorted(fault.commands))
def test_help_gives_examples(command: str) -> None:
    assert isinstance(fault, click.Group)
    output = CliRunner().invoke(sim, ["fault", command, "--help"]).output
    assert f"tessera sim fault {command}" in output
