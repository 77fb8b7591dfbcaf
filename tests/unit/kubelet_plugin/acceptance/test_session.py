"""The acceptance test of a GPU by its plugin: what each step shows, and that nothing is left of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pynvml
import pytest

from driver.errors import HardwareError, StateError, UsageError
from driver.model.gpu import MigMode
from driver.simulator.description import parse_description
from driver.simulator.tree import CGROUPS
from kubelet_plugin.acceptance.protocol import StepState
from kubelet_plugin.step_names import NodeStep
from tests.support.acceptance import AcceptanceNode
from tests.support.memory_limits import description_with_limits
from tests.support.running import eventually, in_thread

PASSED, FAILED, SKIPPED = StepState.PASSED, StepState.FAILED, StepState.SKIPPED
READING = {"nvml-functions", "properties", "placements", "events", "activity", "device-nodes", "partitions"}
CUT, DESTROY = "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceDestroy"


@pytest.fixture
def h100(tmp_path: Path) -> AcceptanceNode:
    return AcceptanceNode(tmp_path)


def test_an_idle_gpu_passes_every_step_and_is_as_it_was_afterwards(h100: AcceptanceNode) -> None:
    steps = h100.steps("gpu-2")
    assert steps.pop("memory-limit").state is SKIPPED, "driver 580 has no limits"
    assert "does not share this GPU by MPS" in steps.pop("mps").detail
    assert {step.state for step in steps.values()} == {PASSED}, steps
    assert {step.gpu for step in steps.values()} == {"gpu-2"}
    assert steps.keys() == READING | {"idle", "mig-mode", "time-slice", "every-partition"}
    assert "25 of 25 placements were cut and removed" in steps["every-partition"].detail
    assert h100.node.nothing_left()
    assert not h100.node.host.mig_enabled(h100.node.node.inventory.gpus[2])
    assert h100.cordoned() == set()


@pytest.mark.parametrize(
    ("control", "detail"),
    [("dmem", r"enforced by the kernel \(dmem\)"), ("misc", r"by the driver \(misc\)"), ("v1", "is not cgroup v2")],
)
def test_a_limit_on_memory_is_set_and_removed_where_the_driver_has_them(
    tmp_path: Path, control: str, detail: str
) -> None:
    node = AcceptanceNode(tmp_path, description_with_limits(cgroups=control))
    step = node.steps("gpu-0")["memory-limit"]
    assert step.state is (SKIPPED if control == "v1" else PASSED), step
    assert re.search(detail, step.detail)
    assert not list((node.node.simulated.root / CGROUPS).glob("tessera*"))
    assert not node.node.simulated.gpu_state(0).limits


def test_a_limit_that_nvml_refuses_fails_its_step_and_leaves_no_cgroup(tmp_path: Path) -> None:
    node = AcceptanceNode(tmp_path, description_with_limits())
    node.node.simulated.faults.fail("nvmlDeviceSetMemoryLimits_v1", code=pynvml.NVML_ERROR_UNKNOWN)
    step = node.steps("gpu-0")["memory-limit"]
    assert step.state is FAILED
    assert "UNKNOWN" in step.detail
    assert not list((node.node.simulated.root / CGROUPS).glob("tessera*"))


@pytest.mark.parametrize(
    ("gpus", "skipped"),
    [
        ("h200-1", set()),
        ("dgx-a100", {"activity", "mig-mode", "every-partition"}),  # no GPM; MIG mode needs a reset
        ("l4-4", {"activity", "mig-mode", "every-partition", "placements"}),
        ("t4-4", {"activity", "mig-mode", "every-partition", "placements"}),
    ],
)
def test_what_a_product_cannot_do_is_skipped_with_the_reason(tmp_path: Path, gpus: str, skipped: set[str]) -> None:
    node = AcceptanceNode(tmp_path, gpus)
    steps = node.steps()
    assert {name for name, step in steps.items() if step.state is SKIPPED} == skipped | {"memory-limit", "mps"}
    assert all(step.detail for step in steps.values())
    assert {step.state for step in steps.values()} <= {PASSED, SKIPPED}
    assert node.node.nothing_left()


def test_a_read_only_test_changes_nothing_and_may_run_on_a_gpu_in_use(h100: AcceptanceNode) -> None:
    claim = h100.node.api.allocate("running", "gpu-0-mig-1g10gb-0")
    h100.node.preparer.prepare(claim)
    before, changes = h100.node.partitions(), h100.health.changes
    steps = h100.steps("gpu-0", read_only=True)
    assert steps.keys() == READING
    assert steps["partitions"].detail == "1 of claims, 0 others"
    assert (h100.node.partitions(), h100.health.changes) == (before, changes)


def test_the_gpu_is_cordoned_while_it_is_tested(h100: AcceptanceNode) -> None:
    cordoned = [
        (message.step.step, frozenset(h100.cordoned()))
        for message in h100.messages("gpu-1")
        if message.step is not None
    ]
    assert {gpus for step, gpus in cordoned if step in READING} == {frozenset()}
    assert {gpus for step, gpus in cordoned if step not in READING} == {frozenset({"gpu-1"})}
    assert h100.cordoned() == set()


@pytest.mark.parametrize("place", ["claimed", "offered"])
def test_a_gpu_of_which_a_claim_has_or_may_get_something_is_left_alone(
    h100: AcceptanceNode, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kubelet_plugin.acceptance.session.WITHDRAWAL_TIMEOUT_SECONDS", 0.5)
    gpu = h100.node.node.inventory.gpus[0]
    getattr(h100.use, place)[gpu.uuid] = {"gpu-0-mig-1g10gb-3"}
    steps = h100.steps("gpu-0")
    assert steps.keys() == READING | {"idle"}
    assert steps["idle"].state is FAILED
    assert "gpu-0-mig-1g10gb-3" in steps["idle"].detail
    assert not h100.node.host.mig_enabled(gpu)
    assert h100.cordoned() == set()


def test_a_gpu_with_partitions_of_somebody_else_is_left_alone(h100: AcceptanceNode) -> None:
    gpu = h100.node.node.inventory.gpus[0]
    profile = gpu.profiles[0]
    h100.node.host.set_mig_mode(gpu, enabled=True)
    h100.node.host.create_gpu_instance(gpu, profile, profile.placements[0])
    steps = h100.steps("gpu-0")
    assert "partitions exist that no claim of Tessera's holds: 1" in steps["idle"].detail
    assert len(h100.node.partitions()) == 1


def test_the_test_waits_for_a_claim_that_ends_in_time(h100: AcceptanceNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubelet_plugin.acceptance.session.WITHDRAWAL_TIMEOUT_SECONDS", 0.0)
    gpu = h100.node.node.inventory.gpus[0]
    h100.use.claimed[gpu.uuid] = h100.use.offered[gpu.uuid] = {"gpu-0"}
    notices = []
    for message in h100.messages("gpu-0", wait=60.0):
        if message.notice:
            notices.append(message.notice)
            h100.use.claimed.clear()
            h100.use.offered.clear()
        last = message
    assert notices == ["waiting: claims hold gpu-0"]
    assert last.node is not None


def test_without_a_name_the_first_idle_gpu_is_tested(h100: AcceptanceNode) -> None:
    inventory = h100.node.node.inventory
    h100.use.claimed[inventory.gpus[0].uuid] = {"gpu-0"}
    inventory.update([gpu for gpu in inventory.gpus if gpu.index != 1], {inventory.gpus[1].uuid: "lost"})
    assert {step.gpu for step in h100.steps().values()} == {"gpu-2"}


def test_a_name_of_no_gpu_is_answered_with_those_that_there_are(h100: AcceptanceNode) -> None:
    with pytest.raises(UsageError, match=r"'gpu-9' is not on this node; expected a UUID or gpu-0, gpu-1, .*gpu-7"):
        h100.steps("gpu-9")


def test_a_gpu_that_refuses_cuts_fails_the_step_and_offers_nothing_more(h100: AcceptanceNode) -> None:
    h100.node.simulated.faults.fail(CUT, code=pynvml.NVML_ERROR_UNKNOWN, gpu=0)
    step = h100.steps("gpu-0")["every-partition"]
    assert step.state is FAILED
    assert "0 of 25 placements were cut and removed" in step.detail
    assert "UNKNOWN" in step.detail
    assert h100.health.unhealthy() == {"gpu-0"}
    assert h100.node.nothing_left()


def test_a_partition_that_refuses_its_removal_ends_the_test_and_is_removed_later(h100: AcceptanceNode) -> None:
    h100.node.simulated.faults.fail(DESTROY, code=pynvml.NVML_ERROR_IN_USE, gpu=0, times=1)
    steps = h100.steps("gpu-0")
    assert steps["every-partition"].state is FAILED
    assert "0 of 25 placements were cut and removed; removing GPU instance" in steps["every-partition"].detail
    assert len(h100.node.partitions()) == 1
    assert h100.steps("gpu-0")["idle"].state is FAILED
    assert h100.cordoned() == set()
    [record] = h100.node.node.checkpoint.records()
    assert h100.node.cleanup.finish_release(record.uid)
    assert h100.node.nothing_left()
    assert h100.steps("gpu-0")["every-partition"].state is PASSED


def test_a_time_slice_that_cannot_be_restored_ends_the_test_and_is_restored_later(tmp_path: Path) -> None:
    def refuse(at: NodeStep, when: str) -> None:
        if armed and (at, when) == (NodeStep.RESTORE_TIME_SLICE, "before"):
            raise HardwareError("nvidia-smi does not answer")

    armed = True
    node = AcceptanceNode(tmp_path, observer=refuse)
    steps = node.steps("gpu-0")
    assert (steps["time-slice"].state, "every-partition" in steps) == (FAILED, False)
    armed = False
    [record] = node.node.node.checkpoint.records()
    assert node.node.cleanup.finish_release(record.uid)
    assert node.node.simulated.gpu_state(0).time_slice == 0


def test_on_a_full_disk_nothing_is_cut_and_no_record_stays(
    h100: AcceptanceNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise StateError("No space left on device")

    monkeypatch.setattr("kubelet_plugin.checkpoint.records.write_atomically", full)
    steps = h100.steps("gpu-0")
    assert "0 of 25 placements were cut and removed; No space left" in steps["every-partition"].detail
    assert h100.node.nothing_left()
    assert h100.node.node.checkpoint.records() == []


def test_a_switched_mig_mode_is_published_as_it_is_after_the_test(h100: AcceptanceNode) -> None:
    h100.steps("gpu-0")
    assert {report.gpu.mig_mode for report in h100.node.node.inventory.states()} == {MigMode.DISABLED}


def test_a_gpu_that_is_lost_during_the_test_shows_in_its_steps(tmp_path: Path) -> None:
    def lose(at: NodeStep, when: str) -> None:
        if (at, when) == (NodeStep.DESTROY_GPU_INSTANCE, "before"):
            node.node.simulated.faults.lose_gpu(0)

    node = AcceptanceNode(tmp_path, "h100-1", observer=lose)
    steps = node.steps("gpu-0")
    assert {name for name, step in steps.items() if step.state is FAILED} == {"every-partition", "description"}
    assert node.cordoned() == set()
    node.node.simulated.faults.clear()
    assert node.health.restart().node.nothing_left()


def test_a_gpu_that_did_not_answer_can_be_read_but_not_described(tmp_path: Path) -> None:
    node = AcceptanceNode(tmp_path, "h100-1")
    node.node.node.inventory.update([], {node.node.node.inventory.gpus[0].uuid: "it fell off the bus"})
    step = node.steps("gpu-0", read_only=True)["description"]
    assert (step.state, "it fell off the bus" in step.detail) == (FAILED, True)


def test_a_gpu_that_another_claim_keeps_locked_is_left_alone(
    h100: AcceptanceNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(h100.node.locks, "_timeout_seconds", 0.1)
    with h100.node.locks.hold([h100.node.node.inventory.gpus[0].uuid], "claim ns/other"):
        step = h100.steps("gpu-0")["idle"]
    assert (step.state, "is in use by claim ns/other" in step.detail) == (FAILED, True)


IN_A_CONTAINER = """
import sys
from pathlib import Path
from kubelet_plugin.acceptance.protocol import AcceptanceRequest
from tests.support.acceptance import AcceptanceNode
node = AcceptanceNode(Path(sys.argv[1]))
for message in node.test.run(AcceptanceRequest("gpu-0", False, 0.0, True), node.ended):
    if message.node is not None:
        print("described", flush=True)
