"""The compute mode of a GPU shared by MPS: set for the first claim, checked for each, set back after the last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from driver.errors import HardwareError
from driver.hardware.host import Host
from driver.hardware.host_paths import HostPaths
from driver.model.gpu import Gpu
from driver.model.gpu_settings import ComputeMode
from driver.simulator.node import SimulatedNode
from kubelet_plugin.claims.compute_modes import ComputeModes
from tests.support.nvml_client import enable_mig, one_h100, set_compute_mode


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    return one_h100(tmp_path / "node")


def modes_of(node: SimulatedNode) -> tuple[ComputeModes, Gpu]:
    host = Host(node.nvml, HostPaths(node.root, node.root), simulated=True)
    return ComputeModes(host), host.discover().gpus[0]


def mode(node: SimulatedNode) -> ComputeMode:
    return ComputeMode(node.gpu_state(0).compute_mode)


@pytest.mark.parametrize("before", [ComputeMode.DEFAULT, ComputeMode.EXCLUSIVE_PROCESS])
def test_the_mode_that_was_found_comes_back_after_the_last_claim(node: SimulatedNode, before: ComputeMode) -> None:
    set_compute_mode(node, before.name)
    modes, gpu = modes_of(node)
    found = modes.to_restore(gpu)
    for _ in range(2):
        modes.hold(gpu)
        assert mode(node) is ComputeMode.EXCLUSIVE_PROCESS
    for _ in range(2):
        modes.restore(gpu, found)
        assert mode(node) is before


def test_a_mode_that_a_reboot_or_somebody_set_back_is_set_again_at_the_next_prepare(node: SimulatedNode) -> None:
    modes, gpu = modes_of(node)
    modes.hold(gpu)
    node.reboot()
    modes.hold(gpu)
    assert mode(node) is ComputeMode.EXCLUSIVE_PROCESS


def test_a_mode_that_an_administrator_chose_meanwhile_stays(node: SimulatedNode) -> None:
    modes, gpu = modes_of(node)
    modes.hold(gpu)
    set_compute_mode(node, "PROHIBITED")
    modes.restore(gpu, ComputeMode.DEFAULT)
    assert mode(node) is ComputeMode.PROHIBITED


def test_a_gpu_that_its_administrator_has_closed_is_refused_and_stays_closed(node: SimulatedNode) -> None:
    modes, gpu = modes_of(node)
    set_compute_mode(node, "PROHIBITED")
    for call in (modes.to_restore, modes.hold):
        with pytest.raises(HardwareError, match=r"is PROHIBITED, .*nvidia-smi -i GPU-.* -c DEFAULT"):
            call(gpu)
    assert mode(node) is ComputeMode.PROHIBITED


@pytest.mark.parametrize(
    ("disturb", "code"),
    [
        (lambda node: enable_mig(node.nvml), pynvml.NVML_ERROR_NOT_SUPPORTED),
        (lambda node: node.faults.lose_gpu(0), pynvml.NVML_ERROR_GPU_IS_LOST),
        (
            lambda node: node.faults.fail("nvmlDeviceSetComputeMode", code=pynvml.NVML_ERROR_NO_PERMISSION),
            pynvml.NVML_ERROR_NO_PERMISSION,
        ),
    ],
    ids=["MIG mode", "a lost GPU", "no right"],
)
def test_a_mode_that_cannot_be_set_is_an_error_with_nvmls_code(
    node: SimulatedNode, disturb: Callable[[SimulatedNode], object], code: int
) -> None:
    modes, gpu = modes_of(node)
    disturb(node)
    with pytest.raises(HardwareError) as refused:
        modes.hold(gpu)
    assert refused.value.code == code


def test_a_gpu_without_modes_can_be_released(node: SimulatedNode) -> None:
    modes, gpu = modes_of(node)
    node.faults.fail("nvmlDeviceGetComputeMode", code=pynvml.NVML_ERROR_NOT_SUPPORTED)
    modes.restore(gpu, ComputeMode.DEFAULT)
