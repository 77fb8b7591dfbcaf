"""Claims of a shared GPU are held to their memory from the prepare to their end, whatever happens between."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pynvml
import pytest

from driver.errors import HardwareError, StateError, UsageError
from driver.kube.types import OwnerReference
from driver.model.gpu_events_and_conditions import ConditionType
from driver.model.gpu_settings import GpuSharing, parse_shared
from driver.model.offer import DeviceKind
from driver.model.shared_memory import MemoryLimit
from driver.simulator.node import SimulatedNode
from driver.simulator.state.gpu_load import SimulatedActivity, constant
from driver.simulator.tree import CGROUPS, MACHINE_CGROUPS
from driver.slices.attributes import attributes
from driver.step_observer import Moment, unobserved
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.reconcile.later_pods import OWNED_PODS_INTERVAL_SECONDS, PODS_INTERVAL_SECONDS, LaterPods
from kubelet_plugin.reconcile.memory_watch import MemoryWatch
from kubelet_plugin.settings import NodeSettings
from kubelet_plugin.status.claim_status import device_statuses
from kubelet_plugin.status.events import PluginEvents
from kubelet_plugin.step_names import NodeStep, Observer
from tests.support.care import Care
from tests.support.claims import NODE, result
from tests.support.memory_limits import (
    GIB,
    description_with_limits,
    enable_below,
    handle,
    make_cgroup,
    read_limits,
)
from tests.support.node import EVERY_GPU_AS_FOUND, KeptChanges, KeptEvents, NodeUnderTest, choosing, start_node
from tests.support.nvml_client import enable_mig

POD, OTHER, LATER = (f"{letter}f0c3c1e-93a5-4d6f-9f4e-1c0f1b1e6a77" for letter in "abc")
UNLIMITED = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX


def started(
    root: Path, observer: Observer = unobserved, choice: NodeSettings = EVERY_GPU_AS_FOUND, **changes: Any
) -> NodeUnderTest:
    """A node whose first GPU is shared; ``changes`` are those of its description."""
    description = description_with_limits("h100-1", **changes)
    sharing = GpuSharing(lambda _: 0, strategy_of=parse_shared("all=time-slicing").of)
    return start_node(root, observer=observer, gpus=description, sharing=sharing, choice=choice)


@pytest.fixture
def node(tmp_path: Path) -> NodeUnderTest:
    found = started(tmp_path)
    (found.simulated.root / MACHINE_CGROUPS).unlink(missing_ok=True)  # pods of the machine that runs the test
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


def watch(
    node: NodeUnderTest, events: KeptEvents, clock: Callable[[], float] = time.monotonic, **changes: Any
) -> MemoryWatch:
    settings, notifier = node.preparer.gpu_settings, KeptChanges(node.changes)
    later = LaterPods(node.node, settings.memory, node.api, clock)
    return MemoryWatch(node.node, settings.memory, later, PluginEvents(events.record, NODE), notifier, **changes)


def scan(node: NodeUnderTest, watching: MemoryWatch) -> None:
    """Scan twice: what is reported once is not reported again."""
    for _ in range(2):
        node.scanner.scan(node.node.inventory, [watching])


def shown(node: NodeUnderTest) -> tuple[str, str]:
    """What ``status.devices`` says of the only claim: what holds it to its memory, and the message."""
    [[status]] = device_statuses(node.node.checkpoint.records()).values()
    return status.data["memory"]["limit"], status.message


def fail(function: str, code: int) -> Callable[[SimulatedNode], object]:
    return lambda simulated: simulated.faults.fail(function, code=code)


def lose_cgroup_v2(simulated: SimulatedNode) -> None:
    (simulated.root / CGROUPS / "cgroup.controllers").unlink()


def lose_dmem(simulated: SimulatedNode) -> None:
    """The limits, too, as by a reload of the driver."""
    simulated.reload_driver()
    enable_below(make_cgroup(simulated, "kubepods/burstable"), "memory")


def bring_back(simulated: SimulatedNode) -> None:
    """Undo whatever has ended the limits of cgroups."""
    simulated.faults.clear()
    assert simulated.nvml.nvmlDeviceSetMigMode(handle(simulated), pynvml.NVML_DEVICE_MIG_DISABLE) == 0
    (simulated.root / CGROUPS / "cgroup.controllers").write_text("memory pids dmem\n")
    enable_below(make_cgroup(simulated, "kubepods/burstable"), "memory", "dmem")


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


def test_a_pod_needs_no_other_pod_of_its_claim_to_start(node: NodeUnderTest) -> None:
    claim = node.api.allocate("claim", part(6, "s1"), pods=(POD, "not-started"))
    assert node.preparer.prepare(claim)
    assert limit(node, POD) == 6
    make_cgroup(node.simulated, "kubepods/burstable/podnot-started")
    watch(node, KeptEvents()).handle_scan(node.node.inventory.gpus)
    assert limit(node, "not-started") == 6


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


def test_claims_are_released_where_an_administrator_has_ended_all_limits(node: NodeUnderTest) -> None:
    claims = [node.api.allocate(name, part(6, name), pods=(POD,)) for name in ("first", "second")]
    for claim in claims:
        node.preparer.prepare(claim)
    enable_mig(node.simulated.nvml)
    for claim in claims:
        node.preparer.unprepare(claim)
    assert node.nothing_left()


def test_a_claim_that_cant_be_released_keeps_new_claims_away_until_the_last_such_claim_is(
    node: NodeUnderTest,
) -> None:
    care = Care(node)
    claims = [node.api.allocate(name, part(6, name), pods=(pod,)) for name, pod in (("first", POD), ("second", OTHER))]
    for claim in claims:
        node.preparer.prepare(claim)
    node.simulated.faults.fail("nvmlDeviceSetMemoryLimits_v1", code=pynvml.NVML_ERROR_UNKNOWN)
    for claim in claims:
        with pytest.raises(HardwareError, match="UNKNOWN"):
            node.preparer.unprepare(claim)
    care.look()
    care.look(after_s=61)
    assert care.troubles.keys() == {("gpu-0-shared", ConditionType.STUCK)}
    shutil.rmtree(cgroup(node, POD))
    node.preparer.unprepare(claims[0])
    care.look(after_s=1)
    assert care.troubles.keys() == {("gpu-0-shared", ConditionType.STUCK)}
    shutil.rmtree(cgroup(node, OTHER))
    care.look(after_s=11)
    assert not care.troubles


def test_a_pod_that_uses_a_claim_later_is_held_to_it_too_and_their_sum_is_watched(node: NodeUnderTest) -> None:
    claim = node.api.allocate("claim", part(6, "s1"), pods=(POD,))
    node.preparer.prepare(claim)
    node.api.allocate("claim", part(6, "s1"), pods=(POD, LATER))
    events, now = KeptEvents(), [0.0]
    above: list[int] = []
    watching = watch(node, events, report_above=above.append, clock=lambda: now[0])
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
    assert above == [0, 1, 1]
    reads = node.api.reads
    now[0] += PODS_INTERVAL_SECONDS / 2
    look()
    assert node.api.reads == reads, "the API server is not asked at each scan"
    node.preparer.unprepare(claim)
    assert [limit(node, pod) for pod in (POD, LATER)] == [None, None]


def test_a_pod_that_starts_on_the_node_makes_the_next_scan_ask_who_uses_the_claims_of_several_pods(
    node: NodeUnderTest,
) -> None:
    now, late = [0.0], "late-pod"
    node.preparer.prepare(node.api.allocate("claim", part(6, "s1"), pods=(POD,)))
    watching = watch(node, KeptEvents(), clock=lambda: now[0])

    def reads_of_next_scan() -> int:
        before, now[0] = node.api.reads, now[0] + 5
        watching.handle_scan(node.node.inventory.gpus)
        return node.api.reads - before

    assert [reads_of_next_scan() for _ in range(3)] == [1, 0, 0]
    node.api.allocate("claim", part(6, "s1"), pods=(POD, late))
    make_cgroup(node.simulated, f"kubepods/burstable/pod{late}")
    assert [reads_of_next_scan() for _ in range(3)] == [1, 0, 0]
    assert limit(node, late) == 6
    node.preparer.prepare(node.api.allocate("another", part(6, "s2"), pods=(OTHER,)))
    assert [reads_of_next_scan() for _ in range(2)] == [1, 0], "only the new claim, whose pod it knows"


def test_pods_of_a_claim_that_have_ended_are_forgotten(node: NodeUnderTest) -> None:
    claim = node.api.allocate("claim", part(6, "s1"), pods=(POD, OTHER))
    node.preparer.prepare(claim)
    node.api.allocate("claim", part(6, "s1"), pods=(LATER,))
    shutil.rmtree(cgroup(node, OTHER))
    watch(node, KeptEvents()).handle_scan(node.node.inventory.gpus)
    [record] = node.node.checkpoint.records()
    assert record.pods == (POD, LATER)
    assert limit(node, LATER) == 6


def test_a_scan_waits_once_for_an_api_server_that_does_not_answer(node: NodeUnderTest) -> None:
    for name in ("first", "second", "third"):
        node.preparer.prepare(node.api.allocate(name, part(6, name), pods=(POD,)))
    watching, reads = watch(node, KeptEvents()), node.api.reads
    node.api.away = True
    for _ in range(2):
        watching.handle_scan(node.node.inventory.gpus)
    assert node.api.reads == reads + 1


def test_a_claim_that_says_it_is_of_one_pod_is_believed_for_ten_minutes_only(node: NodeUnderTest) -> None:
    """Anybody who may create a claim may write its owners."""
    owned(node, node.api.allocate("claim", part(6, "s1"), pods=(POD,)))
    claim = node.api.claims["default", "claim"]
    node.preparer.prepare(ClaimReference("default", "claim", claim.metadata.uid))
    owned(node, node.api.allocate("claim", part(6, "s1"), pods=(POD, LATER)))
    now = [0.0]
    watching = watch(node, KeptEvents(), clock=lambda: now[0])
    reads = node.api.reads
    watching.handle_scan(node.node.inventory.gpus)
    now[0] = OWNED_PODS_INTERVAL_SECONDS - 1
    watching.handle_scan(node.node.inventory.gpus)
    assert node.api.reads == reads, "claims of one pod are the usual ones"
    now[0] = OWNED_PODS_INTERVAL_SECONDS
    watching.handle_scan(node.node.inventory.gpus)
    assert [limit(node, pod) for pod in (POD, LATER)] == [6, 6]


def owned(node: NodeUnderTest, claim: ClaimReference) -> None:
    """Write a pod as the controller of the claim."""
    stored = node.api.claims[claim.namespace, claim.name]
    owner = OwnerReference("Pod", "pod", controller=True, uid=POD)
    metadata = msgspec.structs.replace(stored.metadata, owner_references=(owner,))
    node.api.claims[claim.namespace, claim.name] = msgspec.structs.replace(stored, metadata=metadata)


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


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        pytest.param({}, "MemoryLimited", "the driver holds its programs to that", id="limited"),
        pytest.param(
            {"driver_version": "580.95.05"},
            "MemoryNotLimited",
            "can't limit GPU memory by cgroup; 615 and newer can",
            id="older driver",
        ),
        pytest.param({"cgroups": "v1"}, "MemoryNotLimited", "is not cgroup v2", id="cgroup v1"),
    ],
)
def test_an_event_says_once_what_holds_a_claim_to_its_memory(
    tmp_path: Path, changes: dict[str, Any], reason: str, message: str
) -> None:
    node, events = started(tmp_path, **changes), KeptEvents()
    make_cgroup(node.simulated, f"kubepods/burstable/pod{POD}")
    node.preparer.prepare(node.api.allocate("before", part(1, "s0"), pods=(POD,)))
    watching = watch(node, events)
    node.preparer.prepare(node.api.allocate("claim", part(6, "s1"), pods=(POD,)))
    for _ in range(2):
        watching.handle_scan(node.node.inventory.gpus)
    assert [(about, reason) for about, reason, _ in events.told] == [("ResourceClaim/claim", reason)]
    assert "6 GiB of GPU" in events.told[0][2]
    assert message in events.told[0][2]


def test_a_claim_that_nothing_limits_is_reported_while_it_uses_more_than_it_has(tmp_path: Path) -> None:
    node, events = started(tmp_path, driver_version="580.95.05"), KeptEvents()
    claims = [
        node.api.allocate(name, part(gib, name), pods=(pod,))
        for name, gib, pod in (("first", 6, POD), ("second", 2, POD), ("other", 4, OTHER))
    ]
    for claim in claims:
        node.preparer.prepare(claim)
    used: dict[str, int | None] = {}
    above: list[int] = []
    watching = watch(node, events, memory_used=lambda uid, _: used[uid], report_above=above.append)
    first, second, other = (claim.uid for claim in claims)
    for of_pod, of_other in ((8, 4), (8, 5), (9, 5), (9, None), (8, 4), (8, 5)):
        used = {first: of_pod * GIB, second: of_pod * GIB, other: None if of_other is None else of_other * GIB}
        watching.handle_scan(node.node.inventory.gpus)
    assert above == [0, 1, 3, 3, 0, 1]
    reported = [about for about, reason, _ in events.told if reason == "AboveItsMemory"]
    assert [about.partition("/")[2] for about in reported] == ["other", "first", "second", "other"]
    assert "5 GiB of GPU" in events.told[0][2]
    assert "nothing holds its programs to that" in events.told[0][2]


def in_containers(node: NodeUnderTest) -> list[str]:
    """What the CDI specs of claims say of a container's memory."""
    devices = [device["containerEdits"] for spec in node.cdi_specs().values() for device in spec["devices"]]
    hooks = [call["args"][1] for edits in devices for call in edits.get("hooks", [])]
    return hooks + [variable for edits in devices for variable in edits["env"] if "FRACTION" in variable]


