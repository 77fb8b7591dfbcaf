"""What goes wrong with NVIDIA's Go driver (kubernetes-sigs/dra-driver-nvidia-gpu), by its code and its users' threads.

Each test makes the situation that the peer does not survive. The number is that of the peer's issue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from driver.errors import HardwareError
from driver.step_observer import Moment
from kubelet_plugin.step_names import NodeStep
from tests.support.care import Care
from tests.support.health import HealthUnderTest
from tests.support.invariants import leftovers, read_facts, violations
from tests.support.node import NodeUnderTest, start_node

FATAL, BENIGN = 48, 43
"""XIDs: a double-bit ECC error, and a fault of an application."""

SMALL = "gpu-0-mig-1g10gb-6"


class Killed(BaseException):
    """As sudden as SIGKILL: no handler of ours catches it."""


def wrong(node: NodeUnderTest) -> list[str]:
    return violations(read_facts(node.simulated, node.root / "state", node.root / "cdi"))


def left(node: NodeUnderTest) -> list[str]:
    return leftovers(read_facts(node.simulated, node.root / "state", node.root / "cdi"))


def test_1_a_partly_made_instance_does_not_leak_when_the_process_dies_between_the_two_nvml_calls(
    tmp_path: Path,
) -> None:
    """#1452: a GPU instance without compute instance leaks, since the scan at the start can't see it."""

    def die(step: NodeStep, moment: Moment) -> None:
        if (step, moment) == (NodeStep.CREATE_COMPUTE_INSTANCE, "before"):
            raise Killed

    node = start_node(tmp_path, observer=die)
    claim = node.api.allocate("infer", SMALL)
    with pytest.raises(Killed):
        node.preparer.prepare(claim)
    [half] = node.partitions()
    assert not half.complete
    again = node.restart()
    assert left(again) == []  # at the start, though nobody asks for the claim again
    assert "gpu-0" in again.offered()


def test_1_a_partly_made_instance_is_rolled_back_when_the_second_nvml_call_fails(node: NodeUnderTest) -> None:
    """#1452: the rollback was broken in 0.4."""
    node.simulated.faults.fail("nvmlGpuInstanceCreateComputeInstance", code=23, times=1)
    claim = node.api.allocate("infer", SMALL)
    with pytest.raises(HardwareError, match=r"creating a compute instance .* INSUFFICIENT_RESOURCES"):
        node.preparer.prepare(claim)
    assert left(node) == []
    node.preparer.prepare(claim)
    assert wrong(node) == []


def spec_deleted(node: NodeUnderTest) -> None:
    for path in (node.root / "cdi").iterdir():
        path.unlink()


def spec_garbled(node: NodeUnderTest) -> None:
    for path in (node.root / "cdi").iterdir():
        path.write_text("{")


def partition_removed(node: NodeUnderTest) -> None:
    gpu = node.node.inventory.gpus[0]
    for partition in node.partitions():
        node.host.destroy_compute_instance(gpu, partition)
        node.host.destroy_gpu_instance(gpu, partition)


def partition_replaced(node: NodeUnderTest) -> None:
    """By one at the same place, with another UUID."""
    gpu = node.node.inventory.gpus[0]
    [old] = node.partitions()
    partition_removed(node)
    profile = gpu.profile_with_id(old.profile_id)
    assert profile is not None
    new = node.host.create_gpu_instance(gpu, profile, old.placement)
    assert node.host.create_compute_instance(gpu, new).uuid != old.uuid


def compute_instance_removed(node: NodeUnderTest) -> None:
    [partition] = node.partitions()
    node.host.destroy_compute_instance(node.node.inventory.gpus[0], partition)


def gpu_reset(node: NodeUnderTest) -> None:
    node.simulated.reset_gpu(0)


def node_rebooted(node: NodeUnderTest) -> None:
    node.simulated.reboot()
    spec_deleted(node)  # /var/run is memory


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(
    "lose",
    [
        spec_deleted,
        spec_garbled,
        partition_removed,
        partition_replaced,
        compute_instance_removed,
        gpu_reset,
        node_rebooted,
    ],
)
def test_2_a_prepared_claim_is_not_answered_from_memory_when_its_spec_or_instance_is_gone(
    node: NodeUnderTest, lose: Callable[[NodeUnderTest], None], restarted: bool
) -> None:
    """#1380, #951: a cached claim is answered though its CDI file or MIG instance no longer exists."""
    claim = node.api.allocate("infer", SMALL)
    answer = node.preparer.prepare(claim)
    lose(node)
    found = node.restart() if restarted or lose is node_rebooted else node
    assert found.preparer.prepare(claim) == answer
    assert wrong(found) == []
    found.preparer.unprepare(claim)
    assert left(found) == []


