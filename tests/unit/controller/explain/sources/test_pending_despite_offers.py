"""Claims that wait though offers that would do stand: when that is reported, and what is said."""

from __future__ import annotations

from typing import Any

import pytest

from controller.cluster.claim_index import PoolDevice
from controller.cluster.node_views import PoolPart, incomplete_pools
from controller.explain.reason import ReasonCode
from controller.explain.sources.pending_despite_offers import (
    GATES,
    OfferedDevice,
    satisfying,
)
from tests.support.queues import DRIVER, FULL, SHARE, Situation, node_of, profile, request, selected_by
from tests.support.watched_offers import MINUTE, SAYS_NO, SECOND, Watched, offers, refused

SMALL = profile("1g.10gb")
NO_CPU = "0/1 nodes are available: 1 Insufficient cpu."
NOT_READY = "pod group is not ready, 2 Pending, 2 minAvailable; Pending: 2 Unschedulable"
"""As Volcano reports."""

AFFINITY = "0/2 nodes are available: 1 cannot allocate all claims, 1 node(s) didn't match pod anti-affinity rules."
FAILS = 'running "DynamicResources" filter plugin: claim default/claim: selector #0: CEL runtime error: no such key: x'


def waiting(message: str | None = SAYS_NO, **pod: Any) -> Situation:
    """A claim for a small partition on two nodes of two H100."""
    there = Situation([*node_of("a"), *node_of("b")])
    return there.wants(request(selector=SMALL), status=None if message is None else refused(message), **pod)


class TestReservedGpus:
    """A GPU whose holders were evicted for another pod is no offer for anyone else."""

    @pytest.mark.parametrize(
        ("reserved", "said"),
        [
            (["a/gpu-0=other"], "gpu-0-mig-1g10gb-6 of node a would do, but is reserved"),
            (["a/gpu-1=other"], "gpu-0-mig-1g10gb-6 of node a would do and has been offered"),
            (["a/gpu-0=other,claim"], "gpu-0-mig-1g10gb-6 of node a would do and has been offered"),
            (["a/gpu-0=pod-of-claim"], "gpu-0-mig-1g10gb-6 of node a would do and has been offered"),
        ],
    )
    def test_the_reason_of_a_claim_names_the_reservation_that_keeps_it_waiting(
        self, reserved: list[str], said: str
    ) -> None:
        watched = Watched(waiting(), "a/gpu-0-mig-1g10gb-6")
        [pending] = watched.there.queue.pending
        assert (pending.claim.metadata.uid, pending.pods[0].metadata.uid) == ("claim", "pod-of-claim")
        entries = (entry.split("/") for entry in reserved)
        watched.fenced = tuple(PoolDevice(f"{node}-{DRIVER}", device) for node, device in entries)
        [reason] = watched.after(MINUTE)
        assert said in reason.sentence
        assert (reason.code is ReasonCode.BEHIND) == ("is reserved" in said)

    def test_another_device_is_named_that_is_not_reserved(self) -> None:
        watched = Watched(waiting(), "a/gpu-0-mig-1g10gb-6", "b/gpu-0-mig-1g10gb-6")
        watched.fenced = (PoolDevice(f"a-{DRIVER}", "gpu-0=other"),)
        assert "of node b would do" in watched.told()


