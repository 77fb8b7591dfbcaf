"""Limits on GPU memory by cgroup in the simulated driver, as programs on the node meet them."""

from __future__ import annotations

import os
from pathlib import Path

import pynvml
import pytest

from driver.errors import UsageError
from driver.simulator.description import load_description
from driver.simulator.node import SimulatedNode
from driver.simulator.state.gpu_load import SimulatedActivity, constant
from driver.simulator.state.latency import ZERO_LATENCY
from driver.simulator.tree import CGROUPS
from tests.support.memory_limits import (
    GIB,
    enable_below,
    machine_cgroup,
    make_cgroup,
    node_with_limits,
    read_limits,
    set_limit,
)
from tests.support.nvml_client import enable_mig

MAX = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    return node_with_limits(tmp_path / "node")


@pytest.fixture
def misc(tmp_path: Path) -> SimulatedNode:
    return node_with_limits(tmp_path / "misc", cgroups="misc")


def allocate(node: SimulatedNode, gib: int, cgroup: Path | None, pid: int) -> None:
    phases = constant(SimulatedActivity(), gib * GIB)
    node.put_load(node.description.gpu_uuid(0), phases, pid=pid, cgroup=cgroup)


@pytest.mark.parametrize("kind", ["node", "misc"])
def test_a_limit_is_read_as_it_was_set_on_its_gpu_only_until_it_is_cleared(
    kind: str, request: pytest.FixtureRequest
) -> None:
    node: SimulatedNode = request.getfixturevalue(kind)
    cgroup = make_cgroup(node, "kubepods/pod1")
    assert read_limits(node, cgroup) == (0, MAX, 0)
    set_limit(node, cgroup, 6 * GIB)
    allocate(node, 2, cgroup, pid=7)
    assert read_limits(node, cgroup) == (0, 6 * GIB, 2 * GIB)
    assert not node.gpu_state(1).limits
    set_limit(node, cgroup, MAX)
    assert read_limits(node, cgroup) == (0, MAX, 2 * GIB)


def test_a_program_above_its_limit_is_out_of_memory_and_keeps_what_it_has(node: SimulatedNode) -> None:
    cgroup = make_cgroup(node, "kubepods/pod1")
    set_limit(node, cgroup, 6 * GIB)
    allocate(node, 4, cgroup, pid=7)
    with pytest.raises(UsageError, match=r"3072Mi ends in CUDA_ERROR_OUT_OF_MEMORY: .*pod1 is limited to 6144Mi and"):
        allocate(node, 3, cgroup, pid=8)
    allocate(node, 2, cgroup, pid=8)
    with pytest.raises(UsageError, match="OUT_OF_MEMORY"):
        allocate(node, 5, cgroup, pid=7)
    assert read_limits(node, cgroup)[2] == 6 * GIB


def test_where_nothing_limits_it_a_program_takes_the_whole_gpu(node: SimulatedNode) -> None:
    set_limit(node, make_cgroup(node, "kubepods/pod1"), 6 * GIB)
    allocate(node, 30, make_cgroup(node, "kubepods/pod2"), pid=7)
    allocate(node, 30, None, pid=8)


def test_with_dmem_limits_nest(node: SimulatedNode) -> None:
    pod = make_cgroup(node, "kubepods/pod1")
    set_limit(node, pod, 6 * GIB)
    containers = [make_cgroup(node, f"kubepods/pod1/{name}") for name in "ab"]
    for container in containers:
        set_limit(node, container, 6 * GIB)
    allocate(node, 4, containers[0], pid=7)
    with pytest.raises(UsageError, match=r"pod1 is limited"):
        allocate(node, 4, containers[1], pid=8)
    assert read_limits(node, pod)[2] == 4 * GIB


def test_with_dmem_a_soft_limit_stays_on_all_parents_unless_it_is_reset_before_its_cgroup_goes(
    node: SimulatedNode,
) -> None:
    top, pod, other = (make_cgroup(node, f"kubepods{path}") for path in ("", "/pod1", "/pod2"))
    set_limit(node, pod, 6 * GIB, soft=4 * GIB)
    set_limit(node, other, 6 * GIB, soft=GIB)
    assert read_limits(node, top) == (5 * GIB, MAX, 0)
    set_limit(node, other, 6 * GIB)
    pod.rmdir()
    assert read_limits(node, top)[0] == 4 * GIB
    set_limit(node, top, MAX)
    assert len(node.gpu_state(0).limits) == 1


