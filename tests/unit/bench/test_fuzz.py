"""A sample of what ``make fuzz`` sends: hostile objects disturb neither reading nor deciding."""

from __future__ import annotations

import pytest

from tests.fuzz.run import fuzz


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_hostile_objects_are_read_or_left_out_and_decisions_go_on(seed: int) -> None:
    report = fuzz(3000, seed)
    assert report.failures == []
    assert report.objects >= 2990
    assert report.decisions
