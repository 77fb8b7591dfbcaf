"""The allocator gives the answers that the real scheduler gave (`make conformance-allocator`)."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tessera.simulate.allocatable_devices import FailureKind
from tests.conformance.allocator import answers
from tests.conformance.allocator.judge import WAVE, our_answers

KEPT = answers.read()
OFTEN = 8
"""One of so many scenarios is tried by `make test-fast`."""


def wrong(numbers: Collection[int]) -> set[int]:
    """Those of the scenarios for which Tessera's allocator answers otherwise."""
    waves = (range(start, start + WAVE) for start in range(0, max(KEPT), WAVE))
    numbers = KEPT.keys() & numbers
    return {number for wave in waves for number, answer in our_answers(wave, numbers) if answer != KEPT[number]}


def test_the_kept_answers_are_of_every_kind() -> None:
    kinds = {answer if ":" not in answer else "allocated" for answer in KEPT.values()}
    assert kinds >= {"allocated", "none", *FailureKind} - {
        FailureKind.TOO_LONG,
        FailureKind.UNKNOWN_KIND,
    }
    text = "\n".join(KEPT.values())
    for part in (" share", " admin", "/s1 ", "1: ", "2: ", "memory=", "all nodes", "In"):
        assert part in text, part


@pytest.mark.long
def test_a_part_of_the_scenarios_has_the_answers_of_the_scheduler() -> None:
    assert not wrong(range(3, max(KEPT), OFTEN))


@pytest.mark.slow
def test_all_scenarios_have_the_answers_of_the_scheduler() -> None:
    assert not wrong(KEPT.keys())
