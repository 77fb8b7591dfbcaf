"""Where a pod may run, and what it asks for without a claim: its part in what must be offered."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from controller.demand import node_eligibility
from controller.demand.demand import Demand, demand_of
from controller.demand.node_eligibility import Eligibility, exclusion
from controller.demand.pending_claims import Queue
from driver.kube.types import Key, Node, NodeSelector, Pod, PodSpec
from driver.model.offer import FULL as FULL_KEY
from tests.support.queues import FULL, Situation, node_of, profile, request

TRAINING = {"pool": "training", "slots": "8"}
ON_A, ON_B, ON_BOTH = frozenset({"a/0", "a/1"}), frozenset({"b/0", "b/1"}), None


def required(*terms: dict[str, Any]) -> dict[str, Any]:
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def expressions(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": values}]}


def fields(operator: str, *values: str) -> dict[str, Any]:
    return {"matchFields": [{"key": "metadata.name", "operator": operator, "values": values}]}


def two_nodes() -> Situation:
    """Node a is labelled for training, b isn't labelled at all."""
    there = Situation([*node_of("a"), *node_of("b")])
    there.node("a", TRAINING)
    return there


@pytest.mark.parametrize(
    ("pod", "eligible"),
    [
        pytest.param({}, ON_BOTH, id="no wish"),
        pytest.param({"nodeName": "b"}, ON_B, id="node name"),
        pytest.param({"nodeSelector": {"pool": "training"}}, ON_A, id="node selector"),
        pytest.param({"affinity": required(expressions("pool", "In", "dev", "training"))}, ON_A, id="In"),
        pytest.param({"affinity": required(expressions("pool", "NotIn", "training"))}, ON_B, id="NotIn, without label"),
        pytest.param({"affinity": required(expressions("pool", "NotIn", "dev"))}, ON_BOTH, id="NotIn, another value"),
        pytest.param({"affinity": required(expressions("pool", "Exists"))}, ON_A, id="Exists"),
        pytest.param({"affinity": required(expressions("pool", "DoesNotExist"))}, ON_B, id="DoesNotExist"),
        pytest.param({"affinity": required(expressions("slots", "Gt", "7"))}, ON_A, id="Gt"),
        pytest.param({"affinity": required(expressions("slots", "Lt", "9"))}, ON_A, id="Lt"),
        pytest.param({"affinity": required(fields("In", "b"))}, ON_B, id="field In"),
        pytest.param({"affinity": required(fields("NotIn", "b"))}, ON_A, id="field NotIn"),
        pytest.param(
            {"affinity": required(expressions("pool", "Exists"), fields("In", "b"))}, ON_BOTH, id="one term is enough"
        ),
        pytest.param({"affinity": required(fields("In", "b"), fields("In", "a"))}, ON_BOTH, id="terms for fields"),
        pytest.param(
            {"affinity": required(fields("In", "b", "gone"), expressions("pool", "In", "dev"))}, ON_B, id="a node gone"
        ),
        pytest.param({"affinity": required(fields("In", "b")), "nodeName": "a"}, ON_A, id="node name despite fields"),
        pytest.param({"affinity": {"podAffinity": {}}}, ON_BOTH, id="affinity to pods is the scheduler's business"),
    ],
)
def test_demand_is_for_gpus_of_nodes_where_the_pod_may_run(
    pod: dict[str, Any], eligible: frozenset[str] | None
) -> None:
    there = two_nodes().wants(request(selector=FULL), **pod)
    assert demand_of(there.queue) == [Demand(FULL_KEY, 1, eligible)]


@pytest.mark.parametrize(
    "affinity",
    [
        pytest.param(required({}), id="a term without expressions"),
        pytest.param(required(expressions("slots", "Gt", "8")), id="Gt the same number"),
        pytest.param(required(expressions("pool", "Gt", "8")), id="Gt of no number"),
        pytest.param(required({**expressions("pool", "Exists"), **fields("In", "b")}), id="a contradiction"),
        pytest.param(required(expressions("pool", "Like", "training")), id="an operator nobody knows"),
    ],
)
def test_affinity_that_no_node_meets_leaves_no_demand(affinity: dict[str, Any]) -> None:
    assert demand_of(two_nodes().wants(request(selector=FULL), affinity=affinity).queue) == []


@pytest.mark.parametrize(
    ("terms", "unmet"),
    [
        ([expressions("pool", "In", *"uvwxyz")], "pool in (u, v, w, x, ...)"),
        ([expressions("pool", "NotIn", "training")], "pool notin (training)"),
        ([expressions("zone", "Exists")], "zone exists"),
        ([expressions("slots", "DoesNotExist")], "slots does not exist"),
        ([expressions("slots", "Gt", "8")], "slots > 8"),
        ([{**expressions("slots", "Lt", "8"), **fields("In", "b")}], "slots < 8 and metadata.name in (b)"),
        ([expressions("zone", "Exists"), fields("In", "b")], "zone exists or metadata.name in (b)"),
        ([{}], ""),
    ],
)
def test_what_a_node_lacks_of_a_node_affinity_is_named(terms: list[dict[str, Any]], unmet: str) -> None:
    spec = msgspec.convert({"affinity": required(*terms)}, PodSpec)
    found = exclusion(spec, two_nodes().nodes["a"])
    assert found is not None
    assert found.text == "does not match the pod's node affinity" + (f": {unmet}" if unmet else "")


