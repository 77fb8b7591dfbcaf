"""Claims that share a GPU by MPS, from the prepare to the release: what they get, and what is left after the last."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from driver.errors import ClaimError, MpsError
from driver.model.gpu_settings import ComputeMode, GpuSharing, parse_shared
from driver.step_observer import Moment, unobserved
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.mps.client import MpsAccess
from kubelet_plugin.reconcile.mps_watch import MpsWatch
from kubelet_plugin.status.claim_status import device_statuses
from kubelet_plugin.status.events import PluginEvents
from kubelet_plugin.step_names import NodeStep, Observer
from tests.harness.waiting import wait_for
from tests.support.claims import NODE, opaque, result
from tests.support.health import HealthUnderTest
from tests.support.mps import LEGACY, WITH_PROTOCOL_3, MpsProcess, mps_node, mps_process, running
from tests.support.node import KeptEvents, NodeUnderTest, start_node
from tests.support.nvml_client import set_compute_mode

BY_MPS = GpuSharing(lambda _: 0, strategy_of=parse_shared("all=mps").of)
KILLS = [
    *((NodeStep.SET_MEMORY_LIMIT, number) for number in (1, 2, 3)),
    *((NodeStep.LIFT_MEMORY_LIMIT, number) for number in (1, 2)),
]
"""Compute mode, daemon, limits; limits and daemon, compute mode."""


class Crash(BaseException):
    """As sudden as SIGKILL: no handler of ours catches it."""


@pytest.fixture(params=[LEGACY, WITH_PROTOCOL_3], ids=["driver 580", "driver 615"])
def process(request: pytest.FixtureRequest) -> Iterator[MpsProcess]:
    with mps_process(request.param) as started:
        yield started


@pytest.fixture
def node(process: MpsProcess) -> NodeUnderTest:
    return plugin(process)


def plugin(process: MpsProcess, observer: Observer = unobserved, api: Any = None) -> NodeUnderTest:
    """The plugin of the process' node, started or started again."""
    mps = process.mps
    return start_node(process.directory.parent, api, observer, mps.node.description, sharing=BY_MPS)


def part(gib: int, gpu: int = 0, request: str = "gpu") -> dict[str, Any]:
    capacity = {"memory": f"{gib}Gi"}
    return result(f"gpu-{gpu}-shared", request, shareID=str(uuid.uuid4()), consumedCapacity=capacity)


def shared_config(**fields: Any) -> dict[str, Any]:
    return opaque({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "SharedConfig", **fields})


def access(node: NodeUnderTest, claim: ClaimReference) -> MpsAccess:
    """What a container with ``claim`` gets."""
    [spec] = [spec for name, spec in node.cdi_specs().items() if claim.uid in name]
    edits = spec["devices"][0]["containerEdits"]
    [mount] = edits["mounts"]
    assert "ro" in mount["options"], "nobody replaces the daemon's socket"
    assert not any("nvidia-cuda-mps" in other["containerPath"] for other in spec["containerEdits"]["mounts"])
    variables = dict(text.split("=", 1) for text in edits["env"])
    assert variables["CUDA_MPS_PIPE_DIRECTORY"] == mount["containerPath"]
    return MpsAccess(mount["hostPath"], mount["containerPath"], variables)


def complaint(process: MpsProcess, node: NodeUnderTest, claim: ClaimReference, *load: str) -> str:
    """Why a program in a container with ``claim`` fails; "": it does not."""
    return str(process.load(access(node, claim), *load).exception or "")


def mode(node: NodeUnderTest) -> ComputeMode:
    return ComputeMode(node.simulated.gpu_state(0).compute_mode)


def prepare_and_unprepare(node: NodeUnderTest, claim: ClaimReference) -> None:
    node.preparer.prepare(claim)
    node.preparer.unprepare(claim)


def nothing_left(process: MpsProcess, node: NodeUnderTest) -> bool:
    daemons = process.client.daemons() or running(node.simulated.root)
    files = {path.name for path in process.directory.iterdir()} - {"socket", "lock"}
    return node.nothing_left() and not daemons and not files and mode(node) is ComputeMode.DEFAULT


def scan(node: NodeUnderTest) -> list[tuple[str, str, str]]:
    """The Events of the next scan of the node's GPUs."""
    events = KeptEvents()
    watch_of(node, events, HealthUnderTest(node)).handle_scan(node.node.inventory.gpus)
    return events.told


def watch_of(node: NodeUnderTest, events: KeptEvents, health: HealthUnderTest) -> MpsWatch:
    mps = node.preparer.gpu_settings.mps
    return MpsWatch(node.node, mps, PluginEvents(events.record, NODE), health.health.set_condition)


