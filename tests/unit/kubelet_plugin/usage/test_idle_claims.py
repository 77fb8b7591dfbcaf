"""Which prepared claims the status of a plan calls idle, and since when."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from driver.model.offer import DeviceKind
from driver.model.plan import IDLE_REPORT_SECONDS, MOST_IDLE, PlanStatus
from driver.model.usage import UsageTotals
from driver.simulator.state.gpu_load import SimulatedActivity, duty
from kubelet_plugin.checkpoint.records import ClaimRecord, DeviceRecord
from kubelet_plugin.usage.sampler import IdleClaims, MeasuredDevice
from tests.support.clock import FakeClock
from tests.unit.kubelet_plugin.usage.test_sampler import INTERVAL, NEXT, SMALL, WHOLE, Node, busy

MIDNIGHT = 1795219200
"""The day begins, in seconds since 1970."""


def idle_device(claim: str, seconds: float) -> MeasuredDevice:
    device = DeviceRecord(("gpu",), "pool", "gpu-0", 0, "GPU-0", DeviceKind.FULL)
    record = ClaimRecord(1, "default", claim, claim, "prepared", (device,))
    return MeasuredDevice(record, device, UsageTotals(8.0, seconds, 0.0), 0.0, activity_at=seconds)


def idle(node: Node) -> dict[str, int]:
    """Since when claims are idle, in seconds after midnight, as the controller reads it from the plan."""
    entries, as_of = node.idle.report
    status = json.loads(msgspec.json.encode(PlanStatus(idle=entries, idle_as_of=as_of)))
    now = MIDNIGHT + node.time.now - 1_000_000
    since = msgspec.convert(status, PlanStatus).idle_since(now)
    return {claim.removeprefix("default/"): time - MIDNIGHT for claim, time in since.items()}


def stops(node: Node, gpu: int) -> None:
    node.node.simulated.end_load(node.node.node.inventory.gpus[gpu].uuid)


def test_a_claim_is_idle_since_the_last_activity_of_its_busiest_device(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.prepare("busy", SMALL, load=busy(0.5))
    node.prepare("idle", NEXT)
    node.prepare("two", WHOLE, "gpu-2")
    node.node.simulated.put_load(node.node.node.inventory.gpus[2].uuid, busy(0.02), pid=1)
    node.prepare("below-1-percent", "gpu-3", load=busy(0.009, 0.009))
    node.passes(600)
    assert idle(node) == {"idle": pytest.approx(0, abs=1), "below-1-percent": pytest.approx(0, abs=1)}
    stops(node, 2)
    node.passes(600)
    assert idle(node).keys() == {"idle", "below-1-percent", "two"}
    assert idle(node)["two"] == pytest.approx(600, abs=INTERVAL)
    node.load("idle", busy(0.5))
    node.passes(2 * INTERVAL)
    assert idle(node).keys() == {"below-1-percent", "two"}


@pytest.mark.parametrize(
    ("gpus", "devices", "expected"),
    [
        pytest.param("dgx-a100", [WHOLE], set(), id="no activity counters"),
        pytest.param("dgx-h100", ["gpu-0-share-0"], set(), id="another share of the GPU is busy"),
        pytest.param("dgx-h100", ["gpu-1-share-0"], {"claim"}, id="the whole GPU is idle"),
    ],
)
def test_what_is_unknown_is_not_idle(tmp_path: Path, gpus: str, devices: list[str], expected: set[str]) -> None:
    node = Node(tmp_path, gpus, shares=4 if "share" in devices[0] else 0)
    if "share" in devices[0]:
        node.prepare("busy", "gpu-0-share-1", load=busy(0.3))
    node.prepare("claim", *devices)
    node.passes(600)
    assert idle(node).keys() == expected


def test_a_load_that_comes_and_goes_is_not_idle(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.prepare("claim", WHOLE, load=duty(SimulatedActivity.of(0.8), 0, 0.1, 60.0))
    for _ in range(20):
        node.passes(30)
        assert idle(node) == {}


def hangs(node: Node, seconds: float) -> None:
    node.node.simulated.faults.fail("nvmlDeviceGetMemoryInfo", code=999, gpu=1)
    node.passes(seconds)
    node.node.simulated.faults.clear()


def is_down(node: Node, seconds: float) -> None:
    node.time.now += seconds
    node.start()


@pytest.mark.parametrize(("gap", "seconds", "began"), [(is_down, 20, 0), (is_down, 600, 1200), (hangs, 600, 1200)])
def test_idle_time_begins_anew_after_a_time_of_unknown_activity(
    tmp_path: Path, gap: Callable[[Node, float], None], seconds: float, began: float
) -> None:
    node = Node(tmp_path)
    node.prepare("claim", WHOLE)
    node.passes(600)
    assert idle(node) == {"claim": pytest.approx(0, abs=1)}
    gap(node, seconds)
    if began:
        assert idle(node) == {}
    node.passes(300)
    assert idle(node) == {"claim": pytest.approx(began, abs=2 * INTERVAL)}


def test_an_end_of_the_plugin_makes_what_it_has_reported_unknown(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.prepare("claim", WHOLE)
    node.passes(600)
    node.time.now += IDLE_REPORT_SECONDS - INTERVAL
    assert idle(node).keys() == {"claim"}
    node.time.now += IDLE_REPORT_SECONDS + 2 * INTERVAL
    assert idle(node) == {}


class JumpingClock(FakeClock):
    """``jump``: what has been added to the time of day since it was wrong."""

    jump = timedelta()

    def now(self) -> datetime:
        return super().now() + self.jump


@pytest.mark.parametrize("days", [-1, 1])
def test_after_the_clock_of_the_api_server_was_set_no_claim_is_idle_for_longer_than_before(days: int) -> None:
    clock = JumpingClock()
    claims = IdleClaims(clock, lambda: None)

    def idle_seconds() -> list[float]:
        status, now = PlanStatus(idle=claims.report[0], idle_as_of=claims.report[1]), clock.now().timestamp()
        return [now - since for since in status.idle_since(now).values()]

    claims.check({("claim", "gpu-0"): idle_device("claim", 3600)})
    assert idle_seconds() == [3600]
    clock.jump = timedelta(days=days)
    assert idle_seconds() == []
    clock.advance(IDLE_REPORT_SECONDS)
    claims.check({("claim", "gpu-0"): idle_device("claim", 3600 + IDLE_REPORT_SECONDS)})
    assert idle_seconds() == [3600 + IDLE_REPORT_SECONDS]


def test_nothing_is_written_while_claims_are_busy_and_little_while_they_are_idle(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.prepare("busy", SMALL, load=busy(0.5))
    node.passes(3600)
    assert node.reports == 0
    node.prepare("idle", WHOLE)
    node.passes(3600)
    assert node.reports <= 1 + 3600 / IDLE_REPORT_SECONDS
    node.end("idle")
    assert idle(node) == {}


def test_of_too_many_claims_those_that_are_idle_for_longest_are_reported() -> None:
    claims = IdleClaims(FakeClock(), lambda: None)
    seconds = {f"claim-{number}": 3600.0 + number for number in range(2 * MOST_IDLE)}
    claims.check({(claim, "gpu-0"): idle_device(claim, idle_for) for claim, idle_for in seconds.items()})
    reported = [entry.partition(" ")[0] for entry in claims.report[0]]
    assert reported == [f"default/claim-{number}" for number in reversed(range(MOST_IDLE, 2 * MOST_IDLE))]
