"""What ``tessera why`` says of pods and claims, on a view of a cluster."""

from __future__ import annotations

from typing import Any

from controller.report.explanation import Explainer, Explanation
from driver.kube.types import Pod
from tests.support.map_cluster import MapCluster
from tests.support.queues import FULL, profile, request

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


def test_devices_with_a_taint_are_no_part_of_a_way_out() -> None:
    """Of three GPUs one is held and one has a taint: the end of the holder does not make room for three."""
    found = cluster().gpu("n", 1).gpu("n", 2)
    selector = {"pool": "n-gpu.tessera.dev", "device": "gpu-1"}
    found.situation.taint_rule("repair", selector, key="broken", effect="NoSchedule")
    for count, changes in ((2, ["release", "tainted", "count"]), (3, ["count"])):
        found.situation.claim(f"for-{count}", request(selector=FULL, count=count))
        add_pod(found, f"for-{count}", f"for-{count}")
        [only] = explained(found, f"for-{count}")
        assert [each.kind for each in only.changes] == changes