@pytest.mark.parametrize("devices", [(SMALL,), ("gpu-0",), (SMALL, "gpu-1")])
def test_3_a_claim_deleted_while_the_plugin_was_away_is_reconciled_with_its_cdi_file(
    node: NodeUnderTest, devices: tuple[str, ...]
) -> None:
    """#1278, #365: deleted claims that are prepared are never reconciled, CDI files of dead claims stay."""
    node.preparer.prepare(node.api.allocate("infer", *devices))
    node.api.claims.clear()
    again = node.restart()
    assert left(again) != []  # on doubt nothing is removed
    Care(again).look_long()
    assert left(again) == []
    assert again.held() == set()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"null", b"[]", b'{"version": 99, "uid": "u"}', b"\0" * 4096]
)
def test_4_a_corrupt_checkpoint_ends_in_no_crash_loop_and_costs_no_claim(node: NodeUnderTest, content: bytes) -> None:
    """#1100, #1080: a checkpoint that can't be read keeps the plugin from starting, for ever."""
    claim, other = node.api.allocate("infer", SMALL), node.api.allocate("train", "gpu-1")
    answer = node.preparer.prepare(claim)
    node.preparer.prepare(other)
    (node.root / "state" / "claims" / f"{claim.uid}.json").write_bytes(content)
    again = node.restart().restart()
    assert again.held(1) == {"gpu-1"}
    assert not again.offered() & {SMALL, "gpu-0"}
    assert again.preparer.prepare(claim) == answer
    assert wrong(again) == []
    for each in (claim, other):
        again.preparer.unprepare(each)
    assert again.partitions() == []
    assert again.cdi_specs() == {}


def test_5_a_gpu_that_hangs_does_not_block_claims_on_the_others(tmp_path: Path) -> None:
    """Its one lock of the whole node makes every claim wait for the slowest, until time-outs of 10 s."""
    hanging, go_on = threading.Event(), threading.Event()

    def hang(step: NodeStep, moment: Moment) -> None:
        if (step, moment) == (NodeStep.CREATE_GPU_INSTANCE, "before") and threading.current_thread().name == "slow":
            hanging.set()
            assert go_on.wait(60)

    node = start_node(tmp_path, observer=hang)
    slow = node.api.allocate("slow", SMALL)
    thread = threading.Thread(target=node.preparer.prepare, args=(slow,), name="slow")
    thread.start()
    try:
        assert hanging.wait(60)
        for gpu in range(1, 8):
            claim = node.api.allocate(f"quick-{gpu}", f"gpu-{gpu}-mig-1g10gb-6")
            node.preparer.prepare(claim)
            node.preparer.unprepare(claim)
        assert thread.is_alive()
    finally:
        go_on.set()
        thread.join(60)
    assert wrong(node) == []


def test_7_a_benign_xid_does_not_overwrite_a_fatal_one_and_taints_survive_a_restart_and_end(tmp_path: Path) -> None:
    """A benign XID overwrites a fatal one, taints are lost with a restart, and never end while the plugin runs."""
    ill = HealthUnderTest(start_node(tmp_path, gpus="dgx-h100"))
    ill.xid(1, FATAL)
    ill.xid(1, BENIGN)
    assert ill.unhealthy() == {"gpu-1"}
    again = ill.restart()
    assert again.unhealthy() == {"gpu-1"}
    again.node.simulated.reset_gpu(1)
    again.look()
    assert again.unhealthy() == set()


def test_7_an_xid_of_the_whole_gpu_counts_on_one_in_mig_mode(node: NodeUnderTest) -> None:
    """XIDs of the whole GPU are ignored on GPUs in MIG mode."""
    node.preparer.prepare(node.api.allocate("infer", SMALL))
    ill = HealthUnderTest(node)
    ill.xid(0, FATAL)
    assert ill.unhealthy() == {"gpu-0"}


def test_7_one_lost_gpu_does_not_taint_the_others(node: NodeUnderTest) -> None:
    """A lost GPU taints all GPUs of the node."""
    ill = HealthUnderTest(node)
    node.simulated.faults.lose_gpu(3)
    ill.hear()
    ill.look()
    assert ill.unhealthy() == {"gpu-3"}


def test_11_mig_mode_stays_on_after_the_last_instance_so_that_the_next_claim_does_not_pay_for_it(
    tmp_path: Path,
) -> None:
    """Switched off with the last instance, the mode has to be switched on again for the next: seconds on hardware."""
    switched: list[NodeStep] = []

    def note(step: NodeStep, moment: Moment) -> None:
        if (step, moment) == (NodeStep.SET_MIG_MODE, "after"):
            switched.append(step)

    node = start_node(tmp_path, observer=note)
    for turn in range(3):
        claim = node.api.allocate(f"infer-{turn}", SMALL)
        node.preparer.prepare(claim)
        node.preparer.unprepare(claim)
        assert node.partitions() == []
    assert switched == [NodeStep.SET_MIG_MODE]
