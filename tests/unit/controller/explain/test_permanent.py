"""What the fleet as it is can never give is said first, whatever claims hold at the moment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controller.cluster.fleet import FleetGpu
from controller.explain.reason import ClaimReason, ReasonCode
from driver.model.gpu import MigMode
from driver.model.offer import DeviceKind
from tests.support.fleets import possible
from tests.support.gpus import H100
from tests.support.queues import FULL, Situation, first_available, fleet_gpu, node_of, profile, request
from tests.support.reasons import reasons_of

CLIQUE = "gpu.tessera.dev/nvlinkClique"
A100 = "NVIDIA A100-SXM4-80GB"
PARTITIONS = frozenset({DeviceKind.PARTITION})


def reason(there: Situation, claim: str = "claim") -> ClaimReason:
    [found] = [each for each in reasons_of(there.queue) if each.pending.key == f"default/{claim}"]
    return found


def all_held(gpus: list[FleetGpu]) -> list[FleetGpu]:
    """The same GPUs with something on each, where it can have anything."""
    return [replace(entry, held=possible(entry)[:1]) for entry in gpus]


def clique_of(count: int) -> dict[str, Any]:
    """A training job: full GPUs of one NVLink clique."""
    return {"requests": [request(selector=FULL, count=count)], "constraints": [{"matchAttribute": CLIQUE}]}


def one_each(*selectors: str) -> dict[str, Any]:
    return {"requests": [request(name=f"request-{n}", selector=each) for n, each in enumerate(selectors)]}


def just(selector: str, **more: Any) -> dict[str, Any]:
    return {"requests": [request(selector=selector, **more)]}


CASES = [
    pytest.param(node_of("a", gpus=4), clique_of(4), ReasonCode.CONSTRAINT, id="no GPU has NVLink"),
    pytest.param(
        [fleet_gpu("a", n, facts={"nvlink_clique": f"clique-{n // 2}"}) for n in range(4)],
        clique_of(3),
        ReasonCode.CONSTRAINT,
        id="cliques are too small",
    ),
    pytest.param(
        node_of("a"), one_each(FULL, profile("1g.99gb")), ReasonCode.NOTHING_MATCHES, id="the second has no device"
    ),
    pytest.param(
        node_of("a"),
        {"requests": [request(selector=FULL), request(name="many", selector=FULL, count=3)]},
        ReasonCode.TOO_MANY,
        id="the second asks for too many",
    ),
    pytest.param(node_of("a"), one_each(FULL, FULL, FULL), ReasonCode.NOT_TOGETHER, id="three requests, two GPUs"),
    pytest.param(
        node_of("a", gpus=8),
        {"requests": [request(name=f"r{n}", selector=profile("1g.10gb"), count=17) for n in range(2)]},
        ReasonCode.TOO_MANY,
        id="more than a claim can have",
    ),
    pytest.param(
        [fleet_gpu("a", 0), fleet_gpu("a", 1, uses=PARTITIONS)],
        just(FULL, count=2),
        ReasonCode.DEDICATED,
        id="one is kept for partitions",
    ),
    pytest.param(
        [fleet_gpu("a", 0), fleet_gpu("a", 1, fault="Xid 79")],
        just(FULL, count=2),
        ReasonCode.FAULT,
        id="one has a fault",
    ),
    pytest.param(
        [fleet_gpu("a", 0, A100, facts={"mig_mode": MigMode.ENABLED}), fleet_gpu("a", 1, A100)],
        just(FULL, count=2),
        ReasonCode.RESET,
        id="one needs a reset",
    ),
    pytest.param(
        [fleet_gpu("a", n, facts={"nvlink_clique": "clique"}, fault="Xid 79" if n else None) for n in range(2)],
        {
            "requests": [request(name=f"r{n}", selector=FULL) for n in range(2)],
            "constraints": [{"matchAttribute": CLIQUE}],
        },
        ReasonCode.FAULT,
        id="one of the clique has a fault",
    ),
    pytest.param([fleet_gpu("a", 0, foreign=0b1)], just(FULL), ReasonCode.FOREIGN, id="a partition of somebody else's"),
    pytest.param(
        [fleet_gpu("a", 0, foreign=0b1)],
        just(profile("1g.10gb"), count=7),
        ReasonCode.FOREIGN,
        id="too little beside a partition of somebody else's",
    ),
]


@pytest.mark.parametrize(("gpus", "claim", "code"), CASES)
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_what_waiting_never_helps_has_the_same_reason_on_an_idle_and_on_a_busy_fleet(
    gpus: list[FleetGpu], claim: dict[str, Any], code: ReasonCode, *, busy: bool
) -> None:
    there = Situation(all_held(gpus) if busy else gpus)
    there.wants(*claim["requests"], constraints=claim.get("constraints", ()))
    assert reason(there).code is code, reason(there).sentence
    idle = Situation(gpus).wants(*claim["requests"], constraints=claim.get("constraints", ()))
    assert reason(there).sentence == reason(idle).sentence


def test_without_nvlink_it_says_that_no_gpu_has_a_clique() -> None:
    there = Situation(all_held(node_of("a", gpus=4))).wants(*clique_of(4)["requests"], **_constraints())
    assert "even if nothing were held" in reason(there).sentence
    assert f"none of these devices has a value of {CLIQUE}" in reason(there).sentence


def _constraints() -> dict[str, Any]:
    return {"constraints": clique_of(1)["constraints"]}


def test_one_fault_too_many_is_told_with_the_gpu_that_has_it() -> None:
    gpus = [fleet_gpu("a", 0, H100, "full"), fleet_gpu("a", 1, fault="Xid 79")]
    found = reason(Situation(gpus).holding("one", "a", "gpu-0").wants(request(selector=FULL, count=2)))
    assert "even if nothing were held" in found.sentence
    assert "1 of the 2 GPUs" in found.sentence
    assert "gpu-1 of a (Xid 79)" in found.sentence


def test_claims_of_one_pod_that_never_fit_together_are_told_so_while_gpus_are_held() -> None:
    there = Situation([*node_of("a", "full", gpus=1), *node_of("b", "full", gpus=1)])
    there.pod("pod", *[there.claim(f"claim-{n}", request(selector=FULL)) for n in range(2)])
    for name in ("claim-0", "claim-1"):
        assert reason(there, name).code is ReasonCode.NOT_TOGETHER
        assert "even if nothing were held" in reason(there, name).sentence


def test_a_claim_whose_pod_has_an_impossible_one_is_told_of_that() -> None:
    there = Situation(node_of("a", "full"))
    there.pod("pod", there.claim("fine", request(selector=FULL)), there.claim("dream", request("nope")))
    assert reason(there, "dream").code is ReasonCode.NO_SUCH_CLASS
    assert reason(there, "fine").code is ReasonCode.NO_SUCH_CLASS
    sentence = "its pod also has the claim dream: request gpu: there is no DeviceClass 'nope'"
    assert reason(there, "fine").sentence.startswith(sentence)


def test_of_alternatives_one_that_only_waits_is_nearer_than_one_that_never_will() -> None:
    gpus = [replace(entry, fault="Xid 79") for entry in node_of("b", product=A100, facts={"mig_mode": MigMode.ENABLED})]
    there = Situation([*node_of("a", "mig-1g10gb-0", gpus=1), *gpus])
    both = first_available(("never", profile("1g.5gb")), ("later", FULL))
    assert reason(there.wants(both)).code is ReasonCode.HELD


def test_what_is_only_held_is_still_said_to_be_held() -> None:
    gpus = [fleet_gpu("a", n, H100, "full", facts={"nvlink_clique": "clique"}) for n in range(4)]
    there = Situation(gpus).wants(*clique_of(4)["requests"], **_constraints())
    assert reason(there).code is ReasonCode.HELD


def test_all_devices_of_nodes_that_have_more_than_a_claim_can_have() -> None:
    there = Situation(node_of("a", gpus=5)).wants(request(selector=profile("1g.10gb"), allocationMode="All"))
    assert reason(there).code is ReasonCode.TOO_MANY
    assert "all devices of a node" in reason(there).sentence
    assert "more than the 32" in reason(there).sentence


def test_more_than_a_node_has_where_the_pod_can_run_names_the_nodes_that_would_do() -> None:
    there = Situation([*node_of("a"), *node_of("b", gpus=4)])
    there.node("a", {"pool": "a"})
    there.wants(request(selector=FULL, count=4), nodeSelector={"pool": "a"})
    assert reason(there).code is ReasonCode.OTHER_NODES
    assert "no node where its pod can run has more than 2" in reason(there).sentence
    assert "b lacks the label pool=a of the pod's nodeSelector" in reason(there).sentence


def test_pods_that_no_node_admits_have_each_its_own_cause() -> None:
    there = Situation(node_of("a"))
    for label in ("pool", "zone"):
        there.wants(request(selector=FULL), name=label, nodeSelector={label: "x"})
    for label in ("pool", "zone"):
        assert f"a lacks the label {label}=x of the pod's nodeSelector" in reason(there, label).sentence