def test_of_a_thousand_labels_that_a_node_lacks_a_few_are_named() -> None:
    spec = msgspec.convert({"nodeSelector": {f"label-{number}": "x" for number in range(1000)}}, PodSpec)
    found = exclusion(spec, two_nodes().nodes["a"])
    assert found is not None
    assert found.text.count("lacks the label") == 4


TAINT = {"key": "gpus", "value": "reserved", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("taint", "tolerations", "eligible"),
    [
        pytest.param(TAINT, [], ON_A, id="not tolerated"),
        pytest.param(TAINT, [{"key": "gpus", "value": "reserved", "effect": "NoSchedule"}], ON_BOTH, id="the same"),
        pytest.param(TAINT, [{"key": "gpus", "operator": "Exists"}], ON_BOTH, id="by key"),
        pytest.param(TAINT, [{"operator": "Exists"}], ON_BOTH, id="everything"),
        pytest.param(TAINT, [{"key": "gpus", "value": "free"}], ON_A, id="another value"),
        pytest.param(TAINT, [{"key": "gpus", "operator": "Exists", "effect": "NoExecute"}], ON_A, id="another effect"),
        pytest.param({**TAINT, "effect": "NoExecute"}, [], ON_A, id="NoExecute"),
        pytest.param({**TAINT, "effect": "PreferNoSchedule"}, [], ON_BOTH, id="only a preference"),
    ],
)
def test_taints_keep_demand_away_unless_tolerated(
    taint: dict[str, str], tolerations: list[dict[str, str]], eligible: frozenset[str] | None
) -> None:
    there = two_nodes()
    there.node("b", taints=[taint])
    there.wants(request(selector=FULL), tolerations=tolerations)
    assert demand_of(there.queue) == [Demand(FULL_KEY, 1, eligible)]


def test_a_cordoned_node_gets_no_demand_unless_the_pod_tolerates_that() -> None:
    there = two_nodes()
    there.node("b", unschedulable=True)
    there.wants(request(selector=FULL))
    tolerant = [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]
    there.wants(request(selector=FULL), name="tolerant", tolerations=tolerant)
    assert demand_of(there.queue) == [Demand(FULL_KEY, 1, ON_A), Demand(FULL_KEY, 1)]


def test_gpus_of_a_node_that_is_gone_get_no_demand() -> None:
    there = two_nodes().wants(request(selector=FULL))
    del there.nodes["b"]
    assert demand_of(there.queue) == [Demand(FULL_KEY, 1, ON_A)]


def container(resource: str, amount: str, **more: Any) -> dict[str, Any]:
    return {"name": "main", "resources": {"limits": {resource: amount}, "requests": {resource: amount}}, **more}


def by_resource(**pod: Any) -> Situation:
    """A pod without claims; the class for full GPUs answers to nvidia.com/gpu."""
    there = two_nodes()
    there.device_class("gpu-training", FULL, extendedResourceName="nvidia.com/gpu")
    there.pod("old", **pod)
    return there


GPU, IMPLICIT = "nvidia.com/gpu", "deviceclass.resource.kubernetes.io/gpu-training"


@pytest.mark.parametrize(
    ("pod", "count"),
    [
        pytest.param({"containers": [container(GPU, "1")]}, 1, id="one"),
        pytest.param({"containers": [{"resources": {"limits": {GPU: "2"}}}]}, 2, id="limits without requests"),
        pytest.param({"containers": [container(IMPLICIT, "1")]}, 1, id="by the name of the class"),
        pytest.param({"containers": [container(GPU, "1"), container(GPU, "1")]}, 2, id="two containers"),
        pytest.param(
            {"initContainers": [container(GPU, "2")], "containers": [container(GPU, "1")]}, 2, id="a hungry beginning"
        ),
        pytest.param(
            {"initContainers": [container(GPU, "1", restartPolicy="Always")], "containers": [container(GPU, "1")]},
            2,
            id="a sidecar",
        ),
    ],
)
def test_a_pod_that_asks_by_extended_resource_makes_demand_before_it_has_a_claim(
    pod: dict[str, Any], count: int
) -> None:
    [demand] = demand_of(by_resource(**pod).queue)
    assert (demand.kind, demand.count, demand.eligible) == (FULL_KEY, count, None)


