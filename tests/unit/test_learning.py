"""Class weights that follow what claims ask for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from controller.learning import CLEARLY, PAUSE_S, Learner, Learnt, Popularity, classes_of, differ
from driver.kube.clock import seconds_time
from driver.placement import EQUAL, Weights
from tests.support.clock import FakeClock
from tests.support.queues import FULL, OURS, Situation, first_available, node_of, profile, request, selected_by

HOUR_S = 3600.0
SMALL = profile("1g.10gb")


def ratio(weights: Weights, name: str) -> float:
    """What a class counts against one that nobody ever asked for."""
    return weights[name] / weights.default


def situation(gpus: int = 2, **more: Any) -> Situation:
    return Situation(node_of("a", gpus=gpus, facts={"nvlink_clique": "0"}, **more))


def asked(there: Situation, name: str = "claim") -> dict[str, float]:
    [claim] = [each for each in there.claims if each.metadata.name == name]
    return dict(classes_of(there.queue, claim))


class TestWhatAClaimAsksFor:
    @pytest.mark.parametrize(
        ("selector", "count", "expected"),
        [
            pytest.param(SMALL, 1, {"1g.10gb": 1 / 8}, id="one partition of one memory slice of eight"),
            pytest.param(SMALL, 3, {"1g.10gb": 3 / 8}, id="every device counts"),
            pytest.param(FULL, 2, {"full": 2.0}, id="two of the four GPUs that NVLink joins"),
            pytest.param(FULL, 4, {"clique": 4.0}, id="all GPUs that NVLink joins"),
            pytest.param(profile("9g.99gb"), 1, {}, id="nothing that there is"),
        ],
    )
    def test_it_is_counted_by_class(self, selector: str, count: int, expected: dict[str, float]) -> None:
        assert asked(situation(gpus=4).wants(request(selector=selector, count=count))) == expected

    def test_a_share_is_a_class_of_its_own(self) -> None:
        assert asked(situation(shares=4).wants(request(selector=selected_by('type == "share"')))) == {"share": 1 / 4}

    def test_a_single_gpu_is_no_clique(self) -> None:
        assert asked(situation(gpus=1).wants(request(selector=FULL))) == {"full": 1.0}

    def test_where_several_classes_would_do_each_gets_a_part(self) -> None:
        found = asked(situation().wants(request(selector=OURS)))
        assert {"1g.10gb", "3g.40gb"} < found.keys()
        assert found["full"] == found["7g.80gb"] == 1 / len(found)
        assert found["1g.10gb"] == 1 / 8 / len(found)

    def test_of_alternatives_the_first_counts(self) -> None:
        assert asked(situation().wants(first_available(("best", FULL), ("else", SMALL)))) == {"full": 1.0}

    def test_another_drivers_claim_counts_nothing(self) -> None:
        there = situation()
        there.device_class("nic", 'device.driver == "nic.example.com"')
        assert asked(there.wants(request("nic"))) == {}


class TestWeights:
    def test_before_anything_was_asked_for_all_classes_count_the_same(self) -> None:
        weights = Popularity(HOUR_S, FakeClock()).weights()
        assert ratio(weights, "full") == ratio(weights, "1g.10gb") == 1.0

    def test_a_class_counts_more_the_more_was_asked_for_in_it(self) -> None:
        seen = Popularity(HOUR_S, FakeClock())
        seen.add({"1g.10gb": 300, "full": 100})
        weights = seen.weights()
        assert ratio(weights, "1g.10gb") > ratio(weights, "full") > ratio(weights, "2g.20gb") == 1.0

    def test_a_class_that_nobody_asks_for_keeps_a_part_however_much_of_others_is(self) -> None:
        seen = Popularity(HOUR_S, FakeClock())
        seen.add({"1g.10gb": 1_000_000})
        assert ratio(seen.weights(), "1g.10gb") < 60

    def test_a_few_claims_change_little(self) -> None:
        seen = Popularity(HOUR_S, FakeClock())
        seen.add({"1g.10gb": 1})
        assert not differ(EQUAL, seen.weights())

    def test_what_was_asked_for_a_half_life_ago_counts_half(self) -> None:
        clock = FakeClock()
        past, present = Popularity(HOUR_S, clock), Popularity(HOUR_S, clock)
        past.add({"full": 100})
        clock.advance(HOUR_S)
        present.add({"full": 50})
        assert past.weights()["full"] == pytest.approx(present.weights()["full"])

    def test_it_is_the_same_whether_a_claim_was_seen_then_or_is_found_now(self) -> None:
        clock = FakeClock()
        then, now = Popularity(HOUR_S, clock), Popularity(HOUR_S, clock)
        then.add({"full": 100})
        clock.advance(2000)
        now.add({"full": 100}, age_s=2000)
        assert then.weights()["full"] == pytest.approx(now.weights()["full"])

    def test_old_habits_are_forgotten(self) -> None:
        clock = FakeClock()
        seen = Popularity(HOUR_S, clock)
        seen.add({"full": 100})
        clock.advance(20 * HOUR_S)
        assert not differ(EQUAL, seen.weights())

    def test_a_claim_from_the_future_is_one_of_now(self) -> None:
        seen = Popularity(HOUR_S, FakeClock())
        seen.add({"full": 1}, age_s=-100)
        assert seen.weights()["full"] - seen.weights().default == pytest.approx(1)


class TestHowOftenWeightsChange:
    def test_not_twice_within_the_pause(self) -> None:
        clock = FakeClock()
        seen = Popularity(100 * HOUR_S, clock)
        learnt = Learnt(seen, clock)
        seen.add({"full": 100})
        assert learnt.renew()
        before = learnt.weights
        seen.add({"1g.10gb": 10_000})
        clock.advance(PAUSE_S - 1)
        assert not learnt.renew()
        assert learnt.weights is before
        clock.advance(1)
        assert learnt.renew()
        assert ratio(learnt.weights, "1g.10gb") > ratio(learnt.weights, "full")

    def test_not_while_they_hold_more_or_less(self) -> None:
        clock = FakeClock()
        seen = Popularity(100 * HOUR_S, clock)
        learnt = Learnt(seen, clock)
        seen.add({"full": 100})
        assert learnt.renew()
        before = learnt.weights
        seen.add({"full": 20})
        clock.advance(PAUSE_S)
        assert not learnt.renew()
        assert learnt.weights is before

    def test_differing_counts_in_both_directions(self) -> None:
        more = Weights({"full": CLEARLY})
        assert differ(EQUAL, more)
        assert differ(more, EQUAL)
        assert not differ(more, more)
        assert not differ(EQUAL, Weights({"full": 7.0}, default=7.0))


class TestLearningFromTheCluster:
    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    def claims(self, there: Situation, count: int, selector: str, prefix: str) -> None:
        for number in range(count):
            there.wants(request(selector=selector), name=f"{prefix}-{number}")

    def test_claims_that_wait_change_the_weights(self, clock: FakeClock) -> None:
        there, learner = situation(), Learner(6.0, clock)
        self.claims(there, 40, SMALL, "small")
        assert learner.learn(there.queue)
        assert ratio(learner.weights, "1g.10gb") > 1.5

    def test_a_claim_counts_once_however_often_it_is_seen(self, clock: FakeClock) -> None:
        there, learner = situation(), Learner(1000.0, clock)
        self.claims(there, 40, SMALL, "small")
        assert learner.learn(there.queue)
        for _ in range(5):
            clock.advance(PAUSE_S)
            assert not learner.learn(there.queue)

    def test_a_claim_without_a_pod_asks_for_nothing_until_one_comes(self, clock: FakeClock) -> None:
        there, learner = situation(), Learner(6.0, clock)
        names = [there.claim(f"idle-{number}", request(selector=SMALL)) for number in range(40)]
        assert not learner.learn(there.queue)
        there.pod("pod", *names)
        clock.advance(PAUSE_S)
        assert learner.learn(there.queue)

    @pytest.mark.parametrize(("age", "counts"), [(timedelta(minutes=5), True), (timedelta(days=5), False)])
    def test_after_a_restart_claims_count_by_their_age(self, clock: FakeClock, age: timedelta, counts: bool) -> None:
        there, learner = situation(), Learner(6.0, clock)
        created = {"creationTimestamp": seconds_time(clock.now() - age)}
        for number in range(40):
            name = there.claim(f"held-{number}", request(selector=SMALL), metadata=created, status={"allocation": {}})
            assert name
        assert learner.learn(there.queue) is counts
