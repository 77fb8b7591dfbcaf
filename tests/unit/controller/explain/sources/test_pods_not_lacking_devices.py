"""Pods that no free device helps: what is said of them, on which object, and when."""

from __future__ import annotations

from typing import Any

import pytest

from controller.explain.helpful_changes import changes_that_help
from controller.explain.pipeline import reasons_in
from controller.explain.reason import ClaimReason, ReasonCode
from controller.explain.situation import Situation as Now
from controller.explain.sources.causes_in_pods_and_claims import (
    LOOKUP_INTERVAL_SECONDS,
    MAX_GATED,
    MAX_LOOKUPS,
    LookedUp,
    UnplacedPods,
)
from controller.explain.sources.no_free_device import Reasoning
from driver.kube.types import PAUSED, Key
from tests.support.clock import FakeClock
from tests.support.queues import DRIVER, FULL, Situation, node_of, request
from tests.support.reasons import Answers, reasons_of_unplaced

OLD, YOUNG = "2026-11-21T00:00:00Z", "2026-11-21T00:16:39.500Z"
CREATED = {"resourceClaimStatuses": [{"name": "made", "resourceClaimName": "claim"}]}
TEMPLATE = [{"name": "gpu", "resourceClaimTemplateName": "large"}]
NO_CPU = "0/1 nodes are available: 1 Insufficient cpu."


def reasons(there: Situation, *, exists: bool | None = None) -> list[ClaimReason]:
    return reasons_of_unplaced(there.queue, Answers(exists))


def pending(message: str) -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]}


def cpu(name: str, amount: object, **settings: Any) -> dict[str, Any]:
    """A container that requests CPU."""
    return {"name": name, "resources": {"requests": {"cpu": amount}}, **settings}


def allocated(there: Situation, name: str, node: str) -> None:
    """A claim that has a device of ``node``."""
    results = [{"request": "gpu", "driver": DRIVER, "pool": f"{node}-{DRIVER}", "device": "gpu-0"}]
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]
    selector = {"nodeSelectorTerms": terms}
    there.claim(name, status={"allocation": {"devices": {"results": results}, "nodeSelector": selector}})


def sharing(*nodes: str, **pod: Any) -> Situation:
    """A pod that uses claims which are allocated on ``nodes``, one on each."""
    there = Situation([*node_of("a"), *node_of("b")])
    names = [f"claim-{number}" for number, _ in enumerate(nodes)]
    for name, node in zip(names, nodes, strict=True):
        allocated(there, name, node)
    there.pod("second", *names, **{"metadata": {"creationTimestamp": OLD}, **pod})
    return there


@pytest.mark.parametrize(
    ("claims", "created", "part"),
    [
        pytest.param([{"name": "a", "resourceClaimName": "nope"}], OLD, "ResourceClaim nope, which", id="no claim"),
        pytest.param([{"name": "a", "resourceClaimName": "claim"}], OLD, "", id="it exists"),
        pytest.param([{"name": "a", "resourceClaimName": "nope"}], YOUNG, "", id="it may only be later"),
        pytest.param(TEMPLATE, OLD, "not been created from the ResourceClaimTemplate large", id="none of a template"),
        pytest.param([{"name": "made"}], OLD, "", id="the claim of a template exists"),
    ],
)
def test_a_pod_without_its_claim_is_told_which_one_is_missing(
    claims: list[dict[str, str]], created: str, part: str
) -> None:
    there = Situation(node_of("a"))
    there.claim("claim", request(selector=FULL))
    there.pod("pod", status=CREATED, resourceClaims=claims, metadata={"creationTimestamp": created})
    missing = UnplacedPods(FakeClock())
    found = [
        each for each in reasons_of_unplaced(there.queue, unplaced=missing) if each.code is ReasonCode.NO_SUCH_CLAIM
    ]
    assert all(each.pending.key == "Pod/default/pod" for each in found)
    assert missing.next_s == (pytest.approx(0.5) if created == YOUNG else None)
    assert len(found) == bool(part)
    assert all(part in each.sentence for each in found)


