"""What the soak calls a leak: each kind of leak is found and named, and noise is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from random import Random
from typing import Any

import pytest

from tests.soak.census import Census, Things
from tests.soak.life import Tally
from tests.soak.mix import FULL, SHARE, WISHES, draw
from tests.soak.run import NOTHING, Plan, Report
from tests.soak.verdict import findings, growth

PLAN = Plan(duration_s=600, rate=200, kills=0, seed=1)
WARM_S = 60.0
BUSY = Things(partitions=10, specs=10, records=10, claims=12, pods=12)


def calm(number: int, **changes: Any) -> Census:
    """What is counted, ten seconds after the last count, while all is well."""
    usual = Census(10.0 * number, 12, BUSY, pid=100, rss_mib=80 + number % 2, threads=20, fds=20, slices=5, events=0)
    return replace(usual, **changes)


def leaks(taken: Sequence[Census], left: Things = NOTHING, served: int = 2000) -> list[str]:
    return [each.name for each in findings(taken, left, WARM_S, served) if each.leaks]


def test_nothing_is_said_of_a_process_that_stays_as_it_is() -> None:
    assert leaks([calm(n) for n in range(60)]) == []


def test_memory_that_grows_with_every_claim_is_a_leak() -> None:
    assert leaks([calm(n, rss_mib=80 + n / 8) for n in range(60)]) == ["memory growth, MiB"]


def test_memory_that_grows_at_the_start_alone_is_none() -> None:
    assert leaks([calm(n, rss_mib=min(80 + n * 4, 100)) for n in range(60)]) == []


def test_threads_and_descriptors_that_become_more_are_leaks() -> None:
    taken = [calm(n, threads=20 + n // 2, fds=20 + n // 3) for n in range(60)]
    assert leaks(taken) == ["thread growth", "descriptor growth"]


def test_a_leak_shows_though_the_process_was_killed_meanwhile() -> None:
    first = [calm(n, rss_mib=80 + n) for n in range(5)]
    second = [calm(n, pid=200, rss_mib=70 + (n - 5) / 8) for n in range(5, 60)]
    assert leaks([*first, *second]) == ["memory growth, MiB"]


def test_the_difference_between_two_processes_is_no_growth() -> None:
    assert leaks([*(calm(n) for n in range(30)), *(calm(n, pid=200, rss_mib=95) for n in range(30, 60))]) == []


def test_a_process_that_lived_too_short_is_not_judged() -> None:
    assert growth([calm(n, rss_mib=80 + 10 * n) for n in range(8)], WARM_S, lambda census: census.rss_mib) == 0


@pytest.mark.parametrize("kind", [each.name for each in fields(Things)])
def test_whatever_is_left_at_the_end_is_a_leak(kind: str) -> None:
    assert leaks([calm(n) for n in range(60)], replace(NOTHING, **{kind: 1})) == [f"{kind} left at the end"]


def test_more_than_the_claims_explain_is_a_leak_even_if_it_goes_later() -> None:
    odd = replace(BUSY, records=13, specs=13, partitions=25)
    taken = [calm(n) if n != 30 else calm(n, things=odd) for n in range(60)]
    assert leaks(taken) == ["records without a claim", "CDI specs without a claim", "partitions without a claim"]


def test_slices_and_events_that_become_more_are_leaks() -> None:
    taken = [*(calm(n) for n in range(59)), calm(59, slices=6, events=2001)]
    assert leaks(taken) == ["slice growth", "Events of ours"]


def test_a_soak_without_a_census_has_nothing_to_say() -> None:
    assert leaks([]) == []


def test_claims_that_failed_and_memory_that_was_given_twice_are_problems() -> None:
    report = Report(PLAN, Tally(failures=["soak-1: no answer"]), [calm(n) for n in range(60)], wrong=["an overlap"])
    assert report.problems == ["soak-1: no answer", "an overlap"]


def test_the_same_seed_draws_the_same_claims_and_all_kinds_come() -> None:
    fates = [draw(Random(seed)) for seed in range(500)]
    assert fates == [draw(Random(seed)) for seed in range(500)]
    assert {fate.wish for fate in fates} == set(WISHES)
    assert {FULL, SHARE} <= {device_class for wish in WISHES for device_class, _ in wish.requests}
    assert {fate.prepares for fate in fates} == {fate.unprepares for fate in fates} == {1, 2}