class TestWhen:
    def test_a_claim_is_reported_after_a_minute_and_as_long_as_it_waits(self) -> None:
        watched = Watched(waiting(), "a/gpu-0-mig-1g10gb-6")
        assert watched.after(MINUTE - 1) == []
        assert [each.pending.key for each in watched.after(1)] == ["default/claim"]
        assert [each.pending.key for each in watched.after(600)] == ["default/claim"]

    def test_the_minute_begins_with_the_offer_if_that_came_later(self) -> None:
        watched = Watched(waiting())
        watched.standing = ("a/gpu-0-mig-1g10gb-6",)
        assert watched.after(600) == []
        assert watched.after(MINUTE - 1) == []
        assert watched.after(1)

    def test_it_begins_anew_where_an_offer_was_away_for_a_while(self) -> None:
        watched = Watched(waiting(), "a/gpu-0-mig-1g10gb-6")
        watched.standing = ()
        watched.after(50)
        watched.standing = ("a/gpu-0-mig-1g10gb-6",)
        assert watched.after(50) == []

    def test_a_claim_that_got_a_device_meanwhile_is_not_reported(self) -> None:
        watched = Watched(waiting(), "a/gpu-0-mig-1g10gb-6")
        watched.there.claims.clear()
        watched.there.holding("claim", "a", "gpu-0-mig-1g10gb-5")
        assert watched.after(MINUTE) == []

    @pytest.mark.parametrize(
        ("standing", "pod"),
        [
            pytest.param(("a/gpu-0",), {}, id="of another kind"),
            pytest.param(("a/gpu-0-mig-1g10gb-6",), {"nodeSelector": {"pool": "b"}}, id="where its pod may not run"),
            pytest.param((), {}, id="none"),
        ],
    )
    def test_offers_that_would_not_do_are_no_reason_to_report(self, standing: tuple[str, ...], pod: Any) -> None:
        assert Watched(waiting(**pod), *standing).after(MINUTE) == []

    def test_an_offer_that_no_longer_fits_beside_what_is_held_would_not_do(self) -> None:
        there = Situation(node_of("a", "mig-7g80gb-0")).wants(request(selector=SMALL))
        assert Watched(there, "a/gpu-0-mig-1g10gb-6").after(MINUTE) == []

    def test_it_says_when_to_look_again_though_nothing_changed(self) -> None:
        watched = Watched(waiting(), "a/gpu-0-mig-1g10gb-6")
        assert watched.sightings.next_s == pytest.approx(1)
        watched.after(1.5)
        assert watched.sightings.next_s == pytest.approx(0.5)
        watched.after(0.5)
        assert watched.sightings.next_s is None

    def test_while_nobody_waits_there_is_no_time_to_look(self) -> None:
        assert Watched(Situation(node_of("a")), "a/gpu-0").sightings.next_s is None