HOOK, FRACTION = "apply-cuda-memory-limits", "XLA_PYTHON_CLIENT_MEM_FRACTION=0.0696"


READ, SET = "nvmlDeviceGetMemoryLimits_v1", "nvmlDeviceSetMemoryLimits_v1"


@pytest.mark.parametrize(
    ("end", "limit_now", "why"),
    [
        pytest.param(lambda node: enable_mig(node.nvml), "none", "in MIG mode by cgroup", id="MIG mode"),
        pytest.param(fail(READ, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND), "none", "615 and newer can", id="other driver"),
        pytest.param(lose_cgroup_v2, "none", "is not cgroup v2", id="no cgroup v2"),
        pytest.param(lose_dmem, "none", "the cgroup has no dmem.max", id="no controller"),
        pytest.param(fail(READ, pynvml.NVML_ERROR_UNKNOWN), "unknown", "NVML says UNKNOWN", id="no answer to this"),
        pytest.param(lambda node: node.faults.lose_gpu(0), "unknown", "GPU_IS_LOST", id="no answer at all"),
    ],
)
def test_a_claim_says_once_that_nothing_holds_it_to_its_memory_any_more_and_that_it_is_held_again(
    node: NodeUnderTest, end: Callable[[SimulatedNode], object], limit_now: str, why: str
) -> None:
    events = KeptEvents()
    watching = watch(node, events)
    node.preparer.prepare(node.api.allocate("claim", part(6, "s1"), pods=(POD,)))
    scan(node, watching)
    assert shown(node)[0] == "cgroup"
    node.changes.clear()
    end(node.simulated)
    scan(node, watching)
    assert shown(node)[0] == limit_now
    assert why in shown(node)[1]
    assert node.changes == ["held"], "status.devices is written again, once"
    bring_back(node.simulated)
    scan(node, watching)
    assert shown(node)[0] == "cgroup"
    assert limit(node, POD) == 6
    assert [reason for _, reason, _ in events.told] == ["MemoryLimited", "MemoryNotLimited", "MemoryLimited"]
    assert why in events.told[1][2]