def test_with_misc_only_the_nearest_limit_counts(misc: SimulatedNode) -> None:
    pod = make_cgroup(misc, "kubepods/pod1")
    set_limit(misc, pod, 6 * GIB)
    limited, unlimited = (make_cgroup(misc, f"kubepods/pod1/{name}") for name in "ab")
    set_limit(misc, limited, 8 * GIB)
    allocate(misc, 8, limited, pid=7)
    assert read_limits(misc, pod)[2] == 0
    with pytest.raises(UsageError, match=r"pod1 is limited to 6144Mi and uses 0Mi"):
        allocate(misc, 7, unlimited, pid=8)


def test_a_container_sees_its_pods_limit_only_if_it_lacks_the_controller(node: SimulatedNode) -> None:
    pod = make_cgroup(node, "kubepods/pod1")
    set_limit(node, pod, 6 * GIB)
    container = make_cgroup(node, "kubepods/pod1/a")
    assert read_limits(node, container)[1] == MAX
    enable_below(pod, "memory", "dmem")
    set_limit(node, container, 6 * GIB)
    set_limit(node, container, MAX)
    enable_below(pod, "memory")
    assert read_limits(node, container)[1] == 6 * GIB
    with pytest.raises(pynvml.NVMLError_NotFound):
        set_limit(node, container, 6 * GIB)


@pytest.mark.parametrize("kind", ["node", "misc"])
def test_a_reload_of_the_driver_and_a_removed_cgroup_lose_limits(kind: str, request: pytest.FixtureRequest) -> None:
    node: SimulatedNode = request.getfixturevalue(kind)
    pods = [make_cgroup(node, f"kubepods/pod{number}") for number in (1, 2)]
    for pod in pods:
        set_limit(node, pod, 6 * GIB)
    pods[0].rename(pods[0].with_name("old"))
    assert read_limits(node, make_cgroup(node, "kubepods/pod1"))[1] == MAX
    assert read_limits(node, pods[1])[1] == 6 * GIB
    node.reload_driver()
    assert read_limits(node, pods[1])[1] == MAX


def test_a_real_cgroup_takes_a_limit_that_ends_with_it(node: SimulatedNode) -> None:
    with machine_cgroup(node) as cgroup:
        set_limit(node, cgroup, 6 * GIB)
        set_limit(node, cgroup.resolve(), 5 * GIB)
        assert read_limits(node, cgroup)[1] == 5 * GIB
        cgroup.rmdir()
        with pytest.raises(pynvml.NVMLError_NotFound):
            read_limits(node, cgroup)
        cgroup.mkdir()
        assert read_limits(node, cgroup)[1] == MAX


@pytest.mark.parametrize(
    ("changes", "path", "refusal"),
    [
        ({"driver_version": "610.43.02"}, "kubepods", pynvml.NVMLError_FunctionNotFound),
        ({"cgroups": "v1"}, "kubepods", pynvml.NVMLError_NotSupported),
        ({}, "missing", pynvml.NVMLError_NotFound),
        ({}, "cgroup.controllers", pynvml.NVMLError_NotFound),
        ({}, "../../../../outside", pynvml.NVMLError_NotFound),
    ],
)
def test_what_has_no_limits_says_so(
    tmp_path: Path, changes: dict[str, object], path: str, refusal: type[Exception]
) -> None:
    node = node_with_limits(tmp_path / "other", **changes)
    (node.root / CGROUPS / "kubepods").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    with pytest.raises(refusal):
        set_limit(node, node.root / CGROUPS / path, 6 * GIB)
    with pytest.raises(refusal):
        read_limits(node, node.root / CGROUPS / path)


def test_nobody_but_root_sets_limits_and_none_has_a_soft_one_above_the_hard_one(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    cgroup = make_cgroup(node, "kubepods/pod1")
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        set_limit(node, cgroup, 6 * GIB, soft=7 * GIB)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(pynvml.NVMLError_NoPermission):
        set_limit(node, cgroup, 6 * GIB)
    assert read_limits(node, cgroup)[1] == MAX


def test_a_gpu_in_mig_mode_has_no_limits(node: SimulatedNode) -> None:
    cgroup = make_cgroup(node, "kubepods/pod1")
    enable_mig(node.nvml)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        set_limit(node, cgroup, 6 * GIB)


def test_nodes_with_older_drivers_have_no_cgroups_and_are_read_by_earlier_versions(tmp_path: Path) -> None:
    node = SimulatedNode.open(load_description("h100-1"), tmp_path / "node", latency=ZERO_LATENCY)
    assert not (node.root / CGROUPS).exists()
    assert "cgroups" not in (node.root / "sim/node.json").read_text()