@pytest.mark.parametrize(
    ("exists", "part"),
    [
        (False, "it refers to the ResourceClaimTemplate large, which does not exist in its namespace"),
        (
            True,
            "ResourceClaimTemplate large: a quota or a policy may refuse it, or kube-controller-manager may not run",
        ),
        (None, "ResourceClaimTemplate large: does the template exist, and does kube-controller-manager run?"),
    ],
)
def test_whether_the_template_exists_is_said_if_it_is_known(exists: bool | None, part: str) -> None:
    there = Situation(node_of("a"))
    there.pod("pod", resourceClaims=TEMPLATE, metadata={"creationTimestamp": OLD})
    [reason] = reasons(there, exists=exists)
    assert part in reason.sentence


@pytest.mark.parametrize(
    "refusal",
    [
        "exceeded quota: gpus",
        "ValidatingAdmissionPolicy 'claim-size.gpu.tessera.dev' denied request: the requests ask for 9 partitions",
    ],
    ids=["quota", "template older than the policy"],
)
def test_what_refuses_the_claim_of_a_template_is_quoted_at_once(refusal: str) -> None:
    there = Situation(node_of("a"))
    there.pod("pod", resourceClaims=TEMPLATE, metadata={"creationTimestamp": "2026-11-21T00:16:38Z"})
    [reason] = reasons_of_unplaced(there.queue, Answers(True, refusal), UnplacedPods(FakeClock()))
    assert reason.sentence.endswith(f"can not create from the ResourceClaimTemplate large: {refusal}")
    assert reasons_of_unplaced(there.queue, Answers(True), UnplacedPods(FakeClock())) == []


SMALL_QUOTA = "gpu-inference-1g-10gb.deviceclass.resource.k8s.io/devices"


def exceeded(limit: int, name: str) -> str:
    """The refusal of a claim that would have got this name, as Kubernetes 1.37 writes it."""
    amounts = f"requested: {SMALL_QUOTA}=1, used: {SMALL_QUOTA}={limit}, limited: {SMALL_QUOTA}={limit}"
    return f'resourceclaims.resource.k8s.io "{name}" is forbidden: exceeded quota: gpus, {amounts}'


@pytest.mark.parametrize("limit", [0, 1])
def test_a_pod_over_quota_is_told_the_quota_and_whose_claims_use_it_the_same_at_each_try(limit: int) -> None:
    there = Situation(node_of("a"))
    there.claim("held", request("gpu-inference-1g-10gb"))
    there.pod("of-template", resourceClaims=TEMPLATE, metadata={"creationTimestamp": OLD})
    containers = [{"name": "main", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}]
    sentences = set()
    for name in ("of-template-gpu-x7k2p", "of-template-gpu-9pq4t"):
        failure = f"(combined from similar events): PodResourceClaim gpu: create claim: {exceeded(limit, name)}"
        there.pods[1:] = []
        condition = pending(f"running PreBind plugin: create claim: {exceeded(limit, name)}")
        there.pod("by-resource", containers=containers, status=condition, metadata={"creationTimestamp": OLD})
        found = reasons_of_unplaced(there.queue, Answers(True, failure))
        assert [(each.code, each.permanent) for each in found] == [(ReasonCode.OVER_QUOTA, limit == 0)] * 2
        sentences |= {each.sentence for each in found}
    [sentence] = sentences
    assert sentence.endswith(f"the ResourceQuota gpus: {limit} of {limit} {SMALL_QUOTA} used, by claim held")


def test_a_refusal_is_quoted_without_the_name_that_the_claim_would_have_got() -> None:
    there = Situation(node_of("a"))
    there.pod("pod", resourceClaims=TEMPLATE, metadata={"creationTimestamp": OLD})
    failure = 'resourceclaims.resource.k8s.io "pod-gpu-x7k2p" is forbidden: a policy says no'
    [reason] = reasons_of_unplaced(there.queue, Answers(True, failure))
    assert reason.sentence.endswith("large: resourceclaims.resource.k8s.io is forbidden: a policy says no")