def test_devices_of_two_containers_are_asked_of_one_node() -> None:
    there = by_resource(containers=[container(GPU, "1"), container(GPU, "1")])
    assert set(demand_of(there.queue)[0].together) == {ON_A, ON_B}


def test_the_pods_of_a_daemonset_do_not_examine_each_node_for_each_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    there, examined = Situation([]), list[str]()
    selects = node_eligibility.selects

    def counted(selector: NodeSelector, node: Node) -> bool:
        examined.append(node.metadata.name)
        return selects(selector, node)

    monkeypatch.setattr(node_eligibility, "selects", counted)
    names = [f"node-{number}" for number in range(20)]
    for name in names:
        there.node(name)
        there.wants(request(selector=FULL, adminAccess=True), name=name, affinity=required(fields("In", name)))
    queue = there.queue
    assert [queue.nodes(pending) for pending in queue.pending] == [{name} for name in names]
    assert examined == names


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param({"containers": [container("cpu", "2")]}, id="no device at all"),
        pytest.param({"containers": [container("example.com/fpga", "1")]}, id="a resource without a class"),
        pytest.param({"containers": [container(GPU, "1")], "nodeName": "a"}, id="placed already"),
        pytest.param(
            {
                "containers": [container(GPU, "1")],
                "status": {"extendedResourceClaimStatus": {"resourceClaimName": "old-x1"}},
            },
            id="has its claim",
        ),
    ],
)
def test_a_pod_makes_no_demand_of_its_own_when_it_asks_for_or_has(pod: dict[str, Any]) -> None:
    assert demand_of(by_resource(**pod).queue) == []


def test_of_two_classes_with_one_extended_resource_the_newer_counts() -> None:
    there = by_resource(containers=[container(GPU, "1")])
    old, new = "2026-01-01T00:00:00Z", "2026-06-01T00:00:00Z"
    newer = msgspec.structs.replace
    there.device_class("a-new-one", 'device.driver == "other.example.com"', extendedResourceName=GPU)
    for name, made in (("gpu-training", old), ("a-new-one", new)):
        known = there.classes[name]
        there.classes[name] = newer(known, metadata=newer(known.metadata, creation_timestamp=made))
    assert demand_of(there.queue) == []


def test_objects_are_read_from_json_and_what_is_not_needed_is_skipped() -> None:
    raw = b"""{"kind": "Pod", "metadata": {"name": "p", "namespace": "n", "managedFields": [{}]},
      "spec": {"nodeSelector": {"a": "b"}, "volumes": [{"name": "v"}],
               "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}]},
      "status": {"phase": "Pending", "nominatedNodeName": "a",
                 "resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "p-gpu-1"}]}}"""
    pod = msgspec.json.decode(raw, type=Pod)
    assert (str(pod.metadata.key), pod.spec.node_selector, pod.claims) == ("n/p", {"a": "b"}, (Key("n", "p-gpu-1"),))
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"metadata": {}}', type=Pod)


def test_a_pod_without_a_claim_and_a_claim_of_its_name_keep_their_own_requirements() -> None:
    there = by_resource(containers=[container(GPU, "1")])
    there.pod("another", there.claim("old", request(selector=profile("1g.10gb"))))
    assert sorted(str(demand.kind) for demand in demand_of(there.queue)) == ["1g.10gb", "full"]


def test_pods_that_are_gone_take_no_memory_as_long_as_no_node_changes() -> None:
    there = two_nodes()
    eligibility = Eligibility(there.queue.cluster.nodes)
    tracemalloc.start()
    for number in range(200):
        there.pods.clear()
        there.claims.clear()
        there.wants(request(selector=FULL), nodeSelector={"job": f"{number}-" + "x" * 100_000})
        queue = there.queue
        demand_of(Queue(queue.cluster, queue.feasibility.fleet, there.matching, eligibility))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 5_000_000


OWNED = {"kind": "Pod", "name": "waiting", "uid": "waiting", "controller": True}


@pytest.mark.parametrize(
    ("owner", "is_pending"),
    [
        pytest.param(OWNED, True, id="the pod"),
        pytest.param({**OWNED, "controller": False}, False, id="the pod, which does not control it"),
        pytest.param({**OWNED, "uid": "another"}, False, id="another pod"),
    ],
)
def test_a_claim_from_a_template_is_pending_while_the_status_of_its_pod_does_not_name_it(
    owner: dict[str, Any], is_pending: bool
) -> None:
    """The controller writes these names anew so that the scheduler tries the pod again."""
    there = two_nodes()
    there.claim("made", request(selector=FULL), metadata={"ownerReferences": [owner]})
    there.pod("waiting", resourceClaims=[{"name": "gpus", "resourceClaimTemplateName": "gpus"}])
    pending = [(item.key, [str(pod.metadata.key) for pod in item.pods]) for item in there.queue.pending]
    assert pending == ([("default/made", ["default/waiting"])] if is_pending else [])
