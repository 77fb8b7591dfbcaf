"""``tessera why`` on a real API server and scheduler: each reason, and that its advice gets the pod placed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import ANY_SIZE, install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess
from tests.support.plugin import SLICES, PluginFlags, PluginProcess, bare_node
from tests.support.scheduling import asked
from tests.support.why_cluster import (
    H100,
    L40S,
    NO_PROFILE,
    NODES,
    RULES,
    SMALL,
    SOON_S,
    Place,
    allow_admin_access,
    cordon_gpu,
    cordon_node,
    end_taint_and_holder,
    fragment,
    hold_beside_cordon,
    hold_beside_taint,
    hold_l40s,
    kill_plugin,
    mistaken_class,
    report_ready,
    share_on_cordoned_node,
    taint_rule,
)
from tests.support.workloads import PODS

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(300), pytest.mark.needs("shared counters")]

NO_TAINT = "DeviceTaintRule repair with repair:NoSchedule were deleted, or the request tolerated its taint"


def all_reported(controller: ControllerProcess) -> bool:
    plans = controller.plans().values()
    return sum(bool(each.get("status", {}).get("inventory")) for each in plans) == len(NODES)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("why") as running:
        install(running, ANY_SIZE)
        yield running


@pytest.fixture(scope="module")
def without_controller(cluster: Cluster) -> Iterator[Place]:
    plugins = [PluginProcess(cluster, bare_node(cluster, name), PluginFlags(gpus=gpus)) for name, gpus in NODES.items()]
    for plugin in plugins:
        plugin.spawn()
    for plugin in plugins:
        plugin.wait_published()
    found = Place(cluster, ControllerProcess(cluster), plugins[0])
    wait_for(lambda: all_reported(found.controller), SOON_S, "all nodes have reported")
    yield found
    for plugin in plugins:
        plugin.stop()


@pytest.fixture(scope="module")
def running(without_controller: Place) -> Iterator[Place]:
    controller = without_controller.controller
    controller.start()
    modes = ["Planned"] * len(NODES)
    wait_for(lambda: [each["status"]["mode"] for each in controller.plans().values()] == modes, SOON_S, "all follow it")
    yield without_controller
    controller.stop()
    assert controller.refused() == []


@pytest.fixture
def place(running: Place) -> Iterator[Place]:
    yield running
    running.clean()


@dataclass(frozen=True)
class Case:
    """A pending claim ``wanted``: what was done ``before``, its reason, a part of the message, and the ``way_out``."""

    code: str
    part: str
    request: dict[str, Any]
    before: Callable[[Place], object] = lambda _: None
    way_out: Callable[[Place], object] | None = None
    change: str = ""
    pod: dict[str, Any] = field(default_factory=dict)


def test_before_any_controller_has_run_it_knows_what_is_free_and_who_holds_the_rest(without_controller: Place) -> None:
    place = without_controller
    place.hold("holder", asked("gpu-training", H100))
    place.ask("wanted", asked("gpu-training", H100))
    found = place.reason("pod/wanted", "AllHeld")
    assert found["requests"][0]["products"] == [
        {"product": "NVIDIA H100 80GB HBM3", "gpus": 1, "free": 0, "held": 1, "closed": {}}
    ]
    assert [each["claim"] for each in found["holders"]] == ["default/holder"]
    place.end("holder")
    place.wait_allocated("wanted")
    place.clean()


CASES = {
    "held": Case(
        "AllHeld",
        "none is free, of 1 NVIDIA H100",
        asked("gpu-training", H100),
        before=lambda place: place.hold("holder", asked("gpu-training", H100)),
        way_out=lambda place: place.end("holder"),
        change="claim default/holder ended (1 on node one, the fewest possible)",
    ),
    "two of one node, one is free": Case(
        "AllHeld",
        "needs 8 full GPUs of one node: at most 6 are free on one node (plain)",
        asked("gpu-training", L40S, count=8),
        before=lambda place: hold_l40s(place, "holder-0", "holder-1"),
        way_out=lambda place: place.end("holder-0", "holder-1"),
        change="claims default/holder-0, default/holder-1 ended (2 on node plain, the fewest possible)",
    ),
    "eighth small partition": Case(
        "ProfileLimitReached",
        "a GPU can have at most 7 of 1g.10gb, and gpu-0 of one has as many",
        asked(SMALL),
        before=lambda place: place.hold("holder", asked(SMALL, count=7)),
        way_out=lambda place: place.end("holder"),
        change="claim default/holder ended (1 on node one, the fewest possible)",
    ),
    "cordoned node": Case(
        "NodeClosed",
        "one is cordoned",
        asked("gpu-training", H100),
        before=lambda place: cordon_node(place, unschedulable=True),
        way_out=lambda place: cordon_node(place, unschedulable=False),
        change="node one were uncordoned (kubectl uncordon one)",
    ),
    "cordoned GPU": Case(
        "GpuCordoned",
        "an operator has cordoned it: gpu-0 of one (cordoned)",
        asked(SMALL),
        before=cordon_gpu,
        way_out=lambda place: place.tessera("uncordon", "one/gpu-0"),
        change="gpu-0 of one were uncordoned (tessera uncordon one/gpu-0)",
    ),
    "node that is not ready": Case(
        "NodeNotReady",
        "one is not ready",
        asked("gpu-training", H100),
        before=lambda place: report_ready(place, "False"),
        way_out=lambda place: report_ready(place, "True"),
        change="node one were ready",
    ),
    "fragments": Case(
        "Fragmented",
        "would make room",
        asked("gpu-inference-3g-40gb"),
        before=fragment,
        way_out=lambda place: place.end(*place.named_in_change("wanted")),
    ),
    "taint rule": Case(
        "DeviceTainted",
        "gpu-0 of one (DeviceTaintRule repair with repair:NoSchedule)",
        asked("gpu-training", H100),
        before=taint_rule,
        way_out=lambda place: place.delete(f"{RULES}/repair"),
        change=NO_TAINT,
    ),
    "taint rule, and held": Case(
        "DeviceTainted",
        "a DeviceTaintRule taints 1 of the 8 GPUs that have it",
        asked("gpu-training", L40S, count=8),
        before=hold_beside_taint,
        way_out=end_taint_and_holder,
        change=f"{NO_TAINT}, and claim default/holder ended",
    ),
    "cordoned GPU, and held": Case(
        "AllHeld",
        "on every node that has them some are in use",
        {"name": "gpu", "exactly": {**asked("gpu-training", L40S)["exactly"], "allocationMode": "All", "count": None}},
        before=hold_beside_cordon,
        way_out=lambda place: place.end("holder"),
        change="claim default/holder ended",
    ),
    "all partitions": Case(
        "OfferStandsUnused",
        "ask for a number of devices instead (allocationMode ExactCount)",
        {"name": "gpu", "exactly": {"deviceClassName": "gpu-inference", "allocationMode": "All"}},
    ),
    "mistake in a class": Case(
        "NothingMatches", "this condition is part of DeviceClass mistaken", asked("mistaken"), before=mistaken_class
    ),
    "no CPU where the GPU is": Case(
        "OfferStandsUnused", "Insufficient cpu", asked("gpu-training", H100), pod={"cpu": "1000"}
    ),
    "no CPU anywhere, and held": Case(
        "AllHeld",
        "besides, the scheduler reports on pod wanted: 0/2 nodes are available: 2 Insufficient cpu",
        asked("gpu-training", H100),
        before=lambda place: place.hold("holder", asked("gpu-training", H100)),
        pod={"cpu": "1000"},
    ),
    "node name": Case(
        "NodeNameSet", "pod wanted has spec.nodeName one", asked("gpu-training", H100), pod={"nodeName": "one"}
    ),
    "scheduling gate": Case(
        "SchedulingGated",
        "pod wanted has the scheduling gate example.com/wait",
        asked("gpu-training", H100),
        way_out=lambda place: place.cluster.api.patch(f"{PODS}/wanted", {"spec": {"schedulingGates": None}}),
        pod={"schedulingGates": [{"name": "example.com/wait"}]},
    ),
    "no such scheduler": Case(
        "OfferStandsUnused",
        "does a scheduler named none run?",
        asked("gpu-training", H100),
        pod={"schedulerName": "none"},
    ),
    "shared claim on a cordoned node": Case(
        "NodeClosed",
        "it has the claim holder, which is allocated on nodes where its pod can't run: one is cordoned",
        {},
        before=share_on_cordoned_node,
        change="node one were uncordoned (kubectl uncordon one)",
        pod={"claim": "holder"},
    ),
    "shared claim on a node without CPU": Case(
        "PodNotPlaced",
        "can only use its allocated claim holder on one, and is not placed there: the scheduler reports on pod wanted",
        {},
        before=lambda place: place.hold("holder", asked("gpu-training", H100)),
        pod={"claim": "holder", "cpu": "1000"},
    ),
    "too many": Case(
        "TooMany", "asks for 9 devices of one node; no node has more than 8", asked("gpu-training", L40S, count=9)
    ),
    "33 devices": Case("TooMany", "more than the 32 that one claim can have", asked(SMALL, count=33)),
    "product with a typing error": Case(
        "NothingMatches",
        "did you mean NVIDIA L40S?",
        asked("gpu-training", 'device.attributes["gpu.tessera.dev"].productName == "NVIDIA L40"'),
    ),
    "class with a typing error": Case("NoSuchClass", "did you mean gpu-training?", asked("gpu-traning")),
    "no such claim": Case("NoSuchClaim", "the ResourceClaim nope, which does not exist", {}, pod={"claim": "nope"}),
    "node selector": Case(
        "OnOtherNodesOnly",
        "one lacks the label kubernetes.io/hostname=plain",
        asked("gpu-training", H100),
        pod={"nodeSelector": {"kubernetes.io/hostname": "plain"}},
        change="its pod could run on node one",
    ),
    "admin access to nothing": Case(
        "NothingMatches",
        "selects no monitor device",
        {"name": "gpu", "exactly": {**asked("gpu-inference", NO_PROFILE)["exactly"], "adminAccess": True}},
        before=allow_admin_access,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_reason_is_true_the_event_says_the_same_and_the_way_out_helps(place: Place, name: str) -> None:
    case = CASES[name]
    case.before(place)
    requests = [case.request] if case.request else []
    place.reason_of_wanted(case.code, *requests, part=case.part, change=case.change, **case.pod)
    on_pod = wait_for(lambda: place.event("Pod", "wanted"), SOON_S, "an Event on the pod")
    wait_for(lambda: place.event("Pod", "wanted")["reason"] == case.code, SOON_S, f"{case.code} on the pod: {on_pod}")
    if "claim" not in case.pod:
        wait_for(lambda: place.event("ResourceClaim", "wanted"), SOON_S, "an Event on the claim")

        def both_say_the_same() -> bool:
            """The Events are written one after the other."""
            told = f"claim wanted: {place.event('ResourceClaim', 'wanted')['message']}"
            return bool(place.event("Pod", "wanted")["message"] == told)

        wait_for(both_say_the_same, SOON_S, "pod and claim say the same")
    if case.way_out is not None:
        case.way_out(place)
        place.wait_allocated("wanted")
        wait_for(lambda: place.event("ResourceClaim", "wanted")["reason"] == "Allocated", SOON_S, "the last Event")


def test_without_a_controller_it_says_the_same(place: Place) -> None:
    place.hold("holder", asked("gpu-training", H100))
    place.controller.stop()
    try:
        place.ask("wanted", asked("gpu-training", H100))
        assert place.reason("claim/wanted", "AllHeld")["holders"][0]["claim"] == "default/holder"
        text = place.tessera("why", "wanted").stdout
        assert "claim default/wanted of pod default/wanted, pending for" in text
        assert "claim default/holder ended" in text
    finally:
        place.controller.start()
    place.end("holder")
    place.wait_allocated("wanted")
    answer = place.tessera("why", "pod/wanted")
    assert (answer.exit_code, "it is allocated: gpu-0 of pool one-gpu.tessera.dev" in answer.stdout) == (1, True)


def test_what_does_not_exist_and_what_is_not_pending_is_said_plainly(place: Place) -> None:
    answer = place.tessera("why", "nobody")
    assert (answer.exit_code, "has no pod or ResourceClaim named nobody" in answer.stderr) == (1, True)
    answer = place.tessera("why", "-A")
    assert (answer.exit_code, answer.stdout) == (0, "no claim is pending\n")


def test_a_pool_that_a_dead_plugin_left_incomplete_is_named_until_the_plugin_runs_again(place: Place) -> None:
    kill_plugin(place)
    own = [each for each in place.cluster.api.get(SLICES)["items"] if each["spec"]["nodeName"] == "one"]
    count = len(own)
    for each in own:
        pool = {"spec": {"pool": {"resourceSliceCount": count + 1}}}
        place.cluster.api.patch(f"{SLICES}/{each['metadata']['name']}", pool)
    place.ask("wanted", asked(SMALL))
    place.reason("pod/wanted", "NotPublished", f"it has {count} of the {count + 1} slices")
    place.plugin.spawn()
    place.plugin.wait_published()
    place.wait_allocated("wanted")


def test_a_claim_that_is_allocated_while_no_plugin_runs_is_not_prepared(place: Place) -> None:
    kill_plugin(place)
    place.hold("wanted", asked(SMALL))
    place.reason("pod/wanted", "NotPrepared", "one has not prepared it: do the kubelet and the node plugin run there?")
    place.plugin.spawn()
    place.plugin.wait_published()
