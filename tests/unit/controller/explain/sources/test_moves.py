"""Which moves of held devices are named as a way out of fragmentation: only those that their own claims allow."""

from __future__ import annotations

from typing import Any

import pytest

from controller.explain.reason import ReasonCode
from tests.support.gpus import H100
from tests.support.queues import DRIVER, FULL, Situation, fleet_gpu, profile, request, selected_by
from tests.support.reasons import reasons_of

SMALL = profile("1g.10gb")
ON_THE_OTHER = selected_by('parentUUID == "a/1"')
PARENT = {"matchAttribute": f"{DRIVER}/parentUUID"}
MOVED = "moving default/small (1g.10gb) from gpu-0 to gpu-1 of node a would make room"
NONE = "no move of one or two claims within a node was found that would help"


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
    assert both == f"moving {move}, {move} of node a would make room"


def test_a_claim_is_not_moved_apart_where_its_constraint_forbids_it() -> None:
    there = waiting_for_gpu("mig-1g10gb-0", "mig-1g10gb-1", "mig-1g10gb-2", constraints=[PARENT])
    assert way_out(there) == NONE


def test_a_claim_is_not_moved_to_a_gpu_whose_taint_it_does_not_tolerate() -> None:
    there = waiting_for_gpu("mig-1g10gb-1", tolerated=[{"operator": "Exists"}])
    there.taint_rule("repair", {"pool": f"a-{DRIVER}"}, key="repair", effect="NoSchedule")
    assert way_out(there) == NONE


def test_a_claim_with_a_device_of_another_driver_is_not_moved() -> None:
    nic = {"request": "nic", "driver": "nic.example.com", "pool": "a", "device": "nic-0"}
    assert way_out(waiting_for_gpu("mig-1g10gb-1", others=[nic])) == NONE
