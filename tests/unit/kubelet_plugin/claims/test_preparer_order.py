"""Time and order: claims that vanish, come again or are given away while somebody still works on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from driver.errors import ApiError, ClaimError, HardwareError
from driver.simulator import nvml_base
from driver.step_observer import Moment
from kubelet_plugin.dra.kubelet_sockets import SocketServer
from kubelet_plugin.dra.protocol.generated import dra_v1_pb2
from kubelet_plugin.dra.service import DraService
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.step_names import NodeStep
from tests.support.care import Care
from tests.support.kubelet import DraClient
from tests.support.node import NodeUnderTest, start_node
from tests.support.nvml_client import process_on

SMALL = "gpu-0-mig-1g10gb-6"
BIG = "gpu-0-mig-3g40gb-4"


@pytest.fixture
def node(tmp_path: Path) -> NodeUnderTest:
    return start_node(tmp_path, gpus="h100-1")


def test_a_claim_that_is_gone_from_the_api_server_can_be_unprepared(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)
    node.api.delete(claim)
    node.preparer.unprepare(claim)
    assert node.nothing_left()
    assert node.api.reads == 1  # unprepare asks nobody


@pytest.mark.parametrize("times", [1, 3])
def test_unprepare_is_done_as_often_as_it_is_asked(node: NodeUnderTest, times: int) -> None:
    claim, other = node.api.allocate("infer", SMALL), node.api.allocate("other", "gpu-0-mig-1g10gb-0")
    node.preparer.prepare(claim)
    node.preparer.prepare(other)
    for _ in range(times):
        node.preparer.unprepare(claim)
    assert node.held() == {"gpu-0-mig-1g10gb-0"}
    assert len(node.partitions()) == 1


def test_a_claim_that_is_gone_before_it_is_prepared_is_refused_and_leaves_nothing(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", SMALL)
    node.api.delete(claim)
    with pytest.raises(ApiError, match='"infer" not found'):
        node.preparer.prepare(claim)
    assert node.nothing_left()
    assert node.held() == set()


def test_a_claim_made_anew_under_its_name_is_not_given_what_the_old_one_was_asked_for(node: NodeUnderTest) -> None:
    old = node.api.allocate("infer", SMALL)
    node.api.delete(old)
    new = node.api.allocate("infer", "gpu-0-mig-1g10gb-0")
    with pytest.raises(ClaimError, match=f"uid {new.uid}, the kubelet asked for {old.uid}"):
        node.preparer.prepare(old)
    assert node.nothing_left()
    node.preparer.prepare(new)
    assert node.held() == {"gpu-0-mig-1g10gb-0"}


@pytest.mark.parametrize("step", [NodeStep.WRITE_INTENT, NodeStep.CREATE_GPU_INSTANCE, NodeStep.WRITE_PREPARED])
def test_a_claim_deleted_while_it_is_prepared_is_given_back_by_whoever_comes_first(
    tmp_path: Path, step: NodeStep
) -> None:
    def vanish(at: NodeStep, when: Moment) -> None:
        if (at, when) == (step, "before"):
            node.api.delete(claim)

    node = start_node(tmp_path, observer=vanish, gpus="h100-1")
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)
    assert node.held() == {SMALL}
    Care(node).look_long()  # the kubelet may never ask: its pod was forced away
    assert node.nothing_left()
    node.preparer.unprepare(claim)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(("device", "given"), [(SMALL, SMALL), (SMALL, BIG), ("gpu-0", SMALL), (SMALL, "gpu-0")])
def test_devices_of_a_force_deleted_pod_are_refused_naming_the_holder_until_it_is_released(
    node: NodeUnderTest, device: str, given: str, restarted: bool
) -> None:
    first = node.api.allocate("first", device)
    node.preparer.prepare(first)
    node.api.delete(first)
    if restarted:
        node = node.restart()
    second = node.api.allocate("second", given)
    refusal = rf"{given} .* overlaps {device} .* claim default/first \({first.uid}\) still holds .* unprepared"
    for _ in range(2):
        with pytest.raises(ClaimError, match=refusal):
            node.preparer.prepare(second)
    assert node.held() == {device}
    node.preparer.unprepare(first)
    node.preparer.prepare(second)
    assert node.held() == {given}
    node.preparer.unprepare(second)
    assert node.nothing_left()


def test_a_device_whose_process_outlives_its_pod_is_refused_until_the_process_ends(node: NodeUnderTest) -> None:
    first = node.api.allocate("first", SMALL)
    node.preparer.prepare(first)
    [partition] = node.partitions()
    node.api.delete(first)
    second = node.api.allocate("second", SMALL)
    with process_on(node.simulated, str(partition.uuid)):
        with pytest.raises(HardwareError, match="IN_USE"):
            node.preparer.unprepare(first)
        with pytest.raises(ClaimError, match=f"default/first.*{first.uid}.*still holds"):
            node.preparer.prepare(second)
        assert node.partitions() == [partition]
    Care(node).look()  # nobody asks for the first one again
    node.preparer.prepare(second)
    assert node.partitions()[0].uuid != partition.uuid


@pytest.fixture
def ask(node: NodeUnderTest, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """One call of the kubelet about some claims; the error of each, empty where there is none."""

    def call(verb: str, *claims: ClaimReference) -> dict[str, str]:
        service = DraService(node.preparer)
        server = SocketServer(tmp_path / "dra.sock", [service.handler()])
        kubelet = DraClient(tmp_path / "dra.sock")
        try:
            wanted = [(claim.namespace, claim.name, claim.uid) for claim in claims]
            answers = kubelet.call(dra_v1_pb2, verb, wanted)
        finally:
            kubelet.channel.close()
            server.stop()
            service.close()
        return {claim.name: answers[claim.uid].error for claim in claims}

    return call


def test_of_a_pods_claims_those_that_fail_do_not_harm_the_others_and_the_retry_asks_for_all(
    node: NodeUnderTest, ask: Callable[..., dict[str, str]]
) -> None:
    good = node.api.allocate("good", "gpu-0-mig-1g10gb-0")
    failing = node.api.allocate("failing", "gpu-0-mig-1g10gb-1")
    gone = ClaimReference("default", "gone", "1234")
    overlapping = node.api.allocate("overlapping", "gpu-0-mig-7g80gb-0")
    node.preparer.prepare(node.api.allocate("holder", SMALL))
    node.simulated.faults.fail("nvmlGpuInstanceCreateComputeInstance", code=999, times=1, gpu=0)
    first = ask("Prepare", failing)
    second = ask("Prepare", good, failing, gone, overlapping)
    assert "UNKNOWN" in first["failing"]
    assert second["good"] == second["failing"] == ""
    assert '"gone" not found' in second["gone"]
    assert "default/holder" in second["overlapping"]
    before = node.partitions()
    assert ask("Prepare", good, failing) == {"good": "", "failing": ""}
    assert node.partitions() == before
    assert set(ask("Unprepare", good, failing, gone, overlapping).values()) == {""}
    assert node.held() == {SMALL}


@pytest.mark.parametrize("call", ["nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlDeviceGetMigMode"])
def test_a_slow_gpu_does_not_delay_claims_on_the_others(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(nvml_base, "delay", lambda _: answers.wait(60))
    node = start_node(tmp_path)
    slow = node.api.allocate("slow", SMALL)
    node.simulated.faults.slow(2.0, call, gpu=0, times=1)
    thread = threading.Thread(target=node.preparer.prepare, args=(slow,))
    thread.start()
    for gpu in (1, 2, 3):
        claim = node.api.allocate(f"quick-{gpu}", f"gpu-{gpu}-mig-1g10gb-6")
        node.preparer.prepare(claim)
        node.preparer.unprepare(claim)
    assert thread.is_alive()  # three claims came and went during one call
    answers.set()
    thread.join(60)
    assert [len(node.partitions(gpu)) for gpu in range(4)] == [1, 0, 0, 0]


def test_the_partitions_of_one_claim_switch_the_mode_of_their_gpu_once(
    node: NodeUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    node.preparer.prepare(node.api.allocate("two", SMALL, "gpu-0-mig-1g10gb-0"))
    assert [record.message for record in caplog.records].count("switched MIG mode") == 1
