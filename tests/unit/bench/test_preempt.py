"""``make bench-preempt``: its simulated and its random parts, small, and how targets are judged."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from tests.bench.preempt import optimum
from tests.bench.preempt.mix import PRIORITIES, Mixture
from tests.bench.preempt.report import Measured, Results


def test_with_preemption_the_highest_priority_waits_less_and_every_pod_is_counted() -> None:
    without, with_it = (Mixture(100, 1, preempts=preempts).run() for preempts in (False, True))
    top = PRIORITIES - 1
    assert (without.evicted, with_it.evicted > 0) == (0, True)
    assert mean(with_it.waits[top]) < mean(without.waits[top])
    assert [len(with_it.waits[priority]) for priority in with_it.waits] == [
        len(without.waits[priority]) for priority in without.waits
    ]


def test_in_random_fleets_the_search_finds_the_best_of_all_sets(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    optimum.measure(20, 7, Results(output, 7))
    outcomes = json.loads(output.read_text())["optimum"]["outcomes"]
    assert outcomes.keys() <= {"equal, exact", optimum.NONE}
    assert outcomes["equal, exact"] == 20


@pytest.mark.parametrize(("value", "is_met"), [(1.0, True), (1.01, False)])
def test_a_figure_above_its_target_is_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float, is_met: bool
) -> None:
    results = Results(tmp_path / "results.json", 1)
    results.add("part", [Measured("time", value, "s", 1.0, None), Measured("free", 9.0, "s", None, 2.0)], {})
    assert results.show() is is_met
    assert ("misses the target" in capsys.readouterr().out) is not is_met