"""


def test_a_plugin_that_is_the_first_process_of_its_container_can_kill_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    container = ["unshare", "--pid", "--fork", *(["--user", "--map-root-user"] if os.geteuid() else [])]
    if subprocess.run([*container, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system makes no PID namespaces")
    command = [*container, sys.executable, "-c", IN_A_CONTAINER, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGKILL, "described\n")
    assert AcceptanceNode(tmp_path).node.nothing_left()
    assert "released what was left of a claim" in caplog.text


def test_a_property_that_has_changed_since_it_was_published_is_named(h100: AcceptanceNode) -> None:
    h100.node.simulated.faults.fail("nvmlDeviceGetEccMode", code=pynvml.NVML_ERROR_NOT_SUPPORTED, gpu=0)
    step = h100.steps("gpu-0", read_only=True)["properties"]
    assert step.state is FAILED
    assert "ecc is published as True, NVML says None" in step.detail


@pytest.mark.parametrize(
    ("call", "step", "says"),
    [
        ("nvmlDeviceGetMaxClockInfo", "nvml-functions", "the driver lacks nvmlDeviceGetMaxClockInfo"),
        ("nvmlGpmQueryDeviceSupport", "nvml-functions", "the driver lacks nvmlGpmQueryDeviceSupport"),
    ],
)
def test_a_function_that_the_driver_lacks_is_named(h100: AcceptanceNode, call: str, step: str, says: str) -> None:
    h100.node.simulated.faults.fail(call, code=pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, gpu=0)
    result = h100.steps("gpu-0", read_only=True)[step]
    assert result.state is FAILED
    assert says in result.detail


def test_whoever_stops_listening_ends_the_test_and_its_cordon(h100: AcceptanceNode) -> None:
    messages = h100.messages("gpu-0")
    for message in messages:
        if message.step is not None and message.step.step == "every-partition":
            break
    assert h100.cordoned() == {"gpu-0"}
    messages.close()
    assert h100.cordoned() == set()
    assert h100.node.nothing_left()
    h100.node.preparer.prepare(h100.node.api.allocate("next", "gpu-0"))


def test_a_pod_that_comes_during_the_test_waits_for_it(h100: AcceptanceNode) -> None:
    messages = h100.messages("gpu-0")
    for message in messages:
        if message.step is not None and message.step.step == "every-partition":
            break
    claim = h100.node.api.allocate("early", "gpu-0")
    prepared = threading.Event()

    def prepare(_stop: threading.Event) -> None:
        h100.node.preparer.prepare(claim)
        prepared.set()

    with in_thread(prepare):
        eventually(h100.node.locks.waits, "the claim waits")
        assert "which is in use by the acceptance test of gpu-0" in h100.node.locks.waits()[0]
        assert not prepared.is_set()
        messages.close()
        eventually(prepared.is_set, "the claim is prepared")


QUICK = (NodeStep.CREATE_GPU_INSTANCE, "after"), (NodeStep.DESTROY_GPU_INSTANCE, "before")


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize(
    ("step", "moment"),
    [
        pytest.param(step, moment, marks=() if (step, moment) in QUICK else pytest.mark.long)
        for step in (
            NodeStep.SET_MIG_MODE,
            NodeStep.CREATE_GPU_INSTANCE,
            NodeStep.CREATE_COMPUTE_INSTANCE,
            NodeStep.DESTROY_COMPUTE_INSTANCE,
            NodeStep.DESTROY_GPU_INSTANCE,
            NodeStep.RESTORE_TIME_SLICE,
            NodeStep.REMOVE_RECORD,
        )
        for moment in ("before", "after")
    ],
)
def test_a_plugin_that_is_killed_at_any_step_leaves_nothing_behind(tmp_path: Path, step: str, moment: str) -> None:
    armed = True

    def kill(at: NodeStep, when: str) -> None:
        if armed and (at, when) == (step, moment):
            raise Killed

    node = AcceptanceNode(tmp_path, observer=kill)
    with pytest.raises(Killed):
        node.steps("gpu-0")
    armed = False
    again = node.health.restart()
    assert again.node.nothing_left()
    assert again.unhealthy() == set()
    assert again.node.simulated.gpu_state(0).time_slice == 0


def test_the_description_at_the_end_has_the_measured_memory_of_partitions(tmp_path: Path) -> None:
    node = AcceptanceNode(tmp_path, "dgx-a100-40gb")
    gpu = node.node.node.inventory.gpus[0]
    with pytest.raises(Exception, match="reset"):
        node.node.host.set_mig_mode(gpu, enabled=True)
    node.node.simulated.reset_gpu(0)
    *_, last = node.messages("gpu-0")
    assert last.node is not None
    description = parse_description(last.node, "the capture")
    profile = next(profile for profile in description.gpu_product.profiles if profile.name == "3g.20gb")
    assert {start: profile.memory_at(start) for start in profile.starts} == {0: 20096, 4: 20224}