def test_what_the_driver_did_not_say_at_the_start_is_asked_again_and_unknown_until_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = started(tmp_path)
    make_cgroup(before.simulated, f"kubepods/burstable/pod{POD}")
    before.simulated.faults.fail(READ, code=pynvml.NVML_ERROR_UNKNOWN)
    node, events = started(tmp_path), KeptEvents()
    watching = watch(node, events)
    node.preparer.prepare(node.api.allocate("claim", part(6, "s1"), pods=(POD,)))
    scan(node, watching)
    assert shown(node)[0] == "unknown"
    assert attribute(node) == "none", "nobody is promised a limit"
    assert [record.message for record in caplog.records].count("it is unknown whether GPU memory can be limited") == 1
    node.simulated.faults.clear()
    assert node.scanner.scan(node.node.inventory), "the slices are written again"
    scan(node, watching)
    assert (shown(node)[0], attribute(node), limit(node, POD)) == ("cgroup", "cgroup", 6)
    assert [reason for _, reason, _ in events.told] == ["MemoryNotLimited", "MemoryLimited"]
    assert "it is unknown whether anything holds its programs to that at run time: " in events.told[0][2]


def attribute(node: NodeUnderTest) -> str:
    """The attribute memoryLimit of the shared device."""
    devices = node.node.inventory.devices_on(node.node.inventory.gpus[0])
    return next(str(attributes(d)["memoryLimit"]["string"]) for d in devices if d.kind is DeviceKind.SHARED)