class TestWhatIsSaid:
    def test_which_offer_stands_where_and_since_when(self) -> None:
        told = Watched(waiting(), "a/gpu-0-mig-1g10gb-6").told()
        assert "gpu-0-mig-1g10gb-6 of node a would do and has been offered since 2026-11-21T00:16:40Z" in told

    def test_a_scheduler_that_can_not_allocate_has_its_gates_doubted(self) -> None:
        told = Watched(waiting(), "a/gpu-0-mig-1g10gb-6").told()
        assert SAYS_NO in told
        assert f"; {GATES}; gpu-0" in told

    def test_another_reason_of_the_schedulers_is_quoted_as_it_is(self) -> None:
        told = Watched(waiting(NO_CPU), "a/gpu-0-mig-1g10gb-6").told()
        assert f"the scheduler reports on pod pod-of-claim: {NO_CPU.rstrip('.')}" in told
        assert GATES not in told

    def test_a_pod_that_no_scheduler_looked_at_has_its_scheduler_asked_for(self) -> None:
        told = Watched(waiting(None, schedulerName="nobody"), "a/gpu-0-mig-1g10gb-6").told()
        assert "no scheduler has reported on pod pod-of-claim; does a scheduler named nobody run?" in told

    def test_an_absent_scheduler_is_named_after_two_seconds_a_busy_one_after_a_minute(self) -> None:
        created = {"metadata": {"creationTimestamp": "2026-11-21T00:16:40Z"}}
        watched = Watched(waiting(None, schedulerName="none", **created), "a/gpu-0-mig-1g10gb-6")
        assert watched.after(SECOND) == []
        [reason] = watched.after(SECOND)
        assert "does a scheduler named none run?" in reason.sentence
        done = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-21T00:16:41Z"}
        watched.there.wants(request(), name="other", schedulerName="none", status={"conditions": [done]})
        assert watched.after(SECOND) == []
        assert watched.after(MINUTE)

    @pytest.mark.parametrize(
        ("message", "is_quoted"),
        [
            ("0/2 nodes are available: 1 cannot allocate all claims, 1 node(s) had untolerated taint(s).", False),
            ("0/2 nodes are available: 2 cannot allocate all claims. still not schedulable, preemption: none.", False),
            ("0/2 nodes are available: 1 cannot allocate all claims, 1 node(s) lack the licence of plugin x.", True),
            ("no nodes available to schedule pods", True),
            ("0/2 nodes are unavailable: 1 cannot allocate all claims, 1 Insufficient cpu.", True),
            (f"{NOT_READY}. Origin reason is b: 0/2 nodes are unavailable: 2 cannot allocate all claims.", False),
            ("Pod default/b can possibly be assigned to a, once minAvailable is satisfied", False),
            (NOT_READY, True),
        ],
    )
    def test_only_devices_gangs_and_excluded_nodes_are_no_other_obstacle(
        self, message: str, *, is_quoted: bool
    ) -> None:
        found = Watched(waiting(message), "a/gpu-0-mig-1g10gb-6").after(SECOND)
        assert [f"{message.rstrip('.')}; gpu-0" in each.sentence for each in found] == [True] * is_quoted

    def test_an_incomplete_pool_is_named_with_what_is_missing(self) -> None:
        watched = Watched(waiting(), "a/gpu-0-mig-1g10gb-6")
        watched.silent = {"a": "publishes a pool that is incomplete"}
        [reason] = watched.after(SECOND)
        assert reason.code is ReasonCode.NOT_PUBLISHED
        assert "takes nothing from node a, which publishes a pool that is incomplete" in reason.sentence

    def test_of_two_nodes_the_one_with_a_complete_pool_is_named(self) -> None:
        watched = Watched(waiting(), "a/gpu-0-mig-1g10gb-6", "b/gpu-0-mig-1g10gb-6")
        watched.silent = {"a": "publishes a pool that is incomplete"}
        assert "of node b" in watched.told()

    def test_nodes_that_publish_nothing_are_named_after_a_moment(self) -> None:
        watched = Watched(waiting())
        watched.silent = dict.fromkeys("ab", "publishes no device")
        assert watched.after(SECOND) == []
        [reason] = watched.after(5 * SECOND)
        assert reason.code is ReasonCode.NOT_PUBLISHED
        assert "enough is free only on a, which publishes no device, b, which publishes no device" in reason.sentence

    def test_a_node_that_does_not_offer_what_its_plan_requests_is_named_with_its_reason(self) -> None:
        watched = Watched(waiting())
        watched.silent = {"a": "publishes no device"}
        watched.refusing = {"b": "does not offer all that its plan requests: claim team/gone still has gpu-0"}
        [reason] = watched.after(6 * SECOND)
        assert reason.code is ReasonCode.NOT_PUBLISHED
        assert "b, which does not offer all that its plan requests: claim team/gone still has gpu-0" in reason.sentence

    def test_a_node_that_does_not_publish_an_offer_is_named_after_a_moment(self) -> None:
        watched = Watched(waiting(nodeSelector={"kubernetes.io/hostname": "a"}))
        watched.there.node("a", {"kubernetes.io/hostname": "a"})
        watched.unpublished = ("a/gpu-0-mig-1g10gb-6",)
        assert watched.after(SECOND) == []
        [reason] = watched.after(2 * SECOND)
        assert reason.code is ReasonCode.NOT_PUBLISHED
        late = "enough is free only on a, which has not published what its plan offers since 2026-11-21T00:16:41Z"
        assert f"{late}; does its node plugin run?" in reason.sentence
        watched.unpublished = ()
        assert watched.after(SECOND) == []

    def test_a_silent_node_is_no_reason_while_another_would_do(self) -> None:
        watched = Watched(waiting())
        watched.silent = {"a": "publishes no device"}
        assert watched.after(6 * SECOND) == []

    def test_a_selector_that_fails_on_other_devices_is_explained(self) -> None:
        there = Situation([*node_of("a", facts={"nvlink_clique": "0"}), *node_of("b", product="NVIDIA L40S")])
        selector = selected_by('type == "gpu"', 'nvlinkClique != ""')
        message = f"{FAILS.rpartition(': ')[0]}: nvlinkClique"
        there.wants(request(selector=selector), status=refused(message))
        watched = Watched(there, "a/gpu-0")
        watched.clock.advance(2 * SECOND)
        [found] = watched.reasons()
        assert found.code is ReasonCode.UNUSED
        assert "its selector fails on devices like gpu-0 of NVIDIA L40S" in found.sentence
        assert '.?nvlinkClique.orValue("") does not fail' in found.sentence

    @pytest.mark.parametrize("message", [NO_CPU, AFFINITY, FAILS])
    def test_what_the_scheduler_misses_besides_devices_is_quoted_at_once(self, message: str) -> None:
        [reason] = Watched(waiting(message), "a/gpu-0-mig-1g10gb-6").after(SECOND)
        assert reason.code is ReasonCode.UNUSED
        assert reason.sentence.startswith(f"the scheduler reports on pod pod-of-claim: {message.rstrip('.')}; gpu-0")

    @pytest.mark.parametrize(
        ("selector", "tolerations", "tainted"),
        [
            pytest.param({}, [], True, id="all devices"),
            pytest.param({"device": "gpu-0-mig-1g10gb-6", "pool": f"a-{DRIVER}"}, [], True, id="this device"),
            pytest.param({"driver": "nic.example.com"}, [], False, id="another driver"),
            pytest.param({"driver": DRIVER}, [{"operator": "Exists"}], False, id="tolerated"),
            pytest.param(None, [], False, id="none"),
        ],
    )
    def test_the_rule_that_taints_the_device_is_named(
        self, selector: dict[str, str] | None, tolerations: list[Any], *, tainted: bool
    ) -> None:
        there = Situation(node_of("a"))
        there.wants(request(selector=SMALL, tolerations=tolerations), status=refused(SAYS_NO))
        there.taint_rule("maintenance", selector, key="repair", effect="NoSchedule")
        found = Watched(there, "a/gpu-0-mig-1g10gb-6").after(SECOND)
        assert [each.code for each in found] == ([ReasonCode.TAINTED] if tainted else [])
        assert all("the DeviceTaintRule maintenance taints gpu-0-mig-1g10gb-6" in each.sentence for each in found)

    def test_a_toleration_of_one_request_does_not_count_for_another(self) -> None:
        there = Situation(node_of("a"))
        there.wants(
            request(name="tolerant", selector=FULL, tolerations=[{"operator": "Exists"}]),
            request(name="other", selector=FULL),
            status=refused(SAYS_NO),
        )
        there.taint_rule("maintenance", {}, key="repair", effect="NoSchedule")
        [reason] = Watched(there, "a/gpu-0", "a/gpu-1").after(SECOND)
        assert reason.code is ReasonCode.TAINTED
        assert "taints gpu-1 with repair:NoSchedule, which request other does not tolerate" in reason.sentence

    def test_a_request_for_all_devices_that_the_scheduler_refuses_is_advised_to_ask_for_a_number(self) -> None:
        there = Situation(node_of("a"))
        there.wants(request(selector=SMALL, allocationMode="All"), status=refused(SAYS_NO))
        watched = Watched(there, "a/gpu-0-mig-1g10gb-6")
        assert watched.after(SECOND) == []
        [reason] = watched.after(SECOND)
        assert reason.code is ReasonCode.UNUSED
        assert "ask for a number of devices instead" in reason.sentence
        assert SAYS_NO in reason.sentence

    def test_a_pod_without_a_claim_yet_is_told_itself(self) -> None:
        there = Situation(node_of("a"))
        there.device_class("gpu-training", FULL, extendedResourceName="nvidia.com/gpu")
        there.pod("old", containers=[{"resources": {"requests": {"nvidia.com/gpu": "1"}}}])
        [reason] = Watched(there, "a/gpu-0").after(MINUTE)
        assert (reason.pending.key, reason.pending.not_created) == ("Pod/default/old", True)