def kill_daemon(process: MpsProcess) -> int:
    """Kill the daemon of the only GPU; returns its process id."""
    [state] = process.client.daemons()
    os.kill(state.pid, signal.SIGKILL)
    wait_for(lambda: process.client.daemons()[0].pid == 0, 20, "the daemon is seen to be dead")
    return state.pid


def test_each_claim_is_held_to_its_memory_and_threads_and_the_last_leaves_nothing(
    process: MpsProcess, node: NodeUnderTest
) -> None:
    small = node.api.allocate("small", part(2), config=[shared_config(mps={"activeThreadPercentage": 30})])
    large = node.api.allocate("large", part(6))
    for claim in (small, large, small):
        assert node.preparer.prepare(claim)
    assert mode(node) is ComputeMode.EXCLUSIVE_PROCESS
    assert "at most 2048Mi" in complaint(process, node, small, "--memory", "3Gi")
    assert "0 to 0.3:" in complaint(process, node, small, "--sm", "0.4")
    assert not complaint(process, node, small, "--memory", "2Gi", "--pid", "7")
    assert not complaint(process, node, large, "--memory", "6Gi", "--sm", "0.9", "--pid", "8")
    node.preparer.unprepare(large)
    assert not complaint(process, node, small, "--memory", "1Gi", "--pid", "7")
    node.preparer.unprepare(small)
    assert nothing_left(process, node)


def test_people_read_what_holds_the_claim_and_that_mps_does_not_isolate(node: NodeUnderTest) -> None:
    node.preparer.prepare(node.api.allocate("claim", part(2)))
    [[status]] = device_statuses(node.node.checkpoint.records()).values()
    assert status.data["memory"]["strategy"] == "mps"
    assert "ends the programs of all claims" in status.message


def test_a_restarted_plugin_finds_the_daemon_and_ends_it_after_the_last_claim(
    process: MpsProcess, node: NodeUnderTest
) -> None:
    set_compute_mode(node.simulated, "EXCLUSIVE_PROCESS")  # the administrator's own choice
    first, second = node.api.allocate("first", part(2)), node.api.allocate("second", part(6))
    for claim in (first, second):
        node.preparer.prepare(claim)
    before = process.client.daemons()
    again = plugin(process, api=node.api)
    assert again.preparer.prepare(first)
    assert scan(again) == []
    assert process.client.daemons() == before
    for claim in (first, second):
        again.preparer.unprepare(claim)
    assert mode(again) is ComputeMode.EXCLUSIVE_PROCESS
    set_compute_mode(node.simulated, "DEFAULT")
    assert nothing_left(process, again)


def test_a_daemon_that_died_is_reported_on_each_claim_and_new_containers_get_another(
    process: MpsProcess, node: NodeUnderTest
) -> None:
    claims = [node.api.allocate(name, part(2)) for name in ("first", "second")]
    for claim in claims:
        node.preparer.prepare(claim)
    pid = kill_daemon(process)
    told = scan(node)
    named = {(about, reason) for about, reason, _ in told if about.startswith("ResourceClaim")}
    assert named == {("ResourceClaim/first", "MPSServerLost"), ("ResourceClaim/second", "MPSServerLost")}
    assert f"MPS control daemon {pid} has ended" in told[0][2]
    assert "at most 2048Mi" in complaint(process, node, claims[0], "--memory", "3Gi")
    assert not complaint(process, node, claims[0], "--memory", "2Gi")
    for claim in claims:
        node.preparer.unprepare(claim)
    assert nothing_left(process, node)


def test_a_gpu_whose_daemon_died_gets_no_new_claims_until_all_claims_have_another(process: MpsProcess) -> None:
    fails: list[bool] = []

    def fail(at: NodeStep, when: Moment) -> None:
        if at is NodeStep.SET_MEMORY_LIMIT and when == "before" and fails and fails.pop(0):
            raise MpsError("it does not answer")

    node = plugin(process, fail)
    health = HealthUnderTest(node)
    watch = watch_of(node, KeptEvents(), health)
    claims = [node.api.allocate(name, part(2)) for name in ("first", "second")]
    for claim in claims:
        node.preparer.prepare(claim)
    pid = kill_daemon(process)
    fails += [*[False] * 5, True]  # the limits of the claim that comes second
    watch.handle_scan(node.node.inventory.gpus)
    [state] = process.client.daemons()
    assert state.pid, "another daemon runs"
    assert health.taints() == {"gpu-0-shared": "mps-lost"}
    holders = health.health.reason_for_holders(health.device("gpu-0-shared")) or ""
    assert holders.startswith(f"mps-lost: MPS control daemon {pid} has ended, and no other one has the limits of all")
    assert [gpu.fault for gpu in node.node.inventory.states()] == [None], "the controller evicts nobody"
    watch.handle_scan(node.node.inventory.gpus)
    assert health.taints() == {}
    for claim in claims:
        assert "at most 2048Mi" in complaint(process, node, claim, "--memory", "3Gi")
        assert not complaint(process, node, claim, "--memory", "2Gi")


