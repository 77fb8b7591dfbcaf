"""Limits on GPU memory through the Host, on simulated nodes with and without them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from driver.errors import HardwareError, StateError
from driver.hardware.cgroups.memory_limits import CgroupMemory
from driver.hardware.host import Host
from driver.hardware.host_paths import HostPaths
from driver.model.gpu import Gpu
from driver.simulator.node import SimulatedNode
from driver.simulator.state.gpu_load import SimulatedActivity, constant
from tests.support.memory_limits import GIB, enable_below, make_cgroup, node_with_limits, read_limits
from tests.support.nvml_client import enable_mig


def host_of(node: SimulatedNode) -> tuple[Host, Gpu]:
    host = Host(node.nvml, HostPaths(node.root, node.root), simulated=True)
    return host, host.discover().gpus[0]


@pytest.mark.parametrize(("control", "nests"), [("dmem", True), ("misc", False)])
def test_a_limit_that_was_set_is_in_force_until_it_is_cleared(tmp_path: Path, control: str, nests: bool) -> None:
    node = node_with_limits(tmp_path, cgroups=control)
    host, gpu = host_of(node)
    assert host.memory_limits.unsupported(gpu) is None
    assert host.memory_limits.is_enforced_by_kernel(gpu) == nests
    cgroup = make_cgroup(node, "kubepods/pod1")
    assert host.memory_limits.read(gpu, cgroup) == CgroupMemory(None, 0)
    host.memory_limits.set(gpu, cgroup, 6 * GIB)
    node.put_load(gpu.uuid, constant(SimulatedActivity(), GIB), cgroup=cgroup)
    assert host.memory_limits.read(gpu, cgroup) == CgroupMemory(6 * GIB, GIB)
    assert read_limits(node, cgroup)[0] == 0, "a soft limit would stay on the parents"
    host.memory_limits.clear(gpu, cgroup)
    assert host.memory_limits.read(gpu, cgroup) == CgroupMemory(None, GIB)


def in_mig_mode(node: SimulatedNode) -> None:
    enable_mig(node.nvml)


def unchanged(_: SimulatedNode) -> None:
    """Nothing more is the matter with the node."""


@pytest.mark.parametrize(
    ("changes", "change", "reason"),
    [
        ({"driver_version": "580.95.05"}, unchanged, "driver 580.95.5 can't limit .* 615 and newer can"),
        ({"cgroups": "v1"}, unchanged, "sys/fs/cgroup is not cgroup v2, .*: boot the node with systemd.unified"),
        ({}, in_mig_mode, "does not limit the memory of GPU-.* in MIG mode by cgroup"),
    ],
)
def test_a_gpu_without_limits_says_why(
    tmp_path: Path, changes: dict[str, object], change: Callable[[SimulatedNode], None], reason: str
) -> None:
    node = node_with_limits(tmp_path, **changes)
    change(node)
    host, gpu = host_of(node)
    assert re.search(reason, host.memory_limits.unsupported(gpu) or "")
    with pytest.raises(HardwareError):
        host.memory_limits.set(gpu, make_cgroup(node, "kubepods"), 6 * GIB)


def test_a_cgroup_without_the_controller_is_the_nodes_fault_not_the_gpus(tmp_path: Path) -> None:
    node = node_with_limits(tmp_path)
    host, gpu = host_of(node)
    cgroup = make_cgroup(node, "kubepods/pod1")
    enable_below(cgroup.parent, "memory")
    with pytest.raises(StateError, match=r"NOT_FOUND .*no dmem.max: write \+dmem to cgroup.subtree_control"):
        host.memory_limits.set(gpu, cgroup, 6 * GIB)
    with pytest.raises(HardwareError, match=r"setting the memory limit of .*/gone on GPU-.*NOT_FOUND"):
        host.memory_limits.set(gpu, node.root / "sys/fs/cgroup/gone", 6 * GIB)


def test_a_lost_gpu_is_an_error_not_a_gpu_without_limits(tmp_path: Path) -> None:
    node = node_with_limits(tmp_path)
    host, gpu = host_of(node)
    node.faults.fail("nvmlDeviceGetMemoryLimits_v1", code=pynvml.NVML_ERROR_GPU_IS_LOST)
    with pytest.raises(HardwareError, match="GPU_IS_LOST"):
        host.memory_limits.unsupported(gpu)
