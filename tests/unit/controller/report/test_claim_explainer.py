"""What ``tessera why`` says of pods and claims, on a view of a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controller.eviction.failed_starts import FailedStart
from controller.report.claim_explainer import Explainer, Explanation
from controller.report.cluster_view import ClusterReads
from driver.kube.types import Key, Pod
from driver.model.reported_gpus import FaultKind
from tests.support.map_cluster import MapCluster
from tests.support.queues import ATTRIBUTES, FULL, profile, request

ELSEWHERE: dict[str, Any] = {"nodeSelector": {"zone": "x"}}


def cluster() -> MapCluster:
    """A node whose only GPU a claim holds."""
    found = MapCluster().gpu("n", 0).holds("team/holder", "n", "gpu-0")
    found.situation.claim("claim", request(selector=FULL))
    return found


def explained(found: MapCluster, name: str) -> list[Explanation]:
    pod: Pod = next(each for each in found.situation.pods if each.metadata.name == name)
    return Explainer(found.view()).of_pod(pod)


def add_pod(found: MapCluster, name: str, claim: str = "claim", **spec: Any) -> None:
    found.situation.pod(name, claim, **spec)


def test_each_pod_of_a_claim_is_told_what_holds_for_itself() -> None:
    found = cluster()
    add_pod(found, "first")
    add_pod(found, "second", **ELSEWHERE)
    [first], [second] = explained(found, "first"), explained(found, "second")
    assert (first.code, [each.kind for each in first.changes]) == ("AllHeld", ["release"])
    assert (second.code, second.permanent) == ("NoNode", True)
    lacks = "n lacks the label zone=x of the pod's nodeSelector"
    assert second.message.endswith(f"{lacks}; for other pods of the claim: AllHeld")


def test_a_pod_that_can_not_use_its_allocated_claim_comes_before_the_claim() -> None:
    found = cluster()
    metadata = {"namespace": "team"}
    add_pod(found, "second", "holder", metadata=metadata, **ELSEWHERE)
    pod, claim = explained(found, "second")
    assert (pod.claim, pod.code, claim.code) == ("", "OnOtherNodesOnly", "Allocated")
    assert [each.kind for each in pod.changes] == ["node-admitted"]
    assert "not placed: pod team/second" in claim.message


def test_no_device_is_named_that_a_pod_with_a_node_name_could_have() -> None:
    found = cluster()
    add_pod(found, "named", nodeName="n")
    [named] = explained(found, "named")
    assert (named.code, named.changes, named.holders) == ("NodeNameSet", (), ())


def test_another_class_is_no_way_out_where_its_devices_lack_the_requested_capacity() -> None:
    found = MapCluster().gpu("n", 0)
    found.situation.device_class("small", profile("1g.10gb"))
    found.situation.device_class("large", profile("7g.80gb"))
    found.situation.device_class("nothing", profile("1g.99gb"))
    wanted = request("nothing", capacity={"requests": {"memory": "40Gi"}})
    found.situation.claim("wanted", wanted)
    add_pod(found, "pod", "wanted")
    [only] = explained(found, "pod")
    assert [each.text for each in only.changes if each.kind == "class"] == ["its class were any or large"]


def changes_for(found: MapCluster, count: int) -> list[str]:
    """The ways out for a claim for so many full GPUs."""
    found.situation.claim("wanted", request(selector=FULL, count=count))
    add_pod(found, "pod", "wanted")
    [only] = explained(found, "pod")
    return [each.text for each in only.changes]


RULE = "DeviceTaintRule repair with broken:NoSchedule were deleted, or the request tolerated its taint"
RELEASE = "claim team/holder ended"


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (2, [f"{RELEASE} (1 on node n, the fewest possible)", RULE, "request gpu asked for 1 instead of 2"]),
        (3, [f"{RULE}, and {RELEASE}", "request gpu asked for 1 instead of 3"]),
    ],
)
def test_a_way_out_regards_taints_and_may_be_to_remove_one_and_end_a_claim(count: int, changes: list[str]) -> None:
    """One of three GPUs is held and one has a taint."""
    found = cluster().gpu("n", 1).gpu("n", 2)
    selector = {"pool": "n-gpu.tessera.dev", "device": "gpu-1"}
    found.situation.taint_rule("repair", selector, key="broken", effect="NoSchedule")
    assert changes_for(found, count) == changes


def test_several_gpus_may_have_to_be_repaired() -> None:
    found = MapCluster().gpu("n", 0)
    for number in (1, 2, 3):
        found.gpu("n", number, fault="xid-79")
    repaired = (
        "the fault of gpu-2 of n and gpu-3 of n were repaired (tessera uncordon n/gpu-2 clears a fault that has gone)"
    )
    assert changes_for(found, 3) == [repaired, "request gpu asked for 1 instead of 3"]


@pytest.mark.parametrize(
    ("kind", "values"), [("matchAttribute", "the same value"), ("distinctAttribute", "different values")]
)
def test_a_constraint_may_be_what_has_to_go(kind: str, values: str) -> None:
    """The two GPUs have the same product and different UUIDs."""
    found = MapCluster().gpu("n", 0).gpu("n", 1)
    attribute = "gpu.tessera.dev/uuid" if kind == "matchAttribute" else "gpu.tessera.dev/productName"
    found.situation.claim("wanted", request(selector=FULL, count=2), constraints=[{kind: attribute}])
    add_pod(found, "pod", "wanted")
    [only] = explained(found, "pod")
    assert [each.text for each in only.changes] == [
        "request gpu asked for 1 instead of 2",
        f"its devices did not need {values} of {attribute} ({kind})",
    ]


def test_a_selector_that_fails_on_other_devices_must_be_corrected_besides() -> None:
    found = MapCluster().gpu("n", 0, facts={"nvlink_clique": "clique-0"}).holds("team/holder", "n", "gpu-0")
    found.gpu("m", 0)
    found.situation.claim("wanted", request(selector=f'{FULL} && {ATTRIBUTES}.nvlinkClique == "clique-0"'))
    add_pod(found, "pod", "wanted")
    [only] = explained(found, "pod")
    besides = "the fewest possible), and the selectors of request gpu failed on no device"
    assert [each.text.endswith(besides) for each in only.changes] == [True]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (FaultKind.RESERVED, "gpu-0 of n were left to Tessera by the other driver of the node (docs/soundness.md)"),
        (FaultKind.ADOPTED, "the claims that NVIDIA's DRA driver prepared on gpu-0 of n ended"),
    ],
)
def test_no_repair_is_proposed_for_a_gpu_of_another_driver(kind: FaultKind, change: str) -> None:
    found = MapCluster().gpu("n", 0, fault="the device plugin of NVIDIA allocates it", fault_kind=kind)
    found.situation.claim("claim", request(selector=FULL))
    add_pod(found, "pod")
    [only] = explained(found, "pod")
    texts = {found.kind: found.text for found in only.changes}
    assert texts[kind.value.lower()] == change
    assert "fault" not in texts


def unprepared(
    cause: str = "GPU", owner: str | None = "ReplicaSet", nodes: int = 1, devices: tuple[str, ...] = ("gpu-0",)
) -> MapCluster:
    """A placed pod with a claim that its node can not prepare; ``nodes`` report such claims."""
    found = MapCluster()
    for number in range(nodes):
        name = f"n{number}"
        found.gpu(name, 0).holds(f"team/{name}", name, *devices).fails(f"team/{name}", name, cause)
        controller = {"apiVersion": "v1", "kind": owner, "name": "o", "uid": "o", "controller": True}
        metadata = {"namespace": "team", "ownerReferences": [controller] if owner is not None else []}
        found.situation.pod(f"pod-{number}", name, metadata=metadata, nodeName=name)
    return found


UNKNOWN = "is evicted after controller.evictFailedStartsAfter seconds (unknown here; 0: never)"


@pytest.mark.parametrize(
    ("cluster", "cause", "then"),
    [
        (unprepared(), ", because of its GPU", UNKNOWN),
        (unprepared("Node"), ", because of the node itself", UNKNOWN),
        (unprepared("Other"), "", "the kubelet tries it again; no pod is evicted"),
        (unprepared(owner=None), ", because of its GPU", "its pod is not evicted: it has no controller"),
        (unprepared(owner="DaemonSet"), ", because of its GPU", "its pod is not evicted: a pod of a DaemonSet"),
        (unprepared(nodes=2), ", because of its GPU", "no pod is evicted for it, since 2 of 2 nodes"),
        (unprepared(devices=("gpu-0-monitor",)), ", because of its GPU", "its pod is not evicted: it has adminAccess"),
        (unprepared(devices=("gpu-0", "gpu-0-monitor")), ", because of its GPU", "not evicted: it has adminAccess"),
    ],
)
def test_a_placed_pod_is_told_that_its_node_can_not_prepare_its_claim_and_what_happens(
    cluster: MapCluster, cause: str, then: str
) -> None:
    [of_pod] = explained(cluster, "pod-0")
    assert (of_pod.claim, of_pod.code, of_pod.is_pending) == ("team/n0", "NotPrepared", True)
    said = f"; node n0 can't prepare it since 2026-11-26T00:00:00Z{cause}: NVML: 999; "
    assert said in of_pod.message
    assert then in of_pod.message
    assert of_pod in Explainer(cluster.view()).unprepared()


class ControllerReads(ClusterReads):
    """What a view reads of the controller."""

    def __init__(self, evicts_after: float | None, silent: float | None) -> None:
        self.evicts_after, self._silent = evicts_after, silent

    def controller_silent(self) -> float | None:
        return self._silent

    def eviction_outcome(self, start: FailedStart) -> str | None:
        return None


@pytest.mark.parametrize(
    ("evicts_after", "silent", "then"),
    [
        (120.0, None, "its pod is evicted after 120 s (controller.evictFailedStartsAfter), so that its controller"),
        (5.0, None, "its pod is evicted after 5 s (controller.evictFailedStartsAfter), so that its controller"),
        (0.0, None, "no pod is evicted for it: controller.evictFailedStartsAfter is 0"),
        (120.0, 40.0, "no pod is evicted while the controller sends no heartbeat, as for 40 s now"),
        (None, None, UNKNOWN),
    ],
)
def test_a_pod_is_told_when_it_is_evicted_as_the_controller_is_set(
    evicts_after: float | None, silent: float | None, then: str
) -> None:
    view = replace(unprepared().view(), reads=ControllerReads(evicts_after, silent))
    [explanation] = Explainer(view).unprepared()
    assert then in explanation.message
    assert ("so that its controller replaces it" in explanation.message) is (evicts_after != 0 and silent is None)


@pytest.mark.parametrize("wrong", [{"uid": "another"}, {"claim": "team/gone"}, {"claim": "no-namespace"}])
def test_what_a_node_reports_of_other_claims_is_not_believed(wrong: dict[str, str]) -> None:
    """Of a claim that is gone, of one that was created again, and of one that another node has."""
    cluster = unprepared()
    cluster.plans["n0"]["status"]["unprepared"][0].update(wrong)
    assert list(Explainer(cluster.view()).unprepared()) == []
    elsewhere = unprepared().node("n9", unprepared().plans["n0"])
    elsewhere.plans["n0"] = {}
    assert list(Explainer(elsewhere.view()).unprepared()) == []


def test_nodes_that_can_not_prepare_monitors_are_no_sign_that_a_release_is_bad() -> None:
    cluster = unprepared()
    cluster.gpu("m", 0).holds("team/m", "m", "gpu-0-monitor").fails("team/m", "m")
    assert UNKNOWN in explained(cluster, "pod-0")[0].message


def test_a_monitor_that_its_node_can_not_release_is_reported() -> None:
    cluster = MapCluster().gpu("n", 0).holds("team/a", "n", "gpu-0-monitor").fails("team/a", "n", what="unreleased")
    assert [*cluster.view().failed_releases] == [Key("team", "a")]


def test_a_claim_that_its_node_can_not_release_says_why_its_pod_stays_in_terminating() -> None:
    cluster = (
        MapCluster().gpu("n", 0).holds("team/a", "n", "gpu-0").fails("team/a", "n", message="IN_USE", what="unreleased")
    )
    metadata = {"namespace": "team", "deletionTimestamp": "2026-11-26T00:00:00Z"}
    cluster.situation.pod("ends", "a", metadata=metadata, nodeName="n")
    [explanation] = explained(cluster, "ends")
    assert explanation.code == "NotReleased"
    said = "node n can't release it since 2026-11-26T00:00:00Z: IN_USE; its pod stays in Terminating"
    assert said in explanation.message
    view = cluster.view()
    assert [claim.code for claim in Explainer(view).unreleased()] == ["NotReleased"]
    assert list(Explainer(view).unprepared()) == []
    [span] = [span for node in cluster.map() for gpu in node.gpus for span in gpu.spans]
    assert span.holder is not None
    assert span.holder.problem == "node n can't release it since 2026-11-26T00:00:00Z: IN_USE"
