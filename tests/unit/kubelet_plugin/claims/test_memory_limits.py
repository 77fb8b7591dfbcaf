"""Limits on the GPU memory of pods: what each pod may use, set before it starts, kept and removed."""

from __future__ import annotations

from pathlib import Path

import pynvml
import pytest

from driver.errors import HardwareError, StateError, UsageError
from driver.hardware.cgroups.pod_cgroups import PodCgroups
from driver.hardware.host import Host
from driver.hardware.host_paths import HostPaths
from driver.model.gpu import Gpu
from driver.model.offer import DeviceKind
from driver.model.shared_memory import MemoryLimit
from driver.simulator.node import SimulatedNode
from driver.simulator.state.gpu_load import SimulatedActivity, constant
from kubelet_plugin.checkpoint.records import ClaimRecord, DeviceRecord
from kubelet_plugin.claims.memory_limits import PodMemoryLimits, memory_by_pod
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.step_names import NodeStep, StepRunner
from tests.support.memory_limits import GIB, enable_below, machine_cgroup, make_cgroup, node_with_limits, read_limits

POD, OTHER = "2f0c3c1e-93a5-4d6f-9f4e-1c0f1b1e6a77", "5a0c3c1e-93a5-4d6f-9f4e-1c0f1b1e6a77"
BARE = "7c0c3c1e-93a5-4d6f-9f4e-1c0f1b1e6a77"
MAX = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    return node_with_limits(tmp_path / "node")


@pytest.fixture
def cgroups(node: SimulatedNode) -> dict[str, Path]:
    return {uid: make_cgroup(node, f"kubepods/burstable/pod{uid}") for uid in (POD, OTHER)}


def limits_of(node: SimulatedNode, steps: list[NodeStep] | None = None) -> tuple[PodMemoryLimits, Gpu]:
    paths = HostPaths(node.root, node.root)
    host = Host(node.nvml, paths, simulated=True)
    runner = StepRunner(took=lambda step, _: steps.append(step) if steps is not None else None)
    return PodMemoryLimits(host.memory_limits, PodCgroups(paths), runner), host.discover().gpus[0]


def allocate(node: SimulatedNode, gpu: Gpu, cgroup: Path, gib: int) -> None:
    node.put_load(gpu.uuid, constant(SimulatedActivity(), gib * GIB), cgroup=cgroup)


def claim(name: str, pod: str, *parts: tuple[str, int]) -> ClaimRecord:
    """The record of a claim that has, of each GPU of ``parts``, that many GiB."""
    devices = tuple(
        DeviceRecord(("r",), "pool", "gpu-0-shared", 0, gpu, DeviceKind.SHARED, gib=gib, limit=MemoryLimit.CGROUP)
        for gpu, gib in parts
    )
    return ClaimRecord.of(ClaimReference("default", name, name), "prepared", devices, "", pods=(pod,))


def test_a_pod_may_use_the_sum_of_its_claims_on_each_gpu() -> None:
    records = [
        claim("first", POD, ("GPU-a", 6), ("GPU-b", 4)),
        claim("second", POD, ("GPU-a", 2)),
        claim("third", OTHER, ("GPU-a", 2)),
    ]
    by_gpu = {gpu: memory_by_pod(gpu, records) for gpu in ("GPU-a", "GPU-b")}
    assert by_gpu == {"GPU-a": {POD: 8 * GIB, OTHER: 2 * GIB}, "GPU-b": {POD: 4 * GIB}}
    assert memory_by_pod("GPU-a", []) == {}


def test_pods_are_held_to_their_memory_and_are_free_again_once_it_is_lifted(
    node: SimulatedNode, cgroups: dict[str, Path]
) -> None:
    limits, gpu = limits_of(node)
    assert limits.unenforced(gpu) is None
    limits.apply(gpu, {POD: 6 * GIB, OTHER: 70 * GIB})
    container = make_cgroup(node, f"kubepods/burstable/pod{POD}/container")
    with pytest.raises(UsageError, match="OUT_OF_MEMORY"):
        allocate(node, gpu, container, 7)
    allocate(node, gpu, cgroups[OTHER], 60)
    limits.apply(gpu, {POD: 8 * GIB})
    allocate(node, gpu, container, 7)
    assert limits.check(gpu, {POD: 8 * GIB}) == ({POD: 7 * GIB}, {})
    limits.lift(gpu, [POD, "gone"])
    assert [read_limits(node, cgroups[uid])[1] for uid in (POD, OTHER)] == [MAX, 70 * GIB]