def test_a_template_is_looked_up_once_for_all_pods_and_decisions() -> None:
    answers = Answers(False)
    there = Situation(node_of("a"))
    for number in range(3):
        there.pod(f"pod-{number}", resourceClaims=TEMPLATE, metadata={"creationTimestamp": OLD})
    unplaced = UnplacedPods(FakeClock())
    for _ in range(2):
        assert len(reasons_of_unplaced(there.queue, answers, unplaced)) == 3
    assert answers.asked == [Key("default", "large")]


def test_a_claim_that_is_being_deleted_is_none_that_a_pod_can_have() -> None:
    there = Situation(node_of("a"))
    there.claim("claim", request(selector=FULL), metadata={"deletionTimestamp": OLD})
    there.pod("pod", "claim")
    [reason] = reasons(there)
    assert reason.code is ReasonCode.NO_SUCH_CLAIM
    assert f"it refers to the ResourceClaim claim, which is being deleted since {OLD}" in reason.sentence


def test_the_other_claim_of_a_pod_that_lacks_one_has_the_same_reason() -> None:
    there = Situation(node_of("a"))
    there.pod("pod", there.claim("claim", request(selector=FULL)), "nope", metadata={"creationTimestamp": OLD})
    [reason] = reasons(there)
    assert reason.pending.key == "default/claim"
    assert reason.sentence.startswith("pod pod refers to the ResourceClaim nope, which does not exist")


@pytest.mark.parametrize(
    ("pod", "code", "part"),
    [
        pytest.param({"nodeName": "a"}, ReasonCode.NODE_NAME, "pod pod-of-claim has spec.nodeName a", id="node name"),
        pytest.param(
            {"schedulingGates": [{"name": "example.com/wait"}]},
            ReasonCode.GATED,
            "pod pod-of-claim has the scheduling gate example.com/wait",
            id="gate",
        ),
    ],
)
def test_a_pod_that_no_scheduler_tries_has_that_reason_on_its_claim(
    pod: dict[str, Any], code: ReasonCode, part: str
) -> None:
    there = Situation(node_of("a")).wants(request(selector=FULL), **pod)
    [reason] = reasons(there)
    assert (reason.code, reason.pending.key) == (code, "default/claim")
    assert part in reason.sentence
    there.pod("other", "claim")
    assert [each.pending.key for each in reasons(there)] == ["Pod/default/pod-of-claim"]


def test_claims_for_other_drivers_and_the_many_pods_of_a_queue_are_left_out() -> None:
    there = Situation(node_of("a"))
    there.device_class("rdma", 'device.driver == "nic.example.com"')
    gates = [{"name": "kueue.x-k8s.io/admission"}]
    there.wants(request("rdma"), nodeName="a", name="nic-0").wants(request("rdma"), schedulingGates=gates, name="nic-1")
    assert reasons(there) == []
    for number in range(MAX_GATED + 1):
        there.wants(request(selector=FULL), schedulingGates=gates, name=f"queued-{number}")
    assert len(reasons_of_unplaced(there.queue, unplaced=UnplacedPods(FakeClock()))) == MAX_GATED
    assert len(reasons(there)) == MAX_GATED + 1


