"""Sums, idle claims, costs and how they are shown."""

from __future__ import annotations

import csv
import io
import json

import click
import pytest

from tessera.usage.output import Style, as_csv, as_json, as_table, headline, number
from tessera.usage.prices import Prices
from tessera.usage.report import GpuOfNode, GpuSlices, Reading, Report, Row, UsageRecord, summarize
from tests.support.usage_pages import A100, GIB, H100, L4

DAY = 86400.0
FIRST, SECOND, THIRD = GpuOfNode("n", "gpu-0"), GpuOfNode("n", "gpu-1"), GpuOfNode("n", "gpu-2")
GPUS = {FIRST: GpuSlices(H100, 8), SECOND: GpuSlices(A100, 8), THIRD: GpuSlices(L4, 1)}
REASONS = {SECOND: "no activity counters on NVIDIA A100"}
PRICES = Prices.model_validate(
    {
        "currency": "EUR",
        "prices": [{"product": A100, "perGpuHour": 1.6}, {"product": "NVIDIA H100*", "perGpuHour": 2.4}],
    }
)
LIVE, PERIOD = Style(("namespace",), None, "24 h", None), Style(("namespace",), None, "24 h", "30 days")
COST = Style(("namespace",), "EUR", "24 h", "30 days")


def report(*devices: UsageRecord, prices: Prices | None = None, seconds: float | None = None) -> Report:
    reading = Reading(devices, GPUS, REASONS, 17, (), seconds)
    return summarize(reading, lambda device: (device.namespace,), prices, DAY)


def row_of(found: Report, namespace: str) -> Row:
    return next(row for row in found.rows if row.key == (namespace,))


def test_the_headline_has_allocated_used_and_idle_claims() -> None:
    found = report(
        UsageRecord(FIRST, 8, 4, "a", "1", idle_seconds=2 * DAY), UsageRecord(THIRD, 1, 0.5, "b", "2", idle_seconds=5)
    )
    assert headline(found, LIVE) == "allocated 9 of 17 slices, used 4.5 (50 %); idle 24 h: 1 claim"


def test_slices_without_known_activity_are_neither_used_nor_idle() -> None:
    found = report(UsageRecord(FIRST, 8, 4, "a"), UsageRecord(SECOND, 3, None, "a"), UsageRecord(THIRD, 1, None, "b"))
    lines = click.unstyle(as_table(found, PERIOD)).splitlines()
    assert lines[:3] == [
        "last 30 days: allocated 12 of 17 slice-hours, used 4 of 8 with known activity (50 %), idle 4",
        "activity unknown for 3 slice-hours: no activity counters on NVIDIA A100",
        "activity unknown for 1 slice-hour: no activity has been measured yet",
    ]
    assert [line.split() for line in lines[4:]] == [
        ["NAMESPACE", "ALLOCATED", "USED", "USED", "%", "IDLE", "UNKNOWN"],
        ["a", "11", "4", "50", "%", "4", "3"],
        ["b", "1", "-", "-", "-", "1"],
    ]


def test_what_nobody_knows_is_null_in_json_and_empty_in_csv() -> None:
    found = report(UsageRecord(SECOND, 3, None, "a", "c"), prices=PRICES)
    style = Style(("namespace",), "EUR", "24 h", None)
    [group] = json.loads(as_json(found, style))["groups"]
    unknown = {"used", "idle", "usedRatio", "idleClaims", "memoryUsedBytes", "memoryTotalBytes", "costUsed", "costIdle"}
    assert {name for name, value in group.items() if value is None} == unknown
    [line] = csv.DictReader(io.StringIO(as_csv(found, style)))
    assert {name for name, value in line.items() if value == ""} == unknown
    assert "used unknown" in headline(found, style)
    assert "idle 24 h: unknown" in headline(found, style)


def test_a_claim_is_idle_if_all_its_devices_are() -> None:
    busy = report(
        UsageRecord(FIRST, 8, 0, "a", "1", idle_seconds=2 * DAY), UsageRecord(THIRD, 1, 0, "a", "1", idle_seconds=1)
    )
    idle = report(
        UsageRecord(FIRST, 8, 0, "a", "1", idle_seconds=2 * DAY), UsageRecord(THIRD, 1, 0, "a", "1", idle_seconds=DAY)
    )
    unknown = report(UsageRecord(FIRST, 8, 0, "a", "1", idle_seconds=2 * DAY), UsageRecord(SECOND, 1, None, "a", "1"))
    assert [(each.total.claims, each.total.idle_claims) for each in (busy, idle, unknown)] == [
        (1, 0),
        (1, 1),
        (1, None),
    ]


def test_memory_is_of_the_devices_whose_memory_is_known() -> None:
    found = report(UsageRecord(FIRST, 8, 0, "a", memory=(GIB, 80 * GIB)), UsageRecord(SECOND, 8, 0, "a"))
    assert row_of(found, "a").memory == (GIB, 80 * GIB)
    assert "1.0/80.0 GiB" in as_table(found, LIVE)


def test_a_slice_costs_its_part_of_the_gpu() -> None:
    found = report(
        UsageRecord(FIRST, 16, 4, "a"), UsageRecord(SECOND, 8, None, "a"), UsageRecord(SECOND, 40, 10, "b"),
        prices=PRICES,
    )  # fmt: skip
    cost = row_of(found, "a").cost
    assert cost is not None
    assert (cost.allocated, cost.used, cost.idle, cost.unknown) == pytest.approx((6.4, 1.2, 3.6, 1.6))
    assert "cost 14.40 EUR (used 3.20, idle 9.60, unknown 1.60)" in headline(found, COST)


def test_products_without_a_price_are_named_and_not_free() -> None:
    gone = GpuOfNode("gone", "gpu-0")
    found = report(
        UsageRecord(FIRST, 8, 8, "a"), UsageRecord(THIRD, 2, 1, "a"), UsageRecord(THIRD, 3, 1, "b"),
        UsageRecord(gone, 1, 1, "b"), prices=PRICES,
    )  # fmt: skip
    assert found.unpriced == {L4: 5, "an unknown product": 1}
    assert (row_of(found, "a").unpriced, row_of(found, "b").unpriced) == (2, 4)
    assert row_of(found, "b").cost is None
    assert "no price for NVIDIA L4: 5 slice-hours not in the cost" in as_table(found, COST)


def test_csv_is_quoted_and_calculates_nothing() -> None:
    reading = Reading([UsageRecord(FIRST, 8, 4, name) for name in ("=1+1", "@x", 'a,"b"\n', "-2", "ok")], GPUS, {}, 8)
    text = as_csv(summarize(reading, lambda device: (device.namespace,), None, DAY), LIVE)
    keys = [line["namespace"] for line in csv.DictReader(io.StringIO(text, newline=""))]
    assert sorted(keys) == ["'-2", "'=1+1", "'@x", 'a,"b"\n', "ok"]
    assert text.startswith("namespace,allocated,used,idle,unknown,usedRatio,")
    assert '"a,""b""\n"' in text
    assert text.endswith("\r\n")


def test_an_empty_cluster_has_a_headline_and_no_table() -> None:
    assert as_table(report(), LIVE) == "allocated 0 of 17 slices, used 0; idle 24 h: 0 claims"


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "0"), (0.001, "<0.1"), (0.26, "0.3"), (54, "54"), (12345.6, "12,345.6")]
)
def test_small_amounts_are_not_shown_as_nothing(amount: float, text: str) -> None:
    assert number(amount) == text
