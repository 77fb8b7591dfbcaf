"""``tessera acceptance``, with the plugin's part on a socket."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pynvml
import pytest
from click.testing import CliRunner, Result

from driver.simulator.description import load_description
from tessera.cli import main
from tests.support.acceptance import AcceptanceNode, listening
from tests.support.plugin import TESSERA
from tests.support.running import eventually


def run(flags: Sequence[str], *arguments: str) -> Result:
    return CliRunner().invoke(main, ["acceptance", *flags, *arguments])


@contextmanager
def running(flags: Sequence[str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a process of its own."""
    command = [TESSERA, "acceptance", *flags, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_table_has_a_line_for_each_step_and_the_gpu_is_in_service_again(tmp_path: Path) -> None:
    node = AcceptanceNode(tmp_path)
    with node.serving() as flags:
        answer = run(flags, "gpu-1", "--yes")
    assert answer.exit_code == 0, answer.output
    lines = {line.split()[1]: line.split()[2] for line in answer.stdout.splitlines()}
    assert lines.pop("STEP") == "RESULT"
    assert (lines.pop("memory-limit"), lines.pop("mps")) == ("Skipped", "Skipped"), "driver 580, no MPS"
    assert set(lines.values()) == {"Passed"}
    assert {"nvml-functions", "idle", "every-partition"} <= lines.keys()
    assert node.cordoned() == set()


def test_a_capture_is_a_node_for_the_simulator(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    with AcceptanceNode(tmp_path, "h200-1").serving() as flags:
        answer = run(flags, "--read-only", "--capture", str(file), "-o", "json")
    assert answer.exit_code == 0, answer.output
    assert {step["state"] for step in json.loads(answer.stdout)} == {"Passed"}
    assert load_description(str(file)).gpu_product.memory_mib == 143771
    listed = CliRunner().invoke(main, ["topology", "--gpus", f"sim:{file}", "-o", "json"])
    assert [gpu["productName"] for gpu in json.loads(listed.stdout)] == ["NVIDIA H200"]


def test_without_a_description_nothing_is_captured(tmp_path: Path) -> None:
    node, file = AcceptanceNode(tmp_path, "h100-1"), tmp_path / "node.yaml"
    node.node.node.inventory.update([], {node.node.node.inventory.gpus[0].uuid: "it fell off the bus"})
    with node.serving() as flags:
        answer = run(flags, "--read-only", "--capture", str(file))
    assert "tessera: 1 step failed: description" in answer.stderr
    assert (answer.exit_code, file.exists()) == (1, False)


def test_a_failed_step_is_named_and_is_the_exit_code(tmp_path: Path) -> None:
    node = AcceptanceNode(tmp_path)
    node.node.simulated.faults.fail("nvmlDeviceGetBrand", code=pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    with node.serving() as flags:
        answer = run(flags, "--read-only")
    assert answer.exit_code == 1
    assert "tessera: 2 steps failed: nvml-functions, properties" in answer.stderr
    assert "the driver lacks nvmlDeviceGetBrand" in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "confirm it with --yes, or use --read-only"),
        (("--yes", "--wait", "inf"), 2, "inf is not in the range 0<=x<=86400"),
        (("--read-only", "--kill-plugin"), 2, "--kill-plugin: changes the GPU"),
        (("gpu-77", "--read-only"), 1, "GPU 'gpu-77' is not on this node; expected a UUID or gpu-0"),
        (("--read-only", "--capture", "/nowhere/node.yaml"), 1, "--capture /nowhere/node.yaml: can't be written"),
        (("--read-only", "--driver-name", "other.example"), 3, "the node plugin does not answer at"),
    ],
)
def test_what_cannot_be_done_is_said_with_what_can(
    tmp_path: Path, arguments: Sequence[str], code: int, says: str
) -> None:
    node = AcceptanceNode(tmp_path)
    with node.serving() as flags:
        answer = run(flags, *arguments)
    assert (answer.exit_code, says in answer.stderr) == (code, True), answer.output
    assert node.cordoned() == set()


def test_on_a_machine_without_node_plugin_the_command_says_where_to_run_it(tmp_path: Path) -> None:
    answer = run(["--state-dir", str(tmp_path / "none")], "--read-only")
    assert answer.exit_code == 3
    assert "no node plugin has run on this node with --state-dir" in answer.stderr
    assert not (tmp_path / "none").exists()


def test_a_plugin_without_the_test_is_recognised() -> None:
    with listening() as flags:
        answer = run(flags, "--read-only")
    assert answer.exit_code == 1
    assert "it waits for the NVIDIA driver, or is of an earlier version" in answer.stderr


def test_a_second_test_at_the_same_time_is_refused(tmp_path: Path) -> None:
    node = AcceptanceNode(tmp_path)
    node.use.claimed[node.node.node.inventory.gpus[0].uuid] = {"gpu-0"}
    with node.serving() as flags, running(flags, "gpu-0", "--yes", "--wait", "60") as first:
        eventually(node.cordoned, "the first test has begun")
        second = run(flags, "gpu-1", "--read-only")
        node.use.claimed.clear()
        output = first.communicate(timeout=60)
        assert first.returncode == 0, output
    assert second.exit_code == 1
    assert "another acceptance test runs on this node" in second.stderr


def test_a_plugin_that_ends_ends_the_test_first(tmp_path: Path) -> None:
    node = AcceptanceNode(tmp_path)
    node.use.claimed[node.node.node.inventory.gpus[0].uuid] = {"gpu-0"}
    with ExitStack() as stack:
        with node.serving() as flags:
            test = stack.enter_context(running(flags, "gpu-0", "--yes", "--wait", "600"))
            eventually(node.cordoned, "the test has begun")
        assert node.cordoned() == set()
        _, said = test.communicate(timeout=60)
    assert test.returncode == 3
    assert "the node plugin ends" in said


def test_a_job_that_is_deleted_ends_its_test_at_once(tmp_path: Path) -> None:
    node = AcceptanceNode(tmp_path)
    node.use.claimed[node.node.node.inventory.gpus[0].uuid] = {"gpu-0"}
    with node.serving() as flags, running(flags, "gpu-0", "--yes", "--wait", "600") as test:
        eventually(node.cordoned, "the test has begun")
        test.send_signal(signal.SIGTERM)
        _, said = test.communicate(timeout=60)
        eventually(lambda: not node.cordoned(), "the cordon has ended")
    assert test.returncode == 1
    assert "stopped: the node plugin removes what the test made, and ends its cordon" in said


def test_a_container_without_a_claim_has_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with AcceptanceNode(tmp_path).serving() as flags:
        answer = run(flags, "--read-only", "--container", "-o", "json")
    step = json.loads(answer.stdout)[0]
    assert (step["step"], step["state"]) == ("container", "Failed")
    assert "does this container have a ResourceClaim?" in step["detail"]


def test_a_container_with_a_simulated_driver_shows_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = AcceptanceNode(tmp_path)
    monkeypatch.setenv("PATH", f"{node.node.simulated.root / 'usr/bin'}:/usr/bin:/bin")
    with node.serving() as flags:
        answer = run(flags, "--read-only", "--container", "-o", "json")
    step = json.loads(answer.stdout)[0]
    assert (step["step"], step["state"]) == ("container", "Passed")
    assert "CUDA was not tried: the GPUs are simulated" in step["detail"]