@pytest.mark.parametrize(
    ("nodes", "node", "pod", "code", "part"),
    [
        pytest.param(["a"], {"unschedulable": True}, {}, ReasonCode.CLOSED, "run: a is cordoned", id="cordoned"),
        pytest.param(
            ["a"],
            {"taints": [{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]},
            {},
            ReasonCode.NOT_READY,
            "it has the claim claim-0, which is allocated on nodes where its pod can't run: a is not ready",
            id="not ready",
        ),
        pytest.param(
            ["a"],
            {},
            {"nodeSelector": {"zone": "x"}},
            ReasonCode.OTHER_NODES,
            "a lacks the label zone=x",
            id="selector",
        ),
        pytest.param(
            ["a", "b"],
            {},
            {},
            ReasonCode.NOT_TOGETHER,
            "allocated claims claim-0 on a and claim-1 on b: no node has all of them",
            id="apart",
        ),
        pytest.param(["gone"], {}, {}, ReasonCode.NOT_TOGETHER, "the node of its device does not exist", id="no node"),
        pytest.param(
            ["a"],
            {},
            {"status": pending(NO_CPU), "containers": [{"resources": {"requests": {"cpu": "64"}}}]},
            ReasonCode.NOT_PLACED,
            f"the scheduler reports on pod second: {NO_CPU.rstrip('.')} (the pod requests cpu 64)",
            id="no CPU",
        ),
        pytest.param(
            ["a"],
            {},
            {
                "status": pending(NO_CPU),
                "containers": [cpu("main", 3), cpu("log", "500m")],
                "initContainers": [cpu("proxy", 1, restartPolicy="Always"), cpu("setup", 2)],
                "overhead": {"cpu": "250m"},
            },
            ReasonCode.NOT_PLACED,
            "(the pod requests cpu 3 + 500m + 1 of sidecar proxy + 250m of the overhead of its RuntimeClass)",
            id="no CPU for sidecar and overhead",
        ),
        pytest.param(
            ["a"],
            {},
            {
                "status": pending(NO_CPU),
                "containers": [cpu("main", 1)],
                "initContainers": [cpu("proxy", 1, restartPolicy="Always"), cpu("setup", 64), cpu("last", 2)],
            },
            ReasonCode.NOT_PLACED,
            "(the pod requests cpu 64 of init container setup + 1 of sidecar proxy)",
            id="no CPU for an init container",
        ),
        pytest.param(
            ["a"],
            {},
            {
                "status": pending(NO_CPU),
                "containers": [cpu("main", 1)],
                "resources": {"requests": {"cpu": "64"}},
            },
            ReasonCode.NOT_PLACED,
            "(the pod requests cpu 64 of spec.resources)",
            id="no CPU for the pod as a whole",
        ),
        pytest.param(
            ["a"],
            {},
            {"schedulerName": "none"},
            ReasonCode.NOT_PLACED,
            "a scheduler named none run?",
            id="no scheduler",
        ),
    ],
)
def test_a_pod_whose_claims_are_allocated_is_told_why_it_is_not_placed_there(
    nodes: list[str], node: dict[str, Any], pod: dict[str, Any], code: ReasonCode, part: str
) -> None:
    there = sharing(*nodes, **pod)
    there.node("a", **node)
    [reason] = reasons(there)
    assert (reason.code, reason.pending.key) == (code, "Pod/default/second")
    assert part in reason.sentence


def test_a_pod_has_a_moment_to_be_bound_after_its_claims_are_allocated() -> None:
    there = sharing("a", status=pending(NO_CPU))
    clock = FakeClock()
    unplaced = UnplacedPods(clock)
    assert reasons_of_unplaced(there.queue, unplaced=unplaced) == []
    assert unplaced.next_s == pytest.approx(1.0)
    clock.advance(1)
    assert [each.code for each in reasons_of_unplaced(there.queue, unplaced=unplaced)] == [ReasonCode.NOT_PLACED]


def test_a_pod_that_is_bound_or_being_deleted_waits_for_no_scheduler() -> None:
    assert reasons(sharing("a", nodeName="a", status=pending(NO_CPU))) == []
    assert reasons(sharing("a", metadata={"deletionTimestamp": OLD}, status=pending(NO_CPU))) == []


def test_the_reason_of_a_pod_whose_scheduler_is_absent_says_so_too() -> None:
    there = Situation(node_of("a", "full"))
    there.wants(request(selector=FULL), metadata={"creationTimestamp": OLD}, schedulerName="none")
    [reason] = reasons_in(Now(there.queue), FakeClock()).values()
    assert reason.code is ReasonCode.HELD
    assert reason.sentence.endswith(
        "besides, no scheduler has reported on pod pod-of-claim; does a scheduler named none run?"
    )


@pytest.mark.parametrize(
    ("message", "is_added"),
    [
        (NO_CPU, True),
        ('0/1 nodes are available: persistentvolumeclaim "data" not found.', True),
        ("0/2 nodes are available: 1 Insufficient cpu, 1 cannot allocate all claims.", False),
    ],
)
def test_what_every_node_lacks_besides_devices_is_added_to_the_reason(message: str, *, is_added: bool) -> None:
    there = Situation(node_of("a", "full")).wants(request(selector=FULL), status=pending(message))
    [reason] = reasons_in(Now(there.queue), FakeClock()).values()
    assert reason.code is ReasonCode.HELD
    assert (
        f"; besides, the scheduler reports on pod pod-of-claim: {message.rstrip('.')}" in reason.sentence
    ) == is_added


def test_a_paused_plan_is_advised_to_be_continued() -> None:
    there = Situation(node_of("a", gpus=1, why_no_offers=f"has a paused plan (annotation {PAUSED})"))
    there.wants(request(selector=FULL))
    [change] = changes_that_help(Reasoning(there.queue), there.waiting())
    command = "kubectl annotate gpunodeplan a gpu.tessera.dev/paused-"
    assert (change.kind, change.text) == ("plan-paused", f"the plan of node a were not paused ({command})")


def test_a_command_tells_each_of_many_pods_over_quota_the_reason() -> None:
    there = Situation(node_of("a"))
    for number in range(20):
        claims = [{"name": "gpu", "resourceClaimTemplateName": "template"}]
        there.pod(f"pod-{number}", resourceClaims=claims, metadata={"creationTimestamp": OLD})
    refusal = (
        'resourceclaims "x" is forbidden: exceeded quota: gpus, requested: count/resourceclaims.resource.k8s.io=1, '
        "used: count/resourceclaims.resource.k8s.io=2, limited: count/resourceclaims.resource.k8s.io=2"
    )
    found = reasons_of_unplaced(there.queue, Answers(True, refusal))
    assert [reason.code for reason in found] == [ReasonCode.OVER_QUOTA] * 20


def test_a_pod_whose_template_is_not_looked_up_yet_waits_as_long_as_one_whose_template_exists() -> None:
    there = Situation(node_of("a"))
    for number in range(MAX_LOOKUPS + 1):
        claims = [{"name": "gpu", "resourceClaimTemplateName": f"template-{number}"}]
        there.pod(f"pod-{number}", resourceClaims=claims, metadata={"creationTimestamp": "2026-11-21T00:16:37Z"})
    unplaced = UnplacedPods(FakeClock())
    assert reasons_of_unplaced(there.queue, Answers(True), unplaced) == []
    assert unplaced.next_s == pytest.approx(LOOKUP_INTERVAL_SECONDS)


@pytest.mark.parametrize(
    ("resource", "name"),
    [
        ("nvidia.com/gpu", "gpu-training"),
        ("nvidia.com/gpu.shared", "gpu-dev"),
        ("nvidia.com/mig-1g.10gb", "gpu-inference-1g-10gb"),
        ("example.com/fpga", ""),
    ],
)
def test_a_pod_that_requests_a_resource_of_no_class_is_told_which_class_can_have_it(resource: str, name: str) -> None:
    there = Situation([*node_of("a")])
    containers = [{"name": "main", "resources": {"limits": {resource: "1"}}}]
    there.pod("old-style", metadata={"creationTimestamp": OLD}, containers=containers)
    found = [(each.pending.key, each.code, each.permanent) for each in reasons(there)]
    assert found == ([("Pod/default/old-style", ReasonCode.NOT_MAPPED, True)] if name else [])
    assert all(f"extendedResourceNames={{{name}}}" in each.sentence for each in reasons(there))


def test_many_pods_are_looked_up_in_turn() -> None:
    clock = FakeClock()
    looked_up, answered = LookedUp(clock, MAX_LOOKUPS), set[int]()
    for _ in range(20):
        looked_up.begin()
        answered |= {pod for pod in range(40) if looked_up.get(pod, lambda: True)}
        clock.advance(LOOKUP_INTERVAL_SECONDS)
    assert answered == {*range(40)}
