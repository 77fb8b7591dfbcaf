"""Selectors take a limited processor time from the controller, each namespace's by themselves."""

from __future__ import annotations

import time
from functools import partial

import msgspec
import pytest

from controller.demand import selected_devices
from controller.demand.feasibility import Matching
from controller.demand.namespace_selector_time import (
    BUDGET_SECONDS,
    EXHAUSTED,
    REFILL_PER_SECOND,
    RETRY_SECONDS,
    BudgetExhausted,
    SelectorTime,
)
from driver.errors import CelError
from driver.kube.types import Claim
from tests.support.clock import FakeClock
from tests.support.queues import DRIVER, Situation, node_of, profile, request
from tests.support.reasons import reasons_of

NUMBERS = "[1,2,3,4,5,6,7,8,9,10]"
OWN = f'device.attributes["{DRIVER}"].uuid != ""'


def test_what_is_used_up_comes_back_with_time_and_what_was_refused_is_tried_again() -> None:
    clock, processor = FakeClock(), [0.0]
    budget = SelectorTime(BUDGET_SECONDS, clock.monotonic, lambda: processor[0])

    def evaluate() -> str:
        processor[0] += BUDGET_SECONDS
        return "evaluated"

    assert budget.spend(evaluate) == "evaluated"
    assert not budget.retry()
    with pytest.raises(BudgetExhausted):
        budget.spend(evaluate)
    assert not budget.retry()
    clock.advance(max(RETRY_SECONDS, 1 / REFILL_PER_SECOND))
    assert budget.retry()
    assert not budget.retry()
    assert budget.spend(evaluate) == "evaluated"


def hostile(situation: Situation, kind: str) -> None:
    """A claim of namespace ``team`` with 1,024 selectors that are long, or expensive to evaluate."""

    def expression(number: int) -> str:
        if kind == "long":
            return f"{OWN} && " + " && ".join(f'"{number}-{n}" != ""' for n in range(50))
        return f"{OWN} && " + f"{NUMBERS}.all(a, " * 3 + f"{number} >= 0" + ")" * 3

    requests = []
    for at in range(32):
        cel = [{"cel": {"expression": expression(32 * at + n)}} for n in range(32)]
        requests.append({"name": f"r{at}", "exactly": {"deviceClassName": "any", "selectors": cel}})
    spec = {"devices": {"requests": requests}}
    metadata = {"name": "hostile", "namespace": "team", "uid": "hostile"}
    situation.claims.append(msgspec.convert({"metadata": metadata, "spec": spec}, Claim))
    situation.pod("hostile", "hostile", metadata={"namespace": "team"})


@pytest.mark.parametrize("kind", ["long", "expensive"])
def test_a_claim_with_a_thousand_selectors_takes_no_more_than_its_namespace_has(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected_devices, "BUDGET_SECONDS", 0.2)
    situation = Situation(node_of("a", gpus=8), matching=Matching(DRIVER))
    hostile(situation, kind)
    situation.wants(request(selector=profile("1g.10gb")), name="small")
    began = time.thread_time()
    queue = situation.queue
    reasons = {reason.pending.key: reason for reason in reasons_of(queue)}
    took = time.thread_time() - began
    assert took < BUDGET_SECONDS, "a fraction of what all of them take"
    assert EXHAUSTED in reasons["team/hostile"].sentence
    assert queue.satisfiable(situation.waiting("small"))
    assert "default/small" not in reasons


def test_a_namespace_that_has_used_up_its_time_is_read_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, processor = FakeClock(), [0.0]
    times: list[SelectorTime] = []

    def made(budget: float) -> SelectorTime:
        times.append(SelectorTime(budget, clock.monotonic, lambda: processor[0]))
        return times[-1]

    monkeypatch.setattr(selected_devices, "SelectorTime", made)
    there = Matching(DRIVER)
    assert not isinstance(there.selector((profile("1g.10gb"),), namespace="team"), CelError)
    times[0].spend(lambda: processor.__setitem__(0, BUDGET_SECONDS))
    assert isinstance(there.selector((profile("2g.20gb"),), namespace="team"), CelError)
    assert not isinstance(there.selector((profile("1g.10gb"),), namespace="team"), CelError), "it is remembered"
    assert not isinstance(there.selector((profile("2g.20gb"),), namespace="other"), CelError)
    assert not isinstance(there.selector((profile("2g.20gb"),)), CelError), "a class's own"
    clock.advance(RETRY_SECONDS)
    assert not isinstance(there.selector((profile("2g.20gb"),), namespace="team"), CelError)


def test_namespaces_that_used_little_time_are_forgotten_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, processor = FakeClock(), [0.0]
    made = partial(SelectorTime, clock=clock.monotonic, processor_time=lambda: processor[0])
    monkeypatch.setattr(selected_devices, "SelectorTime", made)
    monkeypatch.setattr(selected_devices, "MAX_NAMESPACES", 3)
    there = Matching(DRIVER)

    def asks(namespace: str, name: str = "1g.10gb") -> object:
        return there.selector((profile(name),), namespace=namespace)

    asks("greedy")
    there.namespaces["greedy"].time.spend(lambda: processor.__setitem__(0, BUDGET_SECONDS))
    for number in range(10):
        asks(f"job-{number}")
    assert len(there.namespaces) == 3
    assert isinstance(asks("greedy", "2g.20gb"), CelError), "its budget is not renewed"
