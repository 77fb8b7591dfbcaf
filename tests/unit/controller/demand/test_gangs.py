"""Gangs: pods of one PodGroup get offers all or none, and the reason why they wait names the group."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import structs

from controller.demand.demand import demand_of
from controller.demand.device_search import Budget, choose_devices
from controller.explain.reason import ReasonCode
from controller.explain.sources.waiting_gangs import reasons_of_incomplete_gangs
from driver.model.offer import FULL as FULL_KEY
from tests.support.clock import FakeClock
from tests.support.gpus import H100
from tests.support.queues import FULL, SHARE, Situation, fleet_gpu, node_of, profile, request, selected_by
from tests.support.reasons import reasons_of

ONE = request(selector=FULL)
EIGHT = request(selector=FULL, count=8)


def nodes(*free: int, gpus: int = 8) -> Situation:
    """A node of ``gpus`` GPUs for each number, so many of which are free."""
    return Situation(
        [
            fleet_gpu(f"node-{at}", number, "NVIDIA H100 80GB HBM3", *(["full"] if number >= count else []))
            for at, count in enumerate(free)
            for number in range(gpus)
        ]
    )


def offered(there: Situation) -> int:
    """The number of full GPUs that pending claims need offers for."""
    return sum(demand.count for demand in demand_of(there.queue) if demand.kind == FULL_KEY)


def sentences(there: Situation) -> set[str]:
    return {f"{each.code}: {each.sentence}" for each in reasons_of(there.queue)}


@pytest.mark.parametrize(
    ("free", "pods", "expected"),
    [
        ((8, 8, 8), [ONE] * 16, 16),
        ((8, 8), [ONE] * 16, 16),
        ((8, 7), [ONE] * 16, 0),
        ((8, 0, 0), [ONE] * 16, 0),
        ((8, 8, 8), [EIGHT] * 3, 24),
        ((8, 8, 7), [EIGHT] * 3, 0),
        ((8, 8, 8), [EIGHT] * 3 + [ONE], 0),
        ((8, 8, 8, 1), [EIGHT] * 3 + [ONE], 25),
    ],
)
def test_a_gang_gets_offers_for_all_of_its_pods_or_for_none(
    free: tuple[int, ...], pods: list[dict[str, Any]], expected: int
) -> None:
    assert offered(nodes(*free).gang("training", *pods)) == expected


def test_a_gang_without_room_takes_no_offers_from_other_claims() -> None:
    there = nodes(8, 0, 0).gang("training", *[ONE] * 16).wants(ONE, name="alone")
    assert offered(there) == 1


def test_each_of_two_gangs_that_have_room_only_alone_gets_its_offers() -> None:
    """The scheduler decides which of them comes first."""
    there = nodes(8, 8, 8).gang("a", *[ONE] * 16).gang("b", *[ONE] * 16)
    assert offered(there) == 32


def test_a_gang_needs_room_only_for_the_pods_that_it_needs_at_least() -> None:
    assert offered(nodes(8, 4).gang("training", *[ONE] * 16, min_count=12)) == 16


@pytest.mark.parametrize(("free", "expected"), [((8, 8), 16), ((8, 7), 0)])
def test_pods_of_a_gang_that_are_still_to_be_created_get_offers_in_advance(
    free: tuple[int, ...], expected: int
) -> None:
    assert offered(nodes(*free).gang("training", *[ONE] * 4, min_count=16)) == expected


def test_a_group_that_claims_to_need_more_pods_than_any_cluster_has_gets_no_offers() -> None:
    assert offered(nodes(8, 8).gang("training", ONE, min_count=2**31 - 1)) == 0


def test_a_gang_that_needs_devices_of_another_driver_only_has_room() -> None:
    theirs = request(selector='device.driver == "nic.example.com"')
    there = nodes(8).gang("network", theirs, theirs).wants(ONE, name="alone")
    assert not there.queue.gangs_without_room
    assert offered(there) == 1


def test_no_number_of_pods_that_a_group_claims_to_need_takes_memory() -> None:
    theirs = request(selector='device.driver == "nic.example.com"')
    there = nodes(8).gang("network", theirs, theirs, min_count=2**62).wants(ONE, name="alone")
    assert offered(there) == 1


def test_nodes_for_pods_that_are_still_to_be_created_are_offered_whole() -> None:
    assert offered(nodes(8, 8, 8).gang("training", EIGHT, min_count=3)) == 24


def test_pods_of_a_group_without_a_gang_are_planned_one_by_one() -> None:
    there = nodes(8, 0).gang("training", *[ONE] * 16, spec={"schedulingPolicy": {"basic": {}}})
    assert offered(there) == 16


def test_pods_of_a_gang_that_has_been_placed_are_planned_one_by_one() -> None:
    placed = {"conditions": [{"type": "PodGroupInitiallyScheduled", "status": "True"}]}
    assert offered(nodes(8, 0).gang("training", *[ONE] * 16, status=placed)) == 16


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        pytest.param({"min_member": 16}, 0, id="no room for all"),
        pytest.param({"min_member": 8}, 16, id="room for those that it needs"),
        pytest.param({"min_member": 1}, 16, id="no gang"),
        pytest.param({"min_member": 16, "status": {"phase": "Inqueue"}}, 0, id="queued"),
        pytest.param({"min_member": 24}, 16, id="others of its pods run or are missing"),
        pytest.param({"min_member": 16, "status": {"phase": "Running"}}, 16, id="placed"),
        pytest.param({"min_member": 16, "cpu": ""}, 16, id="pods without requests, which Volcano places one by one"),
    ],
)
def test_a_gang_of_volcano_gets_offers_for_as_many_pods_as_volcano_places_at_once(
    group: dict[str, Any], expected: int
) -> None:
    assert offered(nodes(8).volcano_gang("training", *[ONE] * 16, **group)) == expected


def test_pods_of_volcano_that_wait_while_others_of_their_gang_have_nodes_are_planned_one_by_one() -> None:
    there = nodes(8).volcano_gang("training", *[ONE] * 16, min_member=16)
    first, *others = there.pods
    there.pods = [structs.replace(first, spec=structs.replace(first.spec, node_name="node-0")), *others]
    assert offered(there) == 16


def test_a_group_of_volcano_says_nothing_of_pods_that_the_default_scheduler_places() -> None:
    there = nodes(8).volcano_gang("training", *[ONE] * 2, min_member=16)
    there.pods = [
        structs.replace(pod, spec=structs.replace(pod.spec, scheduler_name="default-scheduler")) for pod in there.pods
    ]
    assert offered(there) == 2


def test_a_pod_that_names_a_group_which_does_not_exist_is_planned_by_itself() -> None:
    there = nodes(8).wants(ONE, schedulingGroup={"podGroupName": "none"})
    assert offered(there) == 1


def test_bound_members_and_members_without_devices_count_for_the_gang() -> None:
    there = nodes(2).gang("training", ONE, ONE, min_count=4)
    there.pod("launcher", schedulingGroup={"podGroupName": "training"})
    there.pod("bound", schedulingGroup={"podGroupName": "training"}, nodeName="node-0")
    assert offered(there) == 2
    [gang] = there.queue.gangs
    assert gang.needed == 2


def test_a_claim_that_the_pods_of_a_gang_share_needs_its_devices_once() -> None:
    there = nodes(8).gang("training", min_count=4)
    there.claim("shared", request(selector=FULL, count=8))
    for number in range(4):
        there.pod(f"pod-{number}", "shared", schedulingGroup={"podGroupName": "training"})
    assert offered(there) == 8


def test_nodes_on_which_the_pods_may_not_run_have_no_room() -> None:
    there = nodes(8, 8)
    there.node("node-1", unschedulable=True)
    assert offered(there.gang("training", *[ONE] * 16)) == 0


def test_partitions_count_by_the_placements_that_are_left() -> None:
    there = Situation(node_of("a", gpus=2)).gang("training", *[request(selector=profile("3g.40gb"))] * 4)
    assert len(demand_of(there.queue)) == 1
    there = Situation(node_of("a", gpus=2)).gang("training", *[request(selector=profile("3g.40gb"))] * 5)
    assert demand_of(there.queue) == []


@pytest.mark.parametrize("shares", [3, 7, 10])
def test_shares_are_counted_exactly(shares: int) -> None:
    gpus = [fleet_gpu("a", number, shares=shares) for number in range(3)]
    there = Situation(gpus).gang("notebooks", *[request(selector=SHARE)] * (3 * shares))
    assert [demand.count for demand in demand_of(there.queue)] == [3 * shares]
    there = Situation(gpus).gang("notebooks", *[request(selector=SHARE)] * (3 * shares + 1))
    assert demand_of(there.queue) == []


@pytest.mark.parametrize(
    ("free", "pods", "sentence"),
    [
        (
            (8, 0, 0),
            [ONE] * 16,
            (
                "PodGroup training needs 16 pods with 1 device each at once; "
                "free devices are enough for 8 of them at most, on 1 node"
            ),
        ),
        (
            (8, 8, 8, 0),
            [EIGHT] * 4,
            (
                "PodGroup training needs 4 pods with 8 devices each at once; "
                "free devices are enough for 3 of them at most, on 3 nodes"
            ),
        ),
        (
            (0, 0),
            [ONE] * 16,
            "PodGroup training needs 16 pods with 1 device each at once; free devices are enough for none of them",
        ),
        (
            (8, 8),
            [ONE] * 17,
            (
                "PodGroup training needs 17 pods with 1 device each at once; "
                "even if nothing were held, there would be room for 16 of them at most, on 2 nodes"
            ),
        ),
        (
            (8, 8, 0),
            [EIGHT, EIGHT, ONE],
            (
                "PodGroup training needs 3 pods with their devices at once; "
                "free devices are enough for 2 of them at most, on 2 nodes"
            ),
        ),
    ],
)
def test_the_reason_names_the_gang_and_how_many_of_its_pods_have_room(
    free: tuple[int, ...], pods: list[dict[str, Any]], sentence: str
) -> None:
    assert sentences(nodes(*free).gang("training", *pods)) == {f"{ReasonCode.GANG}: {sentence}"}


def test_the_reason_of_a_gang_of_volcano_is_about_the_pod_group_of_volcano() -> None:
    [reason, *_] = reasons_of(nodes(8).volcano_gang("training", *[ONE] * 16, min_member=12).queue)
    expected = "PodGroup training needs 12 pods with 1 device each at once; even if nothing were held, there would be"
    assert reason.sentence.startswith(expected)
    assert reason.group is not None
    assert reason.group.api_version == "scheduling.volcano.sh/v1beta1"


def test_the_reason_of_a_gang_names_who_holds_what_it_lacks() -> None:
    there = nodes(1, gpus=2).gang("training", ONE, ONE).holding("notebook", "node-0", "gpu-1")
    [sentence] = sentences(there)
    assert "enough for 1 of them at most, on 1 node" in sentence
    assert "devices there are held by 1 claim: default/notebook" in sentence


def test_a_claim_of_a_gang_that_can_never_be_met_keeps_its_own_reason() -> None:
    there = nodes(8).gang("training", ONE, request(selector=selected_by('productName == "NVIDIA B200"')))
    found = {each.pending.key: each.code for each in reasons_of(there.queue)}
    assert found["default/training-1"] is ReasonCode.NOTHING_MATCHES
    assert found["default/training-0"] is ReasonCode.GANG


def test_a_gang_whose_pods_are_not_all_created_is_told_how_many_are_missing() -> None:
    there = nodes(8).gang("training", *[ONE] * 4, min_count=16)
    assert sentences(there) == set()
    found = list(reasons_of_incomplete_gangs(there.queue, FakeClock()))
    assert len(found) == 4
    needs = "PodGroup training needs 16 pods at once, and only 4 wait: the scheduler tries none of them before 12"
    assert {(each.code, each.sentence.startswith(needs)) for each in found} == {(ReasonCode.GANG, True)}
    assert not list(reasons_of_incomplete_gangs(nodes(8).gang("whole", ONE, ONE).queue, FakeClock()))


@pytest.mark.parametrize("count", [1, 7, 8])
def test_a_gang_is_never_held_back_where_each_pod_has_a_node_of_its_own(count: int) -> None:
    there = nodes(*[count] * 4).gang("training", *[request(selector=FULL, count=count)] * 4)
    assert offered(there) == 4 * count


def placed(there: Situation) -> int:
    """The number of pods that a simple search places, one after the other: there is room for these in any case."""
    queue = there.queue
    feasibility, count = queue.feasibility, 0
    states = {node: list(feasibility.states(node)) for node in feasibility.nodes}
    for pod in queue.gangs[0].pods:
        for node, gpus in feasibility.fleet.nodes.items():
            now, value = tuple(states[node]), feasibility.matching.value
            chosen = choose_devices(gpus, now, next(queue.combinations(pod)), value, Budget())
            for entry, spot in chosen:
                at = gpus.index(entry)
                states[node][at] = states[node][at].take(spot)
            if chosen:
                count += 1
                break
    return count


@pytest.mark.parametrize("seed", range(40))
def test_a_gang_that_can_be_placed_is_never_held_back(seed: int) -> None:
    chance = random.Random(seed)
    held = ["mig-1g10gb-6", "mig-2g20gb-0", "mig-3g40gb-4", "full"]
    gpus = [
        fleet_gpu(node, number, H100, *chance.sample(held, chance.choice([0, 0, 1])))
        for node in ("a", "b")
        for number in range(3)
    ]
    selectors = [FULL, *map(profile, ("1g.10gb", "2g.20gb", "3g.40gb"))]
    requests = [
        request(selector=chance.choice(selectors), count=chance.choice([1, 1, 2])) for _ in range(chance.randint(2, 9))
    ]
    there = Situation(gpus).gang("training", *requests)
    found = placed(there)
    there = Situation(gpus).gang("training", *requests, min_count=max(1, found))
    assert there.queue.gangs_without_room == {}
