"""``tessera why`` on a real API server and scheduler: each reason, and that its advice gets the pod placed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod, ready_status
from tests.harness.waiting import DeadlineError, wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess
from tests.support.plugin import COMMAND_S, SLICES, TESSERA, PluginFlags, PluginProcess, bare_node
from tests.support.scheduling import asked
from tests.support.workloads import CLAIMS, PODS, is_gone

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.needs("shared counters")]

SOON_S = 60.0
NODES = {"one": "sim:h100-1", "plain": "sim:l40s-8"}
H100 = 'device.attributes["gpu.tessera.dev"].productName.startsWith("NVIDIA H100")'
L40S = 'device.attributes["gpu.tessera.dev"].productName == "NVIDIA L40S"'
RULES = "/apis/resource.k8s.io/v1/devicetaintrules"
NO_PROFILE = 'device.attributes["gpu.tessera.dev"].profile == "9g.90gb"'
SMALL = "gpu-inference-1g-10gb"
TAINT = {"key": "repair", "effect": "NoSchedule"}
NO_TAINT = "DeviceTaintRule repair with repair:NoSchedule were deleted, or the request tolerated its taint"
CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"


@dataclass
class Place:
    """A cluster with two nodes and a controller; what a test creates is gone after it."""

    cluster: Cluster
    controller: ControllerProcess
    plugin: PluginProcess
    paths: list[str] = field(default_factory=list)

    def post(self, folder: str, body: dict[str, Any]) -> None:
        self.cluster.api.post(folder, body)
        self.paths.append(f"{folder}/{body['metadata']['name']}")

    def ask(self, name: str, *requests: dict[str, Any], cpu: str = "1m", claim: str | None = None, **spec: Any) -> None:
        """A claim and its pod; ``claim`` only names one."""
        if claim is None:
            self.post(CLAIMS, {"metadata": {"name": name}, "spec": {"devices": {"requests": list(requests)}}})
        container = {"resources": {"claims": [{"name": "gpu"}], "requests": {"cpu": cpu}}}
        claims = [{"name": "gpu", "resourceClaimName": claim or name}]
        self.post(PODS, busybox_pod(name, container=container, resourceClaims=claims, **spec))

    def hold(self, name: str, *requests: dict[str, Any]) -> None:
        self.ask(name, *requests)
        self.wait_allocated(name)

    def is_allocated(self, name: str) -> bool:
        return bool(self.cluster.api.get(f"{CLAIMS}/{name}").get("status", {}).get("allocation"))

    def wait_allocated(self, name: str) -> None:
        wait_for(lambda: self.is_allocated(name), SOON_S, f"claim {name} is allocated")

    def end(self, *names: str) -> None:
        """End these pods and their claims."""
        self.delete(*(f"{folder}/{name}" for folder in (PODS, CLAIMS) for name in names))

    def clean(self) -> None:
        """Undo what a test did."""
        cordon_node(self, unschedulable=False)
        self.tessera("uncordon", "one/gpu-0")
        self.tessera("uncordon", "plain/gpu-7")
        self.delete(*reversed(self.paths))

    def delete(self, *paths: str) -> None:
        for path in paths:
            self.paths.remove(path)
            self.cluster.api.request("DELETE", path, {"gracePeriodSeconds": 0})
        for path in paths:
            wait_for(partial(is_gone, self.cluster, path), SOON_S, f"{path} is gone")

    def tessera(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [TESSERA, *arguments, "--kubeconfig", str(self.cluster.kubeconfig)]
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)

    def why(self, name: str) -> dict[str, Any]:
        answer = self.tessera("why", name, "-o", "json")
        assert answer.stdout, answer.stderr
        found, *_ = json.loads(answer.stdout)
        return dict(found)

    def reason(self, name: str, code: str) -> dict[str, Any]:
        """The explanation, once it has this code."""
        found: list[dict[str, Any]] = []

        def is_explained() -> bool:
            found.append(self.why(name))
            return bool(found[-1]["reason"] == code)

        try:
            wait_for(is_explained, SOON_S, f"{name}: {code}")
        except DeadlineError as error:
            raise DeadlineError(f"{error}: {found[-1]}") from error
        return found[-1]

    def named_in_change(self, name: str) -> list[str]:
        """The claims whose end is said to help."""
        [release] = [each for each in self.why(name)["changes"] if each["kind"] == "release"]
        return [claim.partition("/")[2] for claim in release["claims"]]

    def event(self, kind: str, name: str) -> dict[str, Any]:
        """The one Event of the controller about an object."""
        uid = self.cluster.api.get(f"{PODS if kind == 'Pod' else CLAIMS}/{name}")["metadata"]["uid"]
        events = self.cluster.api.get("/api/v1/namespaces/default/events")["items"]
        about = [each for each in events if each.get("reportingComponent") == "tessera-controller"]
        found = [each for each in about if each["involvedObject"]["uid"] == uid]
        assert len(found) <= 1
        return found[0] if found else {}


def all_reported(controller: ControllerProcess) -> bool:
    plans = controller.plans().values()
    return sum(bool(each.get("status", {}).get("inventory")) for each in plans) == len(NODES)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("why") as running:
        install(running)
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


def cordon_node(place: Place, *, unschedulable: bool) -> None:
    place.cluster.api.patch("/api/v1/nodes/one", {"spec": {"unschedulable": unschedulable}})


def share_on_cordoned_node(place: Place) -> None:
    place.hold("holder", asked("gpu-training", H100))
    cordon_node(place, unschedulable=True)


def hold_l40s(place: Place, *names: str) -> None:
    for name in names:
        place.hold(name, asked("gpu-training", L40S))


def allow_admin_access(place: Place) -> None:
    labels = {"resource.kubernetes.io/admin-access": "true"}
    place.cluster.api.patch("/api/v1/namespaces/default", {"metadata": {"labels": labels}})


def cordon_gpu(place: Place) -> None:
    place.tessera("cordon", "one/gpu-0")

    def is_withdrawn() -> bool:
        slices = [item["spec"] for item in place.cluster.api.get(SLICES)["items"]]
        return not any(spec.get("devices") for spec in slices if spec["nodeName"] == "one")

    wait_for(is_withdrawn, SOON_S, "nothing of the GPU is published")


def report_ready(place: Place, status: str) -> None:
    """As the kubelet of node one, or the node lifecycle controller in its place."""
    ready = ready_status()
    ready["status"]["conditions"][0]["status"] = status
    place.cluster.api.patch("/api/v1/nodes/one/status", ready)
    wait_for(lambda: bool(is_tainted(place)) == (status != "True"), SOON_S, "the node lifecycle controller has seen it")


def is_tainted(place: Place) -> bool:
    return bool(place.cluster.api.get("/api/v1/nodes/one")["spec"].get("taints"))


def fragment(place: Place) -> None:
    """Seven small partitions of a GPU, of which those two stay that keep the halves of its memory apart."""
    names = [f"small-{number}" for number in range(7)]
    for name in names:
        place.hold(name, asked(SMALL))
    at = {
        place.cluster.api.get(f"{CLAIMS}/{name}")["status"]["allocation"]["devices"]["results"][0]["device"]: name
        for name in names
    }
    stay = [next(at[device] for device in sorted(at) if int(device[-1]) // 4 == half) for half in (0, 1)]
    place.end(*(name for name in names if name not in stay))


def taint_rule(place: Place) -> None:
    spec = {"deviceSelector": {"pool": "one-gpu.tessera.dev"}, "taint": TAINT}
    place.post(RULES, {"metadata": {"name": "repair"}, "spec": spec})


def hold_beside_taint(place: Place) -> None:
    spec = {"deviceSelector": {"pool": "plain-gpu.tessera.dev", "device": "gpu-7"}, "taint": TAINT}
    place.post(RULES, {"metadata": {"name": "repair"}, "spec": spec})
    place.hold("holder", asked("gpu-training", L40S))


def end_taint_and_holder(place: Place) -> None:
    place.delete(f"{RULES}/repair")
    place.end("holder")


def hold_beside_cordon(place: Place) -> None:
    place.hold("holder", asked("gpu-training", L40S))
    place.tessera("cordon", "plain/gpu-7")


def mistaken_class(place: Place) -> None:
    selectors = [{"cel": {"expression": f"{L40S} && {NO_PROFILE}"}}]
    place.post(CLASSES, {"metadata": {"name": "mistaken"}, "spec": {"selectors": selectors}})


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
        "no GPU has it",
        {"name": "gpu", "exactly": {**asked("gpu-inference", NO_PROFILE)["exactly"], "adminAccess": True}},
        before=allow_admin_access,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_reason_is_true_the_event_says_the_same_and_the_way_out_helps(place: Place, name: str) -> None:
    case = CASES[name]
    case.before(place)
    place.ask("wanted", *filter(None, [case.request]), **case.pod)
    found = place.reason("pod/wanted", case.code)
    assert case.part in found["message"], found
    if case.change:
        assert any(each["text"].startswith(case.change) for each in found["changes"]), found["changes"]
    on_pod = wait_for(lambda: place.event("Pod", "wanted"), SOON_S, "an Event on the pod")
    wait_for(lambda: place.event("Pod", "wanted")["reason"] == case.code, SOON_S, f"{case.code} on the pod: {on_pod}")
    if "claim" not in case.pod:
        event = wait_for(lambda: place.event("ResourceClaim", "wanted"), SOON_S, "an Event on the claim")
        assert place.event("Pod", "wanted")["message"] == f"claim wanted: {event['message']}"
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
    assert (answer.returncode, "it is allocated: gpu-0 of pool one-gpu.tessera.dev" in answer.stdout) == (1, True)


def test_what_does_not_exist_and_what_is_not_pending_is_said_plainly(place: Place) -> None:
    answer = place.tessera("why", "nobody")
    assert (answer.returncode, "has no pod or ResourceClaim named nobody" in answer.stderr) == (1, True)
    answer = place.tessera("why", "-A")
    assert (answer.returncode, answer.stdout) == (0, "no claim is pending\n")


def kill_plugin(place: Place) -> None:
    """Once it offers small partitions, as it always does while one fits: afterwards it offers nothing new."""

    def is_offered() -> bool:
        devices = place.plugin.devices()
        return any("1g10gb-" in name and not device.get("taints") for name, device in devices.items())

    wait_for(is_offered, SOON_S, "small partitions are offered")
    place.plugin.kill()


def test_a_pool_that_a_dead_plugin_left_incomplete_is_named_until_the_plugin_runs_again(place: Place) -> None:
    kill_plugin(place)
    own = [each for each in place.cluster.api.get(SLICES)["items"] if each["spec"]["nodeName"] == "one"]
    count = len(own)
    for each in own:
        pool = {"spec": {"pool": {"resourceSliceCount": count + 1}}}
        place.cluster.api.patch(f"{SLICES}/{each['metadata']['name']}", pool)
    place.ask("wanted", asked(SMALL))
    found = place.reason("pod/wanted", "NotPublished")
    assert f"it has {count} of the {count + 1} slices" in found["message"]
    place.plugin.spawn()
    place.plugin.wait_published()
    place.wait_allocated("wanted")


def test_a_claim_that_is_allocated_while_no_plugin_runs_is_not_prepared(place: Place) -> None:
    kill_plugin(place)
    place.hold("wanted", asked(SMALL))
    found = place.reason("pod/wanted", "NotPrepared")
    assert "one has not prepared it: do the kubelet and the node plugin run there?" in found["message"]
    place.plugin.spawn()
    place.plugin.wait_published()
