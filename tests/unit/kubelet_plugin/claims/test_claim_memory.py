"""Claims of a shared GPU are held to their memory from the prepare to their end, whatever happens between."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pynvml
import pytest

from driver.errors import StateError, UsageError
from driver.model.gpu_settings import GpuSharing, parse_shared
from driver.model.shared_memory import MemoryLimit
from driver.simulator.state.gpu_load import SimulatedActivity, constant
from driver.step_observer import Moment, unobserved
from kubelet_plugin.reconcile.memory_watch import PODS_INTERVAL_SECONDS, MemoryWatch
from kubelet_plugin.status.claim_status import device_statuses
from kubelet_plugin.status.events import PluginEvents
from kubelet_plugin.step_names import NodeStep, Observer
from tests.support.claims import NODE, result
from tests.support.memory_limits import GIB, description_with_limits, make_cgroup, read_limits
from tests.support.node import KeptEvents, NodeUnderTest, start_node

POD, OTHER, LATER = (f"{letter}f0c3c1e-93a5-4d6f-9f4e-1c0f1b1e6a77" for letter in "abc")
UNLIMITED = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX


def started(root: Path, observer: Observer = unobserved, **changes: Any) -> NodeUnderTest:
    """A node whose first GPU is shared; ``changes`` are those of its description."""
    description = description_with_limits("h100-1", **changes)
    sharing = GpuSharing(lambda _: 0, strategy_of=parse_shared("all=time-slicing").of)
    return start_node(root, observer=observer, gpus=description, sharing=sharing)


@pytest.fixture
def node(tmp_path: Path) -> NodeUnderTest:
    found = started(tmp_path)
    for pod in (POD, OTHER, LATER):
        make_cgroup(found.simulated, f"kubepods/burstable/pod{pod}")
    return found


def part(gib: int, share: str) -> dict[str, Any]:
    return result("gpu-0-shared", shareID=share, consumedCapacity={"memory": f"{gib}Gi"})


def limit(node: NodeUnderTest, pod: str) -> int | None:
    """GiB to which a pod is limited; None: to nothing."""
    hard = read_limits(node.simulated, cgroup(node, pod))[1]
    return None if hard == UNLIMITED else hard // GIB


def cgroup(node: NodeUnderTest, pod: str) -> Path:
    return make_cgroup(node.simulated, f"kubepods/burstable/pod{pod}")


def watch(node: NodeUnderTest, events: KeptEvents, clock: Any = lambda: 0.0) -> MemoryWatch:
    memory = node.preparer.gpu_settings.memory
    return MemoryWatch(node.node, memory, node.api, PluginEvents(events.record, NODE), clock)


def test_a_pod_may_use_what_its_claims_have_and_nothing_once_they_have_ended(node: NodeUnderTest) -> None:
    first = node.api.allocate("first", part(6, "s1"), pods=(POD,))
    second = node.api.allocate("second", part(2, "s2"), pods=(POD,))
    other = node.api.allocate("other", part(70, "s3"), pods=(OTHER,))
    for claim in (first, second, other):
        node.preparer.prepare(claim)
    assert [limit(node, pod) for pod in (POD, OTHER)] == [8, 70]
    node.preparer.unprepare(first)
    assert [limit(node, pod) for pod in (POD, OTHER)] == [2, 70]
    for claim in (second, other):
        node.preparer.unprepare(claim)
    assert [limit(node, pod) for pod in (POD, OTHER)] == [None, None]
    assert node.nothing_left()


def test_a_pod_is_held_to_its_memory_on_a_gpu_that_was_partitioned_before(node: NodeUnderTest) -> None:
    partition = node.api.allocate("partition", "gpu-0-mig-1g10gb-0")
    node.preparer.prepare(partition)
    node.preparer.unprepare(partition)
    again = started(node.root)
    assert again.node.inventory.gpus[0].mig_mode.in_force
    assert [report.shared and report.shared.limit for report in again.node.inventory.states()] == [MemoryLimit.CGROUP]
    again.preparer.prepare(again.api.allocate("claim", part(6, "s1"), pods=(POD,)))
    assert limit(again, POD) == 6


def test_a_prepare_that_was_killed_before_the_gpu_left_mig_mode_is_undone(node: NodeUnderTest) -> None:
    partition = node.api.allocate("partition", "gpu-0-mig-1g10gb-0")
    node.preparer.prepare(partition)
    node.preparer.unprepare(partition)

    def kill(step: NodeStep, moment: Moment) -> None:
        if (step, moment) == (NodeStep.SET_MIG_MODE, "before"):
            raise KeyboardInterrupt

    killed = started(node.root, observer=kill)
    with pytest.raises(KeyboardInterrupt):
        killed.preparer.prepare(killed.api.allocate("claim", part(6, "s1"), pods=(POD,)))
    assert killed.records()
    assert started(node.root).nothing_left()


def test_no_limit_is_left_when_other_pods_use_a_claim_now(node: NodeUnderTest) -> None:
    claim = node.api.allocate("claim", part(6, "s1"), pods=(POD,))
    node.preparer.prepare(claim)
    node.api.allocate("claim", part(6, "s1"), pods=(OTHER,))
    node.preparer.prepare(claim)
    assert limit(node, OTHER) == 6
    node.preparer.unprepare(claim)
    assert [limit(node, pod) for pod in (POD, OTHER)] == [None, None]


def test_the_container_is_told_its_limit_and_people_are_told_what_holds_it(node: NodeUnderTest) -> None:
    node.preparer.prepare(node.api.allocate("claim", part(6, "s1"), pods=(POD,)))
    [[status]] = device_statuses(node.node.checkpoint.records()).values()
    assert status.data["memory"] == {"request": "6Gi", "limit": "cgroup", "strategy": "time-slicing"}
    assert "the driver holds its programs to that" in status.message


def test_a_claim_of_a_pod_without_a_cgroup_is_refused_and_leaves_nothing(node: NodeUnderTest) -> None:
    with pytest.raises(StateError, match="no cgroup of this pod"):
        node.preparer.prepare(node.api.allocate("claim", part(6, "s1"), pods=("dfffffff",)))
    assert node.nothing_left()


def test_limits_that_a_reload_of_the_driver_has_lost_are_set_again(node: NodeUnderTest) -> None:
    claim = node.api.allocate("claim", part(6, "s1"), pods=(POD,))
    node.preparer.prepare(claim)
    node.simulated.reload_driver()
    assert limit(node, POD) is None
    watch(node, KeptEvents()).handle_scan(node.node.inventory.gpus)
    assert limit(node, POD) == 6


def test_a_restarted_plugin_knows_the_limits_of_the_claims_before(node: NodeUnderTest) -> None:
    claim = node.api.allocate("claim", part(6, "s1"), pods=(POD,))
    node.preparer.prepare(claim)
    again = started(node.root)
    again.api.claims = node.api.claims
    assert again.preparer.prepare(claim)
    assert limit(again, POD) == 6
    again.preparer.unprepare(claim)
    assert limit(again, POD) is None


def test_a_pod_that_uses_a_claim_later_is_held_to_it_too_and_their_sum_is_watched(node: NodeUnderTest) -> None:
    claim = node.api.allocate("claim", part(6, "s1"), pods=(POD,))
    node.preparer.prepare(claim)
    node.api.allocate("claim", part(6, "s1"), pods=(POD, LATER))
    events, now = KeptEvents(), [0.0]
    watching = watch(node, events, lambda: now[0])
    look = partial(watching.handle_scan, node.node.inventory.gpus)
    look()
    assert [limit(node, pod) for pod in (POD, LATER)] == [6, 6]
    gpu = node.node.inventory.gpus[0].uuid
    for pid, pod in enumerate((POD, LATER), start=100):
        node.simulated.put_load(gpu, constant(SimulatedActivity(), 5 * GIB), pid=pid, cgroup=cgroup(node, pod))
    look()
    look()
    assert [(about, reason) for about, reason, _ in events.told] == [("ResourceClaim/claim", "AboveItsMemory")]
    assert "2 pods use 10 GiB" in events.told[0][2]
    reads = node.api.reads
    now[0] += PODS_INTERVAL_SECONDS / 2
    look()
    assert node.api.reads == reads, "the API server is not asked at each scan"
    node.preparer.unprepare(claim)
    assert [limit(node, pod) for pod in (POD, LATER)] == [None, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"driver_version": "580.95.05"}, "nothing holds its programs to that", id="older driver"),
        pytest.param({"cgroups": "v1"}, "nothing holds its programs to that", id="cgroup v1"),
    ],
)
def test_where_nothing_limits_memory_the_claim_is_prepared_and_says_so(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    node = started(tmp_path, **changes)
    claim = node.api.allocate("claim", part(6, "s1"), pods=(POD,))
    assert node.preparer.prepare(claim)
    [[status]] = device_statuses(node.node.checkpoint.records()).values()
    assert message in status.message
    node.preparer.unprepare(claim)
    assert node.nothing_left()


def test_a_program_gets_no_more_memory_than_its_claim_has(node: NodeUnderTest) -> None:
    node.preparer.prepare(node.api.allocate("claim", part(6, "s1"), pods=(POD,)))
    container = make_cgroup(node.simulated, f"kubepods/burstable/pod{POD}/container")
    put = partial(node.simulated.put_load, node.node.inventory.gpus[0].uuid)
    put(constant(SimulatedActivity(), 6 * GIB), cgroup=container)
    with pytest.raises(UsageError, match="OUT_OF_MEMORY"):
        put(constant(SimulatedActivity(), 7 * GIB), cgroup=container)


def test_a_claim_that_names_no_pod_is_held_to_nothing_and_says_so(node: NodeUnderTest) -> None:
    claim = node.api.allocate("of-a-group", part(6, "s1"))
    assert node.preparer.prepare(claim)
    [[status]] = device_statuses(node.node.checkpoint.records()).values()
    assert status.data["memory"]["limit"] == "none"
    node.preparer.unprepare(claim)
    assert node.nothing_left()
