"""A plugin that dies or fails at any step: restart and retry heal it."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver.errors import HardwareError, RecoverableError
from driver.model.gpu import Placement
from driver.slices.slice_names import MONITORS
from driver.step_observer import Moment
from kubelet_plugin.step_names import NodeStep, Observer
from tests.support.claims import POOL, result
from tests.support.node import start_node

SMALL = "gpu-0-mig-1g10gb-6"
BIG = "gpu-0-mig-3g40gb-0"
MONITOR = result("gpu-0-monitor", "monitor", pool=POOL + MONITORS, adminAccess=True)


class Crash(BaseException):
    """As sudden as SIGKILL: no handler of ours catches it."""


def crash_at(step: NodeStep, moment: Moment) -> Observer:
    def crash(at: NodeStep, when: Moment) -> None:
        if (at, when) == (step, moment):
            raise Crash

    return crash


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    "step",
    [
        NodeStep.CHECK_FREE,
        NodeStep.WRITE_INTENT,
        NodeStep.SET_MIG_MODE,
        NodeStep.CREATE_GPU_INSTANCE,
        NodeStep.CREATE_COMPUTE_INSTANCE,
        NodeStep.WRITE_CDI_SPEC,
        NodeStep.WRITE_PREPARED,
    ],
)
def test_a_crash_at_any_step_is_healed_by_restart_and_retry(tmp_path: Path, step: NodeStep, moment: Moment) -> None:
    node = start_node(tmp_path, observer=crash_at(step, moment))
    claim = node.api.allocate("infer", SMALL, MONITOR)
    with pytest.raises(Crash):
        node.preparer.prepare(claim)
    again = node.restart()
    assert again.preparer.prepare(claim)[0].device == SMALL
    assert len(again.partitions()) == len(again.cdi_specs()) == len(again.records()) == 1
    again.preparer.unprepare(claim)
    assert again.nothing_left()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    "step",
    [
        NodeStep.REMOVE_CDI_SPEC,
        NodeStep.DESTROY_COMPUTE_INSTANCE,
        NodeStep.DESTROY_GPU_INSTANCE,
        NodeStep.REMOVE_RECORD,
    ],
)
def test_a_crash_while_unpreparing_is_healed_by_the_retry(tmp_path: Path, step: NodeStep, moment: Moment) -> None:
    node = start_node(tmp_path, observer=crash_at(step, moment))
    claim = node.api.allocate("infer", SMALL, MONITOR)
    node.preparer.prepare(claim)
    with pytest.raises(Crash):
        node.preparer.unprepare(claim)
    again = node.restart()
    again.preparer.unprepare(claim)
    assert again.nothing_left()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    "step", [NodeStep.WRITE_INTENT, NodeStep.CREATE_COMPUTE_INSTANCE, NodeStep.WRITE_CDI_SPEC, NodeStep.WRITE_PREPARED]
)
def test_a_failed_prepare_undoes_what_it_did(tmp_path: Path, step: NodeStep, moment: Moment) -> None:
    faults = [(step, moment)]

    def fail(at: NodeStep, when: Moment) -> None:
        if (at, when) in faults:
            faults.remove((at, when))
            raise HardwareError("simulated fault")

    node = start_node(tmp_path, observer=fail)
    claim = node.api.allocate("infer", SMALL, MONITOR)
    with pytest.raises(RecoverableError, match="simulated fault"):
        node.preparer.prepare(claim)
    assert node.nothing_left()
    assert node.held() == set()
    assert node.preparer.prepare(claim)


def test_after_a_reboot_somebody_elses_partition_at_the_place_of_a_claims_own_is_neither_taken_nor_destroyed(
    tmp_path: Path,
) -> None:
    node = start_node(tmp_path)
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)
    node.simulated.reboot()
    again = node.restart()
    gpu = again.node.inventory.gpus[0]
    profile = gpu.profile_named("1g.10gb")
    assert profile is not None
    again.host.set_mig_mode(gpu, enabled=True)
    foreign = again.host.create_gpu_instance(gpu, profile, Placement(6, 1))
    with pytest.raises(HardwareError, match="taken by GPU instance"):
        again.preparer.prepare(claim)
    again.preparer.unprepare(claim)
    assert again.partitions() == [foreign]
    assert again.records() == []
    assert again.held() == set()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    "step", [NodeStep.CREATE_GPU_INSTANCE, NodeStep.CREATE_COMPUTE_INSTANCE, NodeStep.WRITE_CDI_SPEC]
)
def test_a_crash_while_a_claim_is_prepared_again_after_a_reboot_leaves_no_partition(
    tmp_path: Path, step: NodeStep, moment: Moment
) -> None:
    node = start_node(tmp_path)
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)
    node.simulated.reboot()
    cut_off = node.restart(crash_at(step, moment))
    with pytest.raises(Crash):
        cut_off.preparer.prepare(claim)
    again = cut_off.restart()
    again.preparer.unprepare(claim)
    assert not any(again.partitions(gpu) for gpu in range(8))
    assert again.records() == []
