"""Which moves of held devices are named as a way out of fragmentation: only those that their own claims allow."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controller.cluster.fleet import FleetGpu
from controller.explain.pipeline import ReasonFinder
from controller.explain.reason import ReasonCode
from controller.explain.situation import Situation as Now
from driver.kube.types import Pod
from tests.support.clock import FakeClock
from tests.support.gpus import H100
from tests.support.queues import DRIVER, FULL, Situation, fleet_gpu, profile, request, selected_by
from tests.support.reasons import Answers, reasons_of

A100 = "NVIDIA A100-SXM4-80GB"
SMALL = profile("1g.10gb")
ON_THE_OTHER = selected_by('parentUUID == "a/1"')
ON_B = selected_by('parentUUID == "b/0"')
PARENT = {"matchAttribute": f"{DRIVER}/parentUUID"}
MOVED = "on node a moving default/small (1g.10gb) from gpu-0 to gpu-1 would make room"
NONE = "no moves of claims within a node were found that would help"


def waiting_for_gpu(*devices: str, selector: str = SMALL, constraints: Any = (), **more: Any) -> Situation:
    """A full GPU is wanted. A claim has ``devices`` of gpu-0, another one half of gpu-1."""
    there = Situation([fleet_gpu("a", 0, H100, *devices), fleet_gpu("a", 1, H100, "mig-4g40gb-0")])
    wanted = request(selector=FULL, tolerations=more.pop("tolerated", []))
    results = [
        {"request": "gpu", "driver": DRIVER, "pool": f"a-{DRIVER}", "device": f"gpu-0-{device}"} for device in devices
    ]
    status = {"allocation": {"devices": {"results": [*results, *more.pop("others", ())]}}}
    requests = request(selector=selector, count=len(devices), **more)
    there.claim("small", requests, constraints=constraints, status=status)
    there.holding("large", "a", "gpu-1-mig-4g40gb-0")
    return there.wants(wanted)


def way_out(there: Situation) -> str:
    [reason] = reasons_of(there.queue)
    assert reason.code is ReasonCode.FRAGMENTED
    return reason.sentence.rpartition("; ")[2]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        pytest.param(SMALL, MOVED, id="any GPU"),
        pytest.param(f"{SMALL} && {ON_THE_OTHER}", MOVED, id="the other GPU"),
        pytest.param(f"{SMALL} && !({ON_THE_OTHER})", NONE, id="only its own GPU"),
    ],
)
def test_a_claim_is_not_moved_to_a_gpu_that_its_selector_forbids(selector: str, expected: str) -> None:
    assert way_out(waiting_for_gpu("mig-1g10gb-1", selector=selector)) == expected


def test_a_claim_with_two_devices_is_moved_as_a_whole() -> None:
    both = way_out(waiting_for_gpu("mig-1g10gb-0", "mig-1g10gb-1", constraints=[PARENT]))
    move = "default/small (1g.10gb) from gpu-0 to gpu-1"
    assert both == f"on node a moving {move}, {move} would make room"


@pytest.mark.parametrize("constraints", [[], [PARENT]])
def test_a_claim_is_moved_apart_only_where_its_constraints_allow_it(constraints: Any) -> None:
    there = waiting_for_gpu("mig-1g10gb-0", "mig-1g10gb-1", constraints=constraints)
    there.gpus[1:] = [fleet_gpu("a", number, H100, "mig-4g40gb-0", "mig-2g20gb-4") for number in (1, 2)]
    there.holding("more", "a", "gpu-1-mig-2g20gb-4", "gpu-2-mig-4g40gb-0", "gpu-2-mig-2g20gb-4")
    move = "default/small (1g.10gb) from gpu-0 to gpu"
    assert way_out(there) == (NONE if constraints else f"on node a moving {move}-1, {move}-2 would make room")


def test_all_devices_of_several_gpus_are_moved_for_a_claim_for_several_gpus() -> None:
    there = Situation([fleet_gpu("a", number, H100, "mig-1g10gb-0") for number in range(3)])
    for number in range(3):
        there.claim(f"of-{number}", request(selector=SMALL), status=has("a", f"gpu-{number}-mig-1g10gb-0"))
    moves = "default/of-0 (1g.10gb) from gpu-0 to gpu-2, default/of-1 (1g.10gb) from gpu-1 to gpu-2"
    assert way_out(there.wants(request(selector=FULL, count=2))) == f"on node a moving {moves} would make room"


def test_no_whole_gpu_is_given_up_for_another_one() -> None:
    there = Situation([fleet_gpu("a", 0, H100, "mig-1g10gb-0"), fleet_gpu("a", 1)])
    there.claim("small", request(selector=SMALL), status=has("a", "gpu-0-mig-1g10gb-0"))
    [reason] = reasons_of(there.wants(request(selector=FULL, count=2)).queue)
    assert reason.moves == ""


def has(node: str, *devices: str) -> dict[str, Any]:
    """The status of a claim with these devices."""
    results = [{"request": "gpu", "driver": DRIVER, "pool": f"{node}-{DRIVER}", "device": device} for device in devices]
    return {"allocation": {"devices": {"results": results}}}


def on_two_nodes(*devices: str, target: FleetGpu | None = None, **claim: Any) -> Situation:
    """A full GPU is wanted. The claim ``small`` has ``devices`` of node a's only GPU; half of b's GPU is held."""
    half = fleet_gpu("b", 0, H100, "mig-4g40gb-0") if target is None else target
    there = Situation([fleet_gpu("a", 0, H100, *devices), half])
    there.node("b", {"zone": "b"})
    there.holding("large", "b", *(device.name for device in half.held))
    wanted = {"selector": SMALL, "count": len(devices), **claim}
    there.claim("small", request(**wanted), status=has("a", *(f"gpu-0-{device}" for device in devices)))
    return there.wants(request(selector=FULL, tolerations=[{"operator": "Exists"}]))


def user(*claims: str, **spec: Any) -> Pod:
    """A pod that runs on node a."""
    references = [{"name": claim, "resourceClaimName": claim} for claim in claims or ("small",)]
    metadata = {"name": "user", "namespace": "default"}
    return msgspec.convert({"metadata": metadata, "spec": {"nodeName": "a", "resourceClaims": references, **spec}}, Pod)


def moves_of(there: Situation, **pods: Pod) -> str:
    reasons = ReasonFinder(60.0, FakeClock(), watching=False).find(Now(there.queue, lookups=Answers(pods=pods)))
    [reason] = (reason for reason in reasons if reason.pending.key == "default/claim")
    assert reason.moves in reason.sentence
    return reason.moves


TO_B = "on node a moving default/small (1g.10gb) from gpu-0 to gpu-0 of node b would make room"


@pytest.mark.parametrize(
    ("claim", "pod", "expected"),
    [
        pytest.param({}, user(), TO_B, id="the pod could run there"),
        pytest.param({}, None, "", id="its pod is not known"),
        pytest.param({}, user(nodeSelector={"zone": "b"}), TO_B, id="its node selector has that node, too"),
        pytest.param({}, user(nodeSelector={"zone": "a"}), "", id="its node selector has not"),
        pytest.param({}, user("small", "other"), "", id="the pod has another claim, too"),
        pytest.param({"selector": f"{SMALL} && {ON_B}"}, user(), TO_B, id="that GPU"),
        pytest.param({"selector": f"{SMALL} && !({ON_B})"}, user(), "", id="not that"),
        pytest.param({"target": fleet_gpu("b", 0, A100, "mig-4g40gb-0")}, user(), "", id="another product"),
        pytest.param({"target": fleet_gpu("b", 0, H100, "mig-7g80gb-0")}, user(), "", id="no room there"),
        pytest.param({"target": fleet_gpu("b", 0, H100, "mig-4g40gb-0", fault="lost")}, user(), "", id="a fault there"),
    ],
)
def test_a_claim_is_moved_to_another_node_only_if_its_pod_could_run_there(
    claim: dict[str, Any], pod: Pod | None, expected: str
) -> None:
    pods = {} if pod is None else {"small": pod}
    assert moves_of(on_two_nodes("mig-1g10gb-3", **claim), **pods) == expected


def test_a_claim_with_two_devices_goes_to_another_node_as_a_whole() -> None:
    move = "default/small (1g.10gb) from gpu-0 to gpu-0 of node b"
    there = on_two_nodes("mig-1g10gb-0", "mig-1g10gb-1")
    assert moves_of(there, small=user()) == f"on node a moving {move}, {move} would make room"
    there.gpus[1:] = [
        fleet_gpu("b", 0, H100, "mig-4g40gb-0", "mig-2g20gb-4"),
        fleet_gpu("c", 0, H100, "mig-4g40gb-0", "mig-2g20gb-4"),
    ]
    there.node("c")
    there.holding("more", "b", "gpu-0-mig-2g20gb-4").holding("of-c", "c", "gpu-0-mig-4g40gb-0", "gpu-0-mig-2g20gb-4")
    assert moves_of(there, small=user()) == ""


@pytest.mark.parametrize("tolerates", [False, True])
def test_a_claim_goes_to_a_tainted_gpu_of_another_node_only_if_it_tolerates_that(tolerates: bool) -> None:
    there = on_two_nodes("mig-1g10gb-3", tolerations=[{"operator": "Exists"}] if tolerates else [])
    there.taint_rule("repair", {"pool": f"b-{DRIVER}"}, key="repair", effect="NoSchedule")
    assert moves_of(there, small=user()) == (TO_B if tolerates else "")


def test_for_a_claim_for_a_partition_nothing_goes_to_another_node() -> None:
    there = on_two_nodes("mig-1g10gb-1", "mig-1g10gb-5")
    there.claims = [claim for claim in there.claims if claim.metadata.name != "claim"]
    there.claim("claim", request(selector=profile("3g.40gb")))
    there.gpus[1] = fleet_gpu("b", 0, H100, "mig-4g40gb-0", "mig-1g10gb-4")
    there.holding("more", "b", "gpu-0-mig-1g10gb-4")
    assert "of node b" not in moves_of(there, small=user())


def test_a_claim_is_not_moved_to_a_gpu_whose_taint_it_does_not_tolerate() -> None:
    there = waiting_for_gpu("mig-1g10gb-1", tolerated=[{"operator": "Exists"}])
    there.taint_rule("repair", {"pool": f"a-{DRIVER}"}, key="repair", effect="NoSchedule")
    assert way_out(there) == NONE


def test_a_claim_with_a_device_of_another_driver_is_not_moved() -> None:
    nic = {"request": "nic", "driver": "nic.example.com", "pool": "a", "device": "nic-0"}
    assert way_out(waiting_for_gpu("mig-1g10gb-1", others=[nic])) == NONE