def test_a_restarted_plugin_does_not_report_again_that_nothing_holds_a_claim_to_its_memory(node: NodeUnderTest) -> None:
    node.preparer.prepare(node.api.allocate("claim", part(6, "s1"), pods=(POD,)))
    enable_mig(node.simulated.nvml)
    scan(node, watch(node, KeptEvents()))
    again, events = started(node.root), KeptEvents()
    assert shown(again)[0] == "none"
    scan(again, watch(again, events))
    assert events.told == []


@pytest.mark.parametrize(
    ("flags", "changes", "told"),
    [
        pytest.param({}, {}, [HOOK], id="hook"),
        pytest.param({"memory_hook": "none"}, {}, [FRACTION], id="hook switched off"),
        pytest.param({}, {"cgroups": "misc"}, [], id="containers see the pod's limit"),
        pytest.param({}, {"driver_version": "580.95.05"}, [FRACTION], id="older driver"),
    ],
)
def test_a_container_is_told_its_memory_unless_its_pod_has_two_claims(
    tmp_path: Path, flags: dict[str, object], changes: dict[str, Any], told: list[str]
) -> None:
    hook = started(tmp_path, **changes).simulated.root / "usr/bin/nvidia-cdi-hook"
    hook.parent.mkdir(parents=True, exist_ok=True)
    hook.write_text(f"{HOOK}\n")
    node = started(tmp_path, choice=choosing(framework_variables="jax", **flags), **changes)
    for pod in (POD, OTHER):
        make_cgroup(node.simulated, f"kubepods/burstable/pod{pod}")
    first, second, other = (
        node.api.allocate(name, part(6, name), pods=(pod,))
        for name, pod in (("first", POD), ("second", POD), ("other", OTHER))
    )
    node.preparer.prepare(first)
    assert in_containers(node) == told
    node.preparer.prepare(second)
    assert in_containers(node) == []
    node.preparer.prepare(other)
    assert in_containers(node) == told
    node.preparer.prepare(first)
    assert in_containers(node) == told


def test_a_program_gets_no_more_memory_than_its_claim_has(node: NodeUnderTest) -> None:
    node.preparer.prepare(node.api.allocate("claim", part(6, "s1"), pods=(POD,)))
    container = make_cgroup(node.simulated, f"kubepods/burstable/pod{POD}/container")
    put = partial(node.simulated.put_load, node.node.inventory.gpus[0].uuid)
    put(constant(SimulatedActivity(), 6 * GIB), cgroup=container)
    with pytest.raises(UsageError, match="OUT_OF_MEMORY"):
        put(constant(SimulatedActivity(), 7 * GIB), cgroup=container)


def test_a_claim_that_names_no_pod_is_held_to_nothing_and_says_so(node: NodeUnderTest) -> None:
    claim, events = node.api.allocate("of-a-group", part(6, "s1")), KeptEvents()
    watching = watch(node, events)
    assert node.preparer.prepare(claim)
    watching.handle_scan(node.node.inventory.gpus)
    assert "the claim is reserved for no pods, whose cgroups could be limited" in events.told[0][2]
    [[status]] = device_statuses(node.node.checkpoint.records()).values()
    assert status.data["memory"]["limit"] == "none"
    node.preparer.unprepare(claim)
    assert node.nothing_left()
