"""What a claim has used adds up, once, and goes on after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.model.usage import Activity, UsageTotals
from kubelet_plugin.usage.totals_file import TotalsFile

START = UsageTotals(slices=2.0, counted_at=100.0, active_at=100.0)
KEY = ("uid-1", "gpu-0")


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_every_second_counts_once_however_often_and_in_whatever_order_it_is_counted(moments: list[float]) -> None:
    totals = START
    for moment in moments:
        totals = totals.counted(100.0 + moment)
    assert totals.allocated == pytest.approx(2.0 * max(moments))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 60)), max_size=20))
def test_no_more_is_used_than_was_measured_and_no_more_measured_than_was_allocated(
    samples: list[tuple[float, float, float]],
) -> None:
    totals, now = START, 100.0
    for sm, dram, seconds in samples:
        now += seconds
        totals = totals.counted(now).with_activity(Activity(seconds, sm=sm, dram=dram), now)
    assert (totals.used or 0.0) <= (totals.measured or 0.0) + 1e-6 <= totals.allocated + 2e-6


def test_use_is_the_larger_of_sm_and_memory_bandwidth_and_unknown_without_either() -> None:
    assert START.with_activity(Activity(10.0, sm=0.2, dram=0.6), 110.0).used == pytest.approx(2 * 10 * 0.6)
    assert START.with_activity(Activity(10.0, dram=0.6), 110.0).used == pytest.approx(2 * 10 * 0.6)
    assert START.with_activity(Activity(10.0, tensor=0.9), 110.0).used is None


def test_a_claim_is_idle_since_it_was_last_more_than_one_percent_active() -> None:
    assert START.with_activity(Activity(10.0, sm=0.01, dram=0.0), 110.0).active_at == 100.0
    assert START.with_activity(Activity(10.0, sm=0.0, dram=0.02), 110.0).active_at == 110.0


def test_totals_go_on_after_a_restart_and_do_not_count_the_time_of_a_reboot(tmp_path: Path) -> None:
    totals = START.counted(110.0).with_activity(Activity(10.0, sm=0.5), 110.0)
    TotalsFile(tmp_path, "boot-1").save({KEY: totals})
    assert TotalsFile(tmp_path, "boot-1").load(115.0) == {KEY: totals}
    assert TotalsFile(tmp_path, "boot-2").load(5.0)[KEY].counted(6.0).allocated == totals.allocated + 2.0


@pytest.mark.parametrize("content", [b"", b"{", b'{"boot": "boot-1", "claims": {"uid-1": 5}}', b"\xff"])
def test_a_damaged_file_costs_the_history_only(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "usage.json").write_bytes(content)
    file = TotalsFile(tmp_path, "boot-1")
    assert file.load(100.0) == {}
    file.save({KEY: START})
    assert file.load(100.0) == {KEY: START}


def test_a_file_that_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TotalsFile(tmp_path / "missing", "boot-1")
    file.save({KEY: START})
    file.save({KEY: START})
    assert [record.getMessage() for record in caplog.records] == ["usage totals are not saved"]