def test_a_gpu_whose_daemon_can_not_start_again_is_free_after_the_last_claim(
    process: MpsProcess, node: NodeUnderTest
) -> None:
    claim = node.api.allocate("claim", part(2))
    node.preparer.prepare(claim)
    health = HealthUnderTest(node)
    watch = watch_of(node, KeptEvents(), health)
    kill_daemon(process)
    program = process.mps.program.rename(process.mps.program.with_name("away"))
    for _ in range(2):
        watch.handle_scan(node.node.inventory.gpus)
        assert health.taints() == {"gpu-0-shared": "mps-lost"}
    node.preparer.unprepare(claim)
    watch.handle_scan(node.node.inventory.gpus)
    assert health.taints() == {}
    program.rename(process.mps.program)
    assert nothing_left(process, node)


def test_without_an_mps_pod_a_claim_is_refused_and_a_release_does_not_wait(
    process: MpsProcess, node: NodeUnderTest
) -> None:
    claim = node.api.allocate("claim", part(2))
    node.preparer.prepare(claim)
    process.kill()  # its daemons go on, as if the pod came back at once
    with pytest.raises(MpsError, match="no MPS daemon pod answers on this node"):
        node.preparer.prepare(node.api.allocate("another", part(2)))
    node.preparer.unprepare(claim)
    assert node.nothing_left()
    assert mode(node) is ComputeMode.DEFAULT
    assert scan(node) == [], "the next scan tries again"
    process.start()
    scan(node)
    assert nothing_left(process, node)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_while_mps_is_set_or_taken_back_is_healed_by_the_kubelets_retry(
    process: MpsProcess, moment: Moment
) -> None:
    for step, number in KILLS:
        came: list[tuple[NodeStep, Moment]] = []

        def crash(at: NodeStep, when: Moment, point: Any = (step, moment, number, came)) -> None:
            point[3].append((at, when))
            if (at, when) == point[:2] and point[3].count(point[:2]) == point[2]:
                raise Crash

        node = plugin(process, crash)
        claim = node.api.allocate("claim", part(2))
        with pytest.raises(Crash):
            prepare_and_unprepare(node, claim)
        again = plugin(process, api=node.api)
        assert again.preparer.prepare(claim)
        assert not complaint(process, again, claim, "--memory", "2Gi")
        again.preparer.unprepare(claim)
        assert nothing_left(process, again), (step, number)


@pytest.mark.parametrize(
    ("devices", "config", "message"),
    [
        pytest.param(
            [part(2)],
            [shared_config(strategy="TimeSlicing")],
            "strategy is TimeSlicing, and claims share gpu-0-shared by MPS",
            id="other strategy",
        ),
        pytest.param(
            [part(2, 0, "a"), part(2, 1, "b")],
            [],
            "through which a program can use one GPU: request one",
            id="two GPUs",
        ),
    ],
)
def test_what_mps_can_not_do_is_refused(
    devices: list[dict[str, Any]], config: list[dict[str, Any]], message: str
) -> None:
    with mps_node(LEGACY, gpus=2) as mps:
        node = start_node(mps.pipe.parent, gpus=mps.node.description, sharing=BY_MPS)
        with pytest.raises(ClaimError, match=message):
            node.preparer.prepare(node.api.allocate("claim", *devices, config=config))
        assert node.nothing_left()


@pytest.mark.parametrize(
    ("loses_spec", "released_by"),
    [
        pytest.param(False, lambda node, claim: prepare_and_unprepare(node, claim), id="its record is rebuilt"),
        pytest.param(False, lambda node, claim: node.preparer.unprepare(claim), id="it is released by its CDI spec"),
        pytest.param(True, lambda *_: None, id="nothing is left of it"),
    ],
)
def test_the_compute_mode_comes_back_though_the_record_that_had_it_is_lost(
    process: MpsProcess,
    node: NodeUnderTest,
    loses_spec: bool,
    released_by: Callable[[NodeUnderTest, ClaimReference], None],
) -> None:
    claim = node.api.allocate("claim", part(2))
    node.preparer.prepare(claim)
    before = process.client.daemons()
    for folder in ("state/claims", "cdi") if loses_spec else ("state/claims",):
        for path in (node.root / folder).iterdir():
            path.unlink()
    again = plugin(process, api=node.api)
    scan(again)
    if not loses_spec:
        assert process.client.daemons() == before, "its programs may run"
    released_by(again, claim)
    scan(again)
    assert nothing_left(process, again)
