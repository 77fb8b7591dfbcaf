"""Numbers that a tenant may write to the API bound no loop: what reads them answers at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import thread_time
from typing import Any

import pytest

from controller.demand.demand import demand_of
from controller.explain.pipeline import reasons_in
from controller.explain.situation import Situation
from controller.report.claim_explainer import Explainer, Explanation
from controller.report.map_model import cluster_map
from controller.web.page_json import content_of
from tests.support.map_cluster import MapCluster
from tests.support.queues import FULL, request, selected_by
from tests.support.queues import Situation as Waiting

pytestmark = pytest.mark.timeout(30)

LARGEST = 2**63 - 1
CLIQUE = "gpu.tessera.dev/nvlinkClique"
SMALL = selected_by('profile == "1g.10gb"')


@contextmanager
def at_once() -> Iterator[None]:
    began = thread_time()
    yield
    assert thread_time() - began < 2


def cluster() -> MapCluster:
    found = MapCluster()
    for number in range(4):
        found.gpu("node", number)
    return found


def one(found: MapCluster, name: str) -> Explanation:
    [only] = [each for each in Explainer(found.view()).pending() if each.claim == f"default/{name}"]
    return only


@pytest.mark.parametrize("offered", [False, True])
def test_a_claim_for_more_devices_than_any_claim_can_have_has_its_reason_at_once(offered: bool) -> None:
    found = cluster().holds("team/other", "node", "gpu-0")
    if offered:
        found.offers("node", "gpu-1", "gpu-2")
    found.situation.wants(request(selector=FULL, count=LARGEST), name="huge")
    halves = [request(name=name, selector=SMALL, count=2**62) for name in ("a", "b")]
    found.situation.wants(*halves, name="two-huge")
    found.situation.wants(request(selector=SMALL, count=3), name="normal")
    with at_once():
        huge, two_huge, normal = one(found, "huge"), one(found, "two-huge"), one(found, "normal")
        content_of(found.view(), lambda: True)
        list(cluster_map(found.view()))
    assert (huge.code, huge.permanent) == ("TooMany", True)
    assert huge.message.endswith(f"it asks for {LARGEST} devices, more than the 32 that one claim can have")
    assert two_huge.message.endswith(f"it asks for {2**63} devices, more than the 32 that one claim can have")
    assert [change.text for change in huge.changes] == [f"request gpu asked for 3 instead of {LARGEST}"]
    assert normal.code == "Waits"


HUGE_CLAIMS: dict[str, dict[str, Any]] = {
    "same attribute": {
        "requests": [request(selector=FULL, count=LARGEST)],
        "constraints": [{"matchAttribute": CLIQUE}],
    },
    "different attributes": {
        "requests": [request(selector=SMALL, count=LARGEST)],
        "constraints": [{"distinctAttribute": "gpu.tessera.dev/parentUUID"}],
    },
    "an alternative": {
        "requests": [
            {
                "name": "r",
                "firstAvailable": [
                    {"name": f"a{count}", "deviceClassName": "any", "count": count} for count in (LARGEST, 33, 2)
                ],
            }
        ]
    },
    "beside all devices": {
        "requests": [
            request(name="all", selector=FULL, allocationMode="All"),
            request(name="many", selector=SMALL, count=LARGEST),
        ]
    },
}


@pytest.mark.parametrize("written", HUGE_CLAIMS.values(), ids=HUGE_CLAIMS)
def test_huge_counts_end_no_search_late(written: dict[str, Any]) -> None:
    found = cluster()
    found.situation.wants(*written["requests"], constraints=written.get("constraints", ()))
    with at_once():
        one(found, "claim")
        demand_of(found.view().queue)


@pytest.mark.parametrize("count", ["9223372036854775807", "999999999999E"])
def test_a_pod_with_a_huge_number_of_extended_resources_has_its_reason_at_once(count: str) -> None:
    found = cluster()
    found.situation.device_class("named", FULL, extendedResourceName="example.org/gpu")
    containers = [{"name": "c", "resources": {"limits": {"example.org/gpu": count}}}]
    found.situation.pod("pod", containers=containers)
    with at_once():
        [only] = Explainer(found.view()).pending()
    assert only.code == "TooMany"


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_a_gang_with_a_huge_minimum_is_decided_at_once(shared: bool, count: int) -> None:
    there = Waiting(list(cluster().view().fleet))
    there.gang("gang", request(selector=FULL, count=count), min_count=LARGEST)
    if shared:  # the number of pods that the scheduler could place is then not limited by the devices
        there.claim("shared", request(selector=FULL))
        for number in range(2):
            there.pod(f"more-{number}", "shared", schedulingGroup={"podGroupName": "gang"})
    with at_once():
        demand_of(there.queue)
        reasons_in(Situation(there.queue))
