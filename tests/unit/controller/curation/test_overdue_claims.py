"""Claims that the scheduler goes on refusing though free devices would do: who gets wider offers, where, how long."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import msgspec
import pytest

from controller.curation.overdue_claims import (
    BURST_SECONDS,
    MAX_CLAIMS,
    MAX_DEFERRAL_SECONDS,
    MAX_NODES,
    OVERDUE_AFTER_SECONDS,
    PAUSE_SECONDS,
    TURN_SECONDS,
    WIDE_SECONDS,
    OverdueClaims,
)
from controller.demand.demand import demand_of
from driver.kube.types import Pod
from driver.model.offer import FULL as FULL_KEY
from tests.support.clock import FakeClock
from tests.support.queues import FULL, Situation, node_of, profile, request

REFUSED = "0/3 nodes are available: 2 cannot allocate all claims, 1 node(s) had untolerated taint(s)."
NO_CPU = "0/3 nodes are available: 3 Insufficient cpu."


def refused(message: str = REFUSED) -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]}


def waiting(message: str = REFUSED, selector: str = FULL, **pod: Any) -> Situation:
    there = Situation([*node_of("a"), *node_of("b")])
    return there.wants(request(selector=selector), status=refused(message), **pod)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def patience(clock: FakeClock) -> OverdueClaims:
    return OverdueClaims(clock.monotonic)


def test_a_claim_that_is_refused_for_long_gets_everything_that_would_do(
    patience: OverdueClaims, clock: FakeClock
) -> None:
    there = waiting()
    assert patience.widened(there.queue) == {}
    clock.advance(OVERDUE_AFTER_SECONDS)
    widened = patience.widened(there.queue)
    assert widened == {"default/claim": {"a", "b"}}
    assert any(each.all_devices and each.kind == FULL_KEY for each in demand_of(there.queue, widened))


def test_nodes_where_its_pod_may_run_come_first_and_the_others_later(patience: OverdueClaims, clock: FakeClock) -> None:
    there = waiting(nodeSelector={"pool": "training"})
    there.node("a", {"pool": "training"})
    patience.widened(there.queue)
    clock.advance(OVERDUE_AFTER_SECONDS)
    assert patience.widened(there.queue) == {"default/claim": {"a"}}
    clock.advance(TURN_SECONDS)
    assert patience.widened(there.queue) == {"default/claim": {"b"}}


@pytest.mark.parametrize(
    "there",
    [
        pytest.param(waiting(NO_CPU), id="other resources are what is missing"),
        pytest.param(waiting(selector=profile("9g.99gb")), id="nothing could satisfy it"),
        pytest.param(waiting(""), id="the scheduler has not looked yet"),
    ],
)
def test_nobody_gets_wider_offers_that_could_not_help(
    patience: OverdueClaims, clock: FakeClock, there: Situation
) -> None:
    for _ in range(10):
        assert patience.widened(there.queue) == {}
        clock.advance(1)


def test_where_wider_offers_do_not_help_they_end_and_the_next_try_is_later(
    patience: OverdueClaims, clock: FakeClock
) -> None:
    there = waiting()
    patience.widened(there.queue)
    wide = []
    for _ in range(int(OVERDUE_AFTER_SECONDS + WIDE_SECONDS + PAUSE_SECONDS + WIDE_SECONDS + 2 * PAUSE_SECONDS)):
        clock.advance(1)
        wide.append("w" if patience.widened(there.queue) else "-")
    lengths = [(mark, len(list(marks))) for mark, marks in groupby(wide)]
    assert lengths[1:4] == [("w", WIDE_SECONDS), ("-", PAUSE_SECONDS), ("w", WIDE_SECONDS)]
    assert lengths[4][1] >= 2 * PAUSE_SECONDS - OVERDUE_AFTER_SECONDS


def test_while_others_of_its_burst_are_served_nobody_loses_patience(patience: OverdueClaims, clock: FakeClock) -> None:
    there = waiting()
    for number in range(5):
        there.wants(request(selector=profile("1g.10gb")), name=f"other-{number}", status=refused(""))
    for _ in range(4):
        assert patience.widened(there.queue) == {}
        clock.advance(OVERDUE_AFTER_SECONDS - 0.5)
        there.pods.pop()
    assert patience.widened(there.queue) == {}
    clock.advance(OVERDUE_AFTER_SECONDS)
    assert patience.widened(there.queue)


def test_a_claim_that_later_ones_overtake_gets_wider_offers_while_they_are_served(
    patience: OverdueClaims, clock: FakeClock
) -> None:
    there = waiting()
    assert patience.widened(there.queue) == {}
    for number in range(int(BURST_SECONDS + OVERDUE_AFTER_SECONDS) + 1):
        clock.advance(1)
        there.wants(request(selector=FULL), name=f"later-{number}", status=refused())
        patience.widened(there.queue)
        there.pods.pop()
    assert "default/claim" in patience.widened(there.queue)


def test_others_that_are_served_put_off_nobody_for_long(patience: OverdueClaims, clock: FakeClock) -> None:
    there = waiting()
    for number in range(20):
        there.wants(request(selector=FULL), name=f"other-{number}", status=refused())
    widened = []
    for _ in range(15):
        clock.advance(OVERDUE_AFTER_SECONDS - 0.5)
        there.pods.pop()
        widened.append(bool(patience.widened(there.queue)))
    assert widened.index(True) <= (MAX_DEFERRAL_SECONDS + OVERDUE_AFTER_SECONDS) / (OVERDUE_AFTER_SECONDS - 0.5) + 1


def test_claims_that_ask_for_the_same_keep_no_others_from_their_turn(patience: OverdueClaims, clock: FakeClock) -> None:
    there = waiting()
    for number in range(2 * MAX_CLAIMS):
        there.wants(request(selector=FULL), name=f"alike-{number}", status=refused())
    there.wants(request(selector=profile("1g.10gb")), name="small", status=refused())
    patience.widened(there.queue)
    clock.advance(OVERDUE_AFTER_SECONDS)
    assert "default/small" in patience.widened(there.queue)


def test_of_many_nodes_only_some_at_a_time_offer_everything_and_all_in_turn(
    patience: OverdueClaims, clock: FakeClock
) -> None:
    names = {f"n{number}" for number in range(3 * MAX_NODES)}
    there = Situation([gpu for name in names for gpu in node_of(name, gpus=1)])
    there.wants(request(selector=FULL), status=refused())
    queue = there.queue
    patience.widened(queue)
    clock.advance(OVERDUE_AFTER_SECONDS)
    turns = []
    for _ in range(3):
        turns.append(patience.widened(queue)["default/claim"])
        clock.advance(TURN_SECONDS)
    assert [len(turn) for turn in turns] == [MAX_NODES] * 3
    assert frozenset().union(*turns) == names


def test_what_the_scheduler_says_of_a_pod_is_read() -> None:
    pod = msgspec.convert({"metadata": {"name": "pod"}, "status": refused()}, Pod)
    assert pod.status.conditions[0].message == REFUSED