@pytest.mark.parametrize(("control", "limit"), [("dmem", 6 * GIB), ("misc", None)])
def test_containers_get_limits_of_their_own_only_where_those_of_the_pod_hold_them_together(
    tmp_path: Path, control: str, limit: int | None
) -> None:
    limits, gpu = limits_of(node_with_limits(tmp_path, cgroups=control))
    assert limits.container_limit(gpu, 6 * GIB) == limit


def test_limits_that_a_reload_of_the_driver_lost_are_set_again_and_those_in_force_are_left(
    node: SimulatedNode, cgroups: dict[str, Path]
) -> None:
    steps: list[NodeStep] = []
    limits, gpu = limits_of(node, steps)
    pods = {POD: 6 * GIB, OTHER: 2 * GIB}
    limits.apply(gpu, pods)
    assert steps == [NodeStep.SET_MEMORY_LIMIT] * 2
    limits.check(gpu, pods)
    limits.apply(gpu, pods)
    assert len(steps) == 2
    node.reload_driver()
    limits.check(gpu, pods | {"ended": GIB})
    assert [read_limits(node, cgroup)[1] for cgroup in cgroups.values()] == [6 * GIB, 2 * GIB]
    limits.lift(gpu, [POD])
    limits.lift(gpu, [POD])
    assert steps == [NodeStep.SET_MEMORY_LIMIT] * 4 + [NodeStep.LIFT_MEMORY_LIMIT]


def test_a_pod_without_a_cgroup_does_not_start(node: SimulatedNode) -> None:
    limits, gpu = limits_of(node)
    with pytest.raises(StateError, match=f"limiting the memory of pod {POD} on GPU-.*: no cgroup of this pod is below"):
        limits.apply(gpu, {POD: 6 * GIB})


def test_one_pod_that_cant_be_limited_leaves_no_other_without_limit(
    node: SimulatedNode, cgroups: dict[str, Path]
) -> None:
    limits, gpu = limits_of(node)
    bare = make_cgroup(node, f"kubepods/pod{BARE}")
    enable_below(bare.parent, "memory")
    _, failures = limits.check(gpu, {BARE: 6 * GIB, OTHER: 2 * GIB})
    assert "no dmem.max" in str(failures[BARE])
    assert read_limits(node, cgroups[OTHER])[1] == 2 * GIB


def test_what_nvml_refuses_is_an_error_unless_the_pod_has_ended(
    node: SimulatedNode, cgroups: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, gpu = limits_of(node)
    limits.apply(gpu, {POD: 6 * GIB})
    node.faults.fail("nvmlDeviceSetMemoryLimits_v1", code=pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(HardwareError, match="UNKNOWN"):
        limits.lift(gpu, [POD])
    _, failures = limits.check(gpu, {POD: 8 * GIB})
    assert "UNKNOWN" in str(failures[POD])
    monkeypatch.setattr(PodCgroups, "find", lambda *_, **__: cgroups[POD].with_name("gone"))
    limits.lift(gpu, [POD])
    assert limits.check(gpu, {POD: 8 * GIB}) == ({}, {})


def test_a_pod_of_the_machine_that_runs_the_node_is_found_and_limited(node: SimulatedNode) -> None:
    with machine_cgroup(node) as top:
        pod = top / "n1" / "kubepods" / "besteffort" / f"pod{POD}"
        folders = [top / "n1", top / "n1/kubepods", top / "n1/kubepods/besteffort", pod, pod / "container"]
        for folder in folders:
            folder.mkdir()
        try:
            limits, gpu = limits_of(node)
            limits.apply(gpu, {POD: 6 * GIB})
            with pytest.raises(UsageError, match="OUT_OF_MEMORY"):
                allocate(node, gpu, pod / "container", 7)
        finally:
            for folder in reversed(folders):
                folder.rmdir()
        assert limits.check(gpu, {POD: 6 * GIB}) == ({}, {})