class TestWhatWouldDo:
    """Devices that stand, held against what a pod's claims ask for together."""

    def found(self, there: Situation, *names: str) -> list[str]:
        by_offer = {device.offer: (entry, device) for entry in there.gpus for device in entry.devices}
        standing = [OfferedDevice(*by_offer[offer], name) for offer, name in offers(there, *names).items()]
        queue = there.queue
        wishes = queue.combinations(there.pods[0])
        found = [satisfying(wish, standing, there.matching.value) for wish in wishes]
        return [each.name.device for each in next(filter(None, found), ())]

    def test_as_many_as_are_asked_for(self) -> None:
        there = Situation(node_of("a")).wants(request(selector=FULL, count=2))
        assert self.found(there, "a/gpu-0") == []
        assert self.found(there, "a/gpu-0", "a/gpu-1") == ["gpu-0", "gpu-1"]

    def test_not_the_same_memory_twice(self) -> None:
        there = Situation(node_of("a")).wants(request(name="one", selector=FULL), request(name="two", selector=SMALL))
        assert self.found(there, "a/gpu-0", "a/gpu-0-mig-1g10gb-6") == []
        assert self.found(there, "a/gpu-0", "a/gpu-1-mig-1g10gb-6") == ["gpu-0", "gpu-1-mig-1g10gb-6"]

    def test_the_first_choice_is_given_up_where_it_leaves_nothing_for_the_next_request(self) -> None:
        there = Situation(node_of("a", shares=4))
        there.wants(request(name="any", selector=f"({FULL}) || ({SMALL})"), request(name="full", selector=FULL))
        assert self.found(there, "a/gpu-0", "a/gpu-1-mig-1g10gb-6") == ["gpu-1-mig-1g10gb-6", "gpu-0"]

    @pytest.mark.parametrize(
        ("constraint", "expected"),
        [
            ("matchAttribute", ["gpu-0-share-0", "gpu-0-share-1"]),
            ("distinctAttribute", ["gpu-0-share-0", "gpu-1-share-0"]),
        ],
    )
    def test_with_attributes_that_agree_or_differ(self, constraint: str, expected: list[str]) -> None:
        there = Situation(node_of("a", shares=4))
        rule = {constraint: f"{DRIVER}/parentUUID"}
        there.wants(request(selector=SHARE, count=2), constraints=[rule])
        names = ("a/gpu-0-share-0", "a/gpu-1-share-0", "a/gpu-0-share-1")
        assert sorted(self.found(there, *names)) == expected
        assert self.found(there, *(names[:2] if constraint == "matchAttribute" else names[::2])) == []

    def test_the_claims_of_one_pod_are_met_together(self) -> None:
        there = Situation(node_of("a"))
        there.pod("pod", *(there.claim(f"claim-{n}", request(selector=FULL)) for n in range(2)))
        assert self.found(there, "a/gpu-0") == []
        assert self.found(there, "a/gpu-0", "a/gpu-1") == ["gpu-0", "gpu-1"]

    def test_of_a_request_for_all_devices_nobody_knows(self) -> None:
        there = Situation(node_of("a")).wants(request(selector=FULL, allocationMode="All"))
        assert self.found(there, "a/gpu-0", "a/gpu-1") == []

    def test_a_hopeless_search_ends(self) -> None:
        there = Situation(node_of("a", gpus=8)).wants(
            request(name="many", selector=SMALL, count=30), request(name="full", selector=FULL)
        )
        names = [
            f"a/{d.name}" for entry in there.gpus for d in entry.devices if d.profile and d.profile.name == "1g.10gb"
        ]
        assert self.found(there, *names) == []


class TestPools:
    def test_a_pool_with_all_slices_of_its_newest_generation_is_complete(self) -> None:
        assert incomplete_pools([PoolPart("a", 2, 2), PoolPart("a", 1, 5), PoolPart("a", 2, 2)]) == {}

    @pytest.mark.parametrize("parts", [[(1, 2), (1, 2), (2, 2)], [(2, 2), (1, 2), (1, 2)]])
    def test_slices_of_older_generations_do_not_count(self, parts: list[tuple[int, int]]) -> None:
        found = incomplete_pools(PoolPart("a", *part) for part in parts)
        assert found == {"a": "is incomplete: it has 1 of the 2 slices of its generation 2"}
