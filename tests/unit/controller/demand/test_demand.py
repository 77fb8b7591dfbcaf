"""What must be offered for the claims that wait: which devices, how many, on which GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from controller.demand.demand import Demand, demand_of, nodes_with_requests_for_all
from driver.model.gpu import MigMode
from driver.model.offer import FULL as FULL_KEY
from driver.model.offer import SHARE as SHARE_KEY
from driver.model.offer import DeviceKind, OfferKind
from tests.support.gpus import H100
from tests.support.queues import (
    FULL,
    OURS,
    SHARE,
    Situation,
    first_available,
    fleet_gpu,
    node_of,
    profile,
    request,
    selected_by,
)
from tests.support.reasons import reasons_of

A100, L40S, H200 = "NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA H200"
SMALL = OfferKind(DeviceKind.PARTITION, "1g.10gb")
TWO = OfferKind(DeviceKind.PARTITION, "2g.20gb")
CLIQUE = "gpu.tessera.dev/nvlinkClique"
PARENT = "gpu.tessera.dev/parentUUID"


def test_a_claim_for_one_profile_asks_for_one_device_of_any_gpu_that_has_it() -> None:
    there = Situation(node_of("a")).wants(request(selector=profile("1g.10gb")))
    assert demand_of(there.queue) == [Demand(SMALL, 1)]


def test_demands_of_claims_that_the_same_gpus_would_serve_are_one() -> None:
    there = Situation(node_of("a"))
    for number in range(5):
        there.wants(request(selector=profile("1g.10gb")), name=f"claim-{number}")
    assert demand_of(there.queue) == [Demand(SMALL, 5)]


def test_a_class_alone_decides_where_the_request_has_no_selector() -> None:
    there = Situation(node_of("a"))
    there.device_class("small", profile("1g.10gb"))
    assert demand_of(there.wants(request("small")).queue) == [Demand(SMALL, 1)]


MEMORY = 'device.capacity["gpu.tessera.dev"].memory.compareTo(quantity("{}")) >= 0'


@pytest.mark.parametrize(
    ("selector", "held", "expected"),
    [
        pytest.param(selected_by('type == "mig"'), [], {"1g.10gb": 1}, id="any partition"),
        pytest.param(f"{OURS} && {MEMORY.format('9Gi')}", [], {"1g.10gb": 1}, id="full GPUs, too"),
        pytest.param(f"{OURS} && {MEMORY.format('38Gi')}", [], {"3g.40gb": 1}, id="by memory"),
        pytest.param(
            selected_by('type == "mig"'),
            [f"mig-1g10gb-{start}" for start in range(6)] + ["mig-1g10gbme-6"],
            {"1g.10gb": 1},
            id="nothing is free",
        ),
        pytest.param(
            selected_by('type == "mig"', 'profile != "1g.10gb"', 'profile != "1g.10gb+me"'),
            ["mig-1g20gb-0", "mig-1g20gb-2"],
            {"1g.20gb": 1},
            id="the smallest is free",
        ),
        pytest.param(
            selected_by('profile in ["1g.10gb+me", "3g.40gb", "7g.80gb"]'),
            ["mig-1g10gbme-0"],
            {"3g.40gb": 1},
            id="the smallest is used up",
        ),
    ],
)
def test_a_claim_that_several_kinds_would_serve_asks_for_the_smallest_with_room(
    selector: str, held: list[str], expected: dict[str, int]
) -> None:
    there = Situation(node_of("a", *held)).wants(request(selector=selector))
    assert {str(demand.kind): demand.count for demand in demand_of(there.queue)} == expected


def test_a_claim_for_two_devices_of_any_kind_asks_for_two_small_ones() -> None:
    there = Situation(node_of("a")).wants(request(selector=selected_by('type == "mig"'), count=2))
    assert {(str(demand.kind), demand.count) for demand in demand_of(there.queue)} == {("1g.10gb", 2)}


def test_a_claim_of_two_requests_asks_for_the_smallest_devices_that_fit_together() -> None:
    requests = (request(name="small", selector=selected_by('type == "mig"')), request(name="full", selector=FULL))
    there = Situation(node_of("a")).wants(*requests)
    assert {str(demand.kind) for demand in demand_of(there.queue)} == {"1g.10gb", "full"}


def test_an_alternative_that_is_not_the_last_is_asked_for_by_name() -> None:
    there = Situation(node_of("a"))
    there.template("either", first_available(("large", profile("3g.40gb")), ("small", profile("1g.10gb"))))
    assert {kind.profile for kind in there.queue.asked.kinds} == {"3g.40gb", "1g.10gb"}


def test_what_claims_and_templates_ask_for_is_the_smallest_of_what_they_accept() -> None:
    there = Situation(node_of("a"))
    there.template("any", request(selector=selected_by('type == "mig"')))
    there.claim("large", request(selector=f"{OURS} && {MEMORY.format('38Gi')}"))
    asked = there.queue.asked
    assert {kind.profile for kind in asked.kinds} == {"1g.10gb", "3g.40gb"}
    assert {len(choice) for choice in asked.choices} == {7, 4}
    there.claims.clear()
    assert {kind.profile for kind in there.queue.asked.kinds} == {"1g.10gb"}


@pytest.mark.parametrize(
    ("selector", "key"),
    [
        pytest.param(FULL, FULL_KEY, id="full GPUs"),
        pytest.param(SHARE, SHARE_KEY, id="shares"),
        pytest.param(profile("2g.20gb"), TWO, id="partitions"),
        pytest.param(
            'device.capacity["gpu.tessera.dev"].?memory.orValue(quantity("0")).isGreaterThan(quantity("70Gi")) && '
            'device.attributes["gpu.tessera.dev"].type == "gpu"',
            FULL_KEY,
            id="by capacity",
        ),
    ],
)
def test_every_kind_of_device_can_be_asked_for(selector: str, key: OfferKind) -> None:
    there = Situation(node_of("a", shares=4)).wants(request(selector=selector))
    assert demand_of(there.queue) == [Demand(key, 1)]


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(None, id="used by no pod"),
        pytest.param({"schedulingGates": [{"name": "wait"}]}, id="its pod is gated"),
        pytest.param({"metadata": {"deletionTimestamp": "2026-11-21T10:00:00Z"}}, id="its pod is being deleted"),
        pytest.param({"status": {"phase": "Running"}}, id="its pod runs"),
    ],
)
def test_a_claim_wants_nothing_while(pod: dict[str, Any] | None) -> None:
    there = Situation(node_of("a"))
    there.claim("claim", request(selector=FULL))
    if pod is not None:
        there.pod("pod", "claim", **pod)
    assert demand_of(there.queue) == []


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"metadata": {"deletionTimestamp": "2026-11-21T10:00:00Z"}}, id="being deleted"),
        pytest.param({"status": {"allocation": {"devices": {"results": []}}}}, id="allocated"),
    ],
)
def test_a_claim_wants_nothing_when_it_is(more: dict[str, Any]) -> None:
    there = Situation(node_of("a"))
    there.pod("pod", there.claim("claim", request(selector=FULL), **more))
    assert demand_of(there.queue) == []


def test_a_claim_from_a_template_is_found_by_the_name_in_the_pods_status() -> None:
    there = Situation(node_of("a"))
    there.claim("pod-gpu-x7k2", request(selector=FULL))
    by_template = [{"name": "gpu", "resourceClaimTemplateName": "template"}]
    there.pod("pod", resourceClaims=by_template)
    assert demand_of(there.queue) == []
    status = {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "pod-gpu-x7k2"}]}
    there.pod("pod", status=status, resourceClaims=by_template)
    assert demand_of(there.queue) == [Demand(FULL_KEY, 1)]


def test_a_claim_that_two_pods_use_counts_once_and_may_go_where_either_may() -> None:
    there = Situation([*node_of("a"), *node_of("b"), *node_of("c")])
    there.claim("shared", request(selector=FULL))
    for node in ("a", "b"):
        there.node(node, {"name": node})
        there.pod(f"on-{node}", "shared", nodeSelector={"name": node})
    assert demand_of(there.queue) == [Demand(FULL_KEY, 1, frozenset({"a/0", "a/1", "b/0", "b/1"}))]


def test_several_devices_come_from_one_node() -> None:
    there = Situation([*node_of("a"), *node_of("b")]).wants(request(selector=FULL, count=2))
    [demand] = demand_of(there.queue)
    assert (demand.kind, demand.count, demand.eligible) == (FULL_KEY, 2, None)
    assert set(demand.together) == {frozenset({"a/0", "a/1"}), frozenset({"b/0", "b/1"})}


def test_a_node_without_room_for_all_of_them_is_no_choice_while_another_has_it() -> None:
    there = Situation([*node_of("a", "mig-1g10gb-0"), *node_of("b")]).wants(request(selector=FULL, count=2))
    assert [demand.together for demand in demand_of(there.queue)] == [(frozenset({"b/0", "b/1"}),)]


def test_all_means_as_many_as_the_node_with_the_most_can_give() -> None:
    there = Situation([*node_of("a", gpus=2), *node_of("b", gpus=4)])
    there.wants(request(selector=FULL, allocationMode="All"))
    demand = demand_of(there.queue)[0]
    assert demand.count == 4
    assert demand.together == (frozenset({"b/0", "b/1", "b/2", "b/3"}),)


@pytest.mark.parametrize("mode", [{}, {"allocationMode": "All"}])
def test_a_claim_with_admin_access_gets_monitor_devices_where_its_pod_can_run_and_no_offers(mode: Any) -> None:
    there = Situation([*node_of("a", "full"), *node_of("b"), *node_of("c")])
    for name in "ab":
        there.node(name, {"monitored": "yes"})
    monitor = request(selector=selected_by('type == "monitor"'), adminAccess=True, **mode)
    there.wants(monitor, nodeSelector={"monitored": "yes"})
    assert there.queue.monitored_nodes == {"a", "b"}
    assert demand_of(there.queue) == []
    assert not nodes_with_requests_for_all(there.queue)


def test_no_monitor_devices_are_published_for_a_claim_that_selects_none() -> None:
    for asked in (request(selector=FULL, adminAccess=True), request(selector=selected_by('type == "monitor"'))):
        assert not Situation(node_of("a")).wants(asked).queue.monitored_nodes


def test_everything_is_offered_that_a_claim_matches_whether_it_is_held_or_not() -> None:
    there = Situation(
        [*node_of("a", gpus=2), *node_of("b", gpus=3), fleet_gpu("b", 3, "NVIDIA H100 80GB HBM3", "full")]
    )
    there.wants(request(selector=FULL, allocationMode="All"))
    gpus = frozenset({"a/0", "a/1", "b/0", "b/1", "b/2", "b/3"})
    assert demand_of(there.queue)[-1] == Demand(FULL_KEY, 1, gpus, all_devices=True)
    assert nodes_with_requests_for_all(there.queue) == {"a", "b"}
    assert not nodes_with_requests_for_all(Situation(node_of("a")).wants(request(selector=FULL)).queue)


def test_all_is_not_for_a_node_where_some_are_in_use() -> None:
    there = Situation(
        [*node_of("a", gpus=2), *node_of("b", gpus=3), fleet_gpu("b", 3, "NVIDIA H100 80GB HBM3", "full")]
    )
    there.wants(request(selector=FULL, allocationMode="All"))
    assert [(demand.count, demand.together) for demand in demand_of(there.queue) if not demand.all_devices] == [
        (2, (frozenset({"a/0", "a/1"}),)),
    ]


def test_gpus_with_one_clique_are_asked_for_together() -> None:
    gpus = [fleet_gpu("a", n, facts={"nvlink_clique": f"clique-{n // 2}"}) for n in range(4)]
    there = Situation(gpus).wants(request(selector=FULL, count=2), constraints=[{"matchAttribute": CLIQUE}])
    [demand] = demand_of(there.queue)
    assert set(demand.together) == {frozenset({"a/0", "a/1"}), frozenset({"a/2", "a/3"})}


def test_a_gpu_without_the_attribute_of_a_constraint_will_not_do() -> None:
    gpus = [fleet_gpu("a", 0, facts={"nvlink_clique": "clique"}), fleet_gpu("a", 1)]
    there = Situation(gpus).wants(request(selector=FULL), constraints=[{"matchAttribute": CLIQUE}])
    assert [demand.eligible for demand in demand_of(there.queue)] == [frozenset({"a/0"})]


def test_partitions_of_one_gpu_are_asked_for_gpu_by_gpu() -> None:
    there = Situation(node_of("a")).wants(
        request(selector=profile("2g.20gb"), count=3), constraints=[{"matchAttribute": PARENT}]
    )
    [demand] = demand_of(there.queue)
    assert set(demand.together) == {frozenset({"a/0"}), frozenset({"a/1"})}


def test_partitions_of_different_gpus_get_everything_of_a_node_that_has_enough() -> None:
    there = Situation([*node_of("a", gpus=1), *node_of("b", gpus=3)])
    there.wants(request(selector=profile("1g.10gb"), count=3), constraints=[{"distinctAttribute": PARENT}])
    assert demand_of(there.queue) == [Demand(SMALL, 3, frozenset({"b/0", "b/1", "b/2"}), all_devices=True)]


def test_requests_for_different_devices_are_asked_of_one_node() -> None:
    there = Situation([*node_of("a", "full"), *node_of("b")])
    there.wants(request(name="big", selector=FULL), request(name="small", selector=profile("1g.10gb")))
    on_b = frozenset({"b/0", "b/1"})
    found = demand_of(there.queue)
    assert found == [Demand(key, 1, on_b, all_devices=True) for key in (FULL_KEY, SMALL)]


def test_two_claims_of_one_pod_are_asked_of_one_node() -> None:
    there = Situation([*node_of("a", "mig-1g10gb-0", gpus=1), *node_of("b", gpus=2)])
    names = [there.claim(f"claim-{n}", request(selector=FULL)) for n in range(2)]
    there.pod("pod", *names)
    assert demand_of(there.queue) == [Demand(FULL_KEY, 2, frozenset({"b/0", "b/1"}))]


def test_a_pods_allocated_claim_says_where_its_other_claim_has_to_be_met() -> None:
    there = Situation([*node_of("a"), *node_of("b")])
    on_b = {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["b"]}]}]}
    there.claim("first", request(selector=FULL), status={"allocation": {"nodeSelector": on_b}})
    there.pod("pod", "first", there.claim("second", request(selector=FULL)))
    assert demand_of(there.queue) == [Demand(FULL_KEY, 1, frozenset({"b/0", "b/1"}))]


def test_the_first_alternative_counts_while_it_can_be_met() -> None:
    alternatives = first_available(("small", profile("1g.10gb")), ("bigger", profile("2g.20gb")))
    assert demand_of(Situation(node_of("a")).wants(alternatives).queue) == [Demand(SMALL, 1)]


def test_the_second_alternative_counts_once_the_first_cannot_be_met() -> None:
    alternatives = first_available(("whole", FULL), ("part", profile("2g.20gb")))
    there = Situation(node_of("a", "mig-1g10gb-0")).wants(alternatives)
    assert demand_of(there.queue) == [Demand(TWO, 1)]


def test_the_first_alternative_counts_when_none_can_be_met() -> None:
    alternatives = first_available(("whole", FULL), ("part", profile("2g.20gb")))
    assert demand_of(Situation(node_of("a", "full")).wants(alternatives).queue) == [Demand(FULL_KEY, 1)]


def test_placements_named_by_their_start_get_everything_of_a_node_that_has_them_free() -> None:
    there = Situation([*node_of("a", "mig-1g10gb-4"), *node_of("b")])
    there.wants(request(selector=selected_by('type == "mig"', 'profile == "1g.10gb"', "placementStart == 4")))
    assert demand_of(there.queue) == [Demand(SMALL, 1, frozenset({"b/0", "b/1"}), all_devices=True)]


def test_a_request_for_another_drivers_device_is_none_of_ours() -> None:
    there = Situation(node_of("a"))
    there.device_class("nic", 'device.driver == "nic.example.com"')
    there.wants(request("nic", name="nic"), request(name="gpu", selector=FULL))
    there.wants(request("nic"), name="only-a-nic")
    assert demand_of(there.queue) == [Demand(FULL_KEY, 1)]


def test_one_gpu_on_which_a_selector_fails_does_not_keep_the_others_from_counting() -> None:
    gpus = [fleet_gpu("a", 0, facts={"nvlink_clique": "x"}), fleet_gpu("a", 1)]
    there = Situation(gpus).wants(request(selector=selected_by('type == "gpu"', 'nvlinkClique == "x"')))
    assert demand_of(there.queue) == [Demand(FULL_KEY, 1, frozenset({"a/0"}))]


@pytest.mark.parametrize(
    ("product", "mode", "selector", "key"),
    [
        pytest.param(A100, MigMode.DISABLED, profile("1g.10gb"), SMALL, id="A100 out of MIG mode"),
        pytest.param(A100, MigMode.ENABLED, profile("1g.10gb"), SMALL, id="A100 in MIG mode"),
        pytest.param(L40S, MigMode.UNSUPPORTED, FULL, FULL_KEY, id="L40S"),
    ],
)
def test_products_are_asked_for_alike(product: str, mode: MigMode, selector: str, key: OfferKind) -> None:
    there = Situation(node_of("a", product=product, facts={"mig_mode": mode})).wants(request(selector=selector))
    assert demand_of(there.queue) == [Demand(key, 1)]


def test_an_a100_out_of_mig_mode_satisfies_nobody_who_wants_a_partition() -> None:
    there = Situation(node_of("a", product=A100)).wants(request(selector=profile("1g.10gb")))
    assert not there.queue.satisfiable(there.waiting())
    there.gpus = node_of("a", product=A100, facts={"mig_mode": MigMode.ENABLED})
    assert there.queue.satisfiable(there.waiting())


def test_what_asks_for_a_profile_of_one_product_names_the_gpus_of_that_product() -> None:
    there = Situation([*node_of("a"), *node_of("b", product=L40S)])
    there.wants(request(selector=selected_by('productName == "NVIDIA L40S"')))
    assert demand_of(there.queue) == [Demand(FULL_KEY, 1, frozenset({"b/0", "b/1"}))]


@pytest.mark.parametrize(
    ("amounts", "products"),
    [
        pytest.param({"memory": "100Gi"}, {H200}, id="more memory than one product has"),
        pytest.param({"memory": "40Gi", "multiprocessors": 1}, {H100, H200}, id="two capacities, one a number"),
        pytest.param({"nothing": "1"}, set(), id="no device has it"),
        pytest.param({"gpu.tessera.dev/memory": "1Gi"}, set(), id="slices spell it without a domain"),
    ],
)
def test_a_request_for_capacity_is_for_devices_that_have_that_much(
    amounts: dict[str, str | int], products: set[str]
) -> None:
    there = Situation([fleet_gpu("a", 0, H100), fleet_gpu("b", 0, H200)])
    there.wants(request(selector=FULL, capacity={"requests": amounts}))
    product = {"a/0": H100, "b/0": H200}
    found = {uuid for demand in demand_of(there.queue) for uuid in demand.eligible or product}
    assert {product[uuid] for uuid in found} == products


def test_the_limit_of_devices_is_for_each_claim_of_a_pod_and_not_for_all_together() -> None:
    there = Situation(node_of("a", gpus=8))
    twenty = request(selector=profile("1g.10gb"), count=20)
    there.pod("pod", there.claim("first", twenty), there.claim("second", twenty))
    assert there.queue.satisfiable(there.waiting("first"))
    assert reasons_of(there.queue) == []


def test_all_devices_of_a_node_count_for_the_limit_of_their_claim() -> None:
    there = Situation(node_of("a", gpus=8))
    every = request(selector=profile("1g.10gb"), allocationMode="All")
    there.pod("pod", there.claim("all", every), there.claim("one", request(selector=profile("1g.10gb"))))
    assert not there.queue.satisfiable(there.waiting("all"))
