"""What a node says of the use of its claims' devices, as a scrape sees it."""

from __future__ import annotations

import re
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from driver.clock import Clock
from driver.hardware.usage import UsageReader
from driver.model.gpu_settings import GpuSharing, parse_shared
from driver.simulator.state.gpu_load import Phase, SimulatedActivity, constant, duty
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.metrics.usage import COUNTERS, GAUGES, INFO, SERIES_PER_DEVICE, UsageCollector
from kubelet_plugin.usage import sampler
from kubelet_plugin.usage.labels import ClaimLabels, labels_of
from kubelet_plugin.usage.sampler import LINGER_SECONDS, IdleClaims, UsageSampler
from kubelet_plugin.usage.totals_file import TotalsFile
from tests.harness.waiting import wait_for
from tests.support.claims import ClaimApi, result
from tests.support.node import start_node

INTERVAL = 15.0
SMALL, NEXT, WHOLE = "gpu-0-mig-1g10gb-0", "gpu-0-mig-1g10gb-1", "gpu-1"
GIB = 1 << 30
DOCS = Path(__file__).parents[4] / "docs" / "metrics.md"
SLICES = "tessera_claim_slices"
SM, DRAM, MEMORY = "tessera_claim_sm_active_ratio", "tessera_claim_dram_active_ratio", "tessera_claim_memory_used_bytes"
ALLOCATED, USED = "tessera_claim_allocated_slice_seconds_total", "tessera_claim_used_slice_seconds_total"
TOTAL, MEASURED = "tessera_claim_memory_total_bytes", "tessera_claim_measured_slice_seconds_total"
IDLE = "tessera_claim_idle_seconds"


class Time:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Today(Clock):
    """A clock that begins the day with ``Time``."""

    def __init__(self, time: Time) -> None:
        self._time = time

    def monotonic(self) -> float:
        return self._time.now

    def now(self) -> datetime:
        return datetime(2026, 11, 21, tzinfo=UTC) + timedelta(seconds=self._time.now - 1_000_000)


class Node:
    """A node at a time that the test moves; ``passes`` samples whenever the sampler wants to."""

    def __init__(
        self, root: Path, gpus: str = "dgx-h100", *, time: Time | None = None, shares: int = 0, shared: str = ""
    ) -> None:
        self.time, self.reports = time or Time(), 0
        self.api = ClaimApi()
        self.root, self.shares, self.pods = root, shares, dict[int, str]()
        sharing = GpuSharing(lambda _: shares, strategy_of=parse_shared(shared).of)
        self.node = start_node(root, self.api, gpus=gpus, sharing=sharing, clock=self.time)
        self.start()

    def start(self) -> None:
        """A new process of the plugin."""
        context = self.node.node
        parts: Any = self
        self.idle = IdleClaims(Today(self.time), self.count_report)
        self.sampler = UsageSampler(
            context,
            UsageReader(self.node.simulated.nvml, self.time),
            parts,
            TotalsFile(self.root / "state", "boot"),
            INTERVAL,
            (parts.check, self.idle.check),
            self.time,
        )
        self.registry = CollectorRegistry()
        self.registry.register(UsageCollector(context, self.sampler, self.time))
        self.wait = self.sampler.sample()

    def read_labels(self, record: ClaimRecord) -> ClaimLabels:
        return labels_of(self.api.read(record.namespace, record.name))

    def pod_of_process(self, pid: int) -> str | None:
        return self.pods.get(pid)

    def check(self, _devices: object) -> None:
        """Nothing follows the samples."""

    def count_report(self) -> None:
        self.reports += 1

    def prepare(self, name: str, *devices: str, load: tuple[Phase, ...] = (), pid: int = 4711) -> None:
        self.node.preparer.prepare(self.api.allocate(name, *devices))
        if load:
            self.load(name, load, pid)
        self.wait = self.sampler.sample()

    def load(self, name: str, load: tuple[Phase, ...], pid: int = 4711) -> None:
        for record in self.node.node.checkpoint.records():
            for device in record.devices if record.name == name else ():
                self.node.simulated.put_load(device.uuid or device.gpu_uuid, load, pid=pid)

    def end(self, name: str) -> None:
        claim = next(each for each in self.node.node.checkpoint.records() if each.name == name)
        for device in claim.devices:
            self.node.simulated.end_load(device.uuid or device.gpu_uuid)
        self.node.preparer.unprepare(claim.reference)
        self.api.delete(claim.reference)
        self.wait = self.sampler.sample()

    def passes(self, seconds: float) -> None:
        end = self.time.now + seconds
        while self.time.now + self.wait <= end:
            self.time.now += self.wait
            self.wait = self.sampler.sample()
        self.wait -= end - self.time.now
        self.time.now = end

    def value(self, name: str, claim: str) -> float | None:
        """The sum over the devices of a claim; None without a series."""
        found = [
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if (sample.name, sample.labels.get("claim")) == (name, claim)
        ]
        return sum(found) if found else None

    def labels(self, claim: str) -> dict[str, str]:
        return next(
            sample.labels
            for family in self.registry.collect()
            for sample in family.samples
            if sample.labels.get("claim") == claim
        )

    def unknown(self) -> list[str]:
        families = (each for each in self.registry.collect() if each.name == "tessera_gpu_activity_unknown")
        return [sample.labels["reason"] for family in families for sample in family.samples]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def busy(sm: float, dram: float = 0.0, memory: float = 0.0) -> tuple[Phase, ...]:
    return constant(SimulatedActivity.of(sm, dram=dram), int(memory * GIB))


def test_a_partition_shows_its_own_load_and_none_of_its_neighbours(node: Node) -> None:
    node.prepare("one", SMALL, load=busy(0.8, 0.3, 7))
    node.prepare("two", NEXT, load=busy(0.1, 0.2, 1))
    node.prepare("idle", "gpu-0-mig-1g10gb-2")
    node.prepare("whole", WHOLE, load=busy(0.5, 0.9, 60))
    node.passes(60)
    found = {name: (node.value(SM, name), node.value(DRAM, name)) for name in ("one", "two", "idle", "whole")}
    assert found == {
        "one": pytest.approx((0.8, 0.3)),
        "two": pytest.approx((0.1, 0.2)),
        "idle": pytest.approx((0.0, 0.0)),
        "whole": pytest.approx((0.5, 0.9)),
    }
    assert [node.value(MEMORY, name) for name in ("one", "idle", "whole")] == [7 * GIB, 0, 60 * GIB]
    assert node.labels("one") == {
        "namespace": "default",
        "claim": "one",
        "pod": "pod",
        "class": "",
        "profile": "1g.10gb",
        "device": SMALL,
        "gpu": "gpu-0",
        "node": "node-a",
        "source": "gpm",
    }


@pytest.mark.parametrize(("fraction", "period"), [(0.3, 60.0), (0.5, 4.0), (0.9, 7.0)])
def test_a_load_that_comes_and_goes_adds_up(node: Node, fraction: float, period: float) -> None:
    node.prepare("one", SMALL, load=duty(SimulatedActivity.of(0.8), 0, fraction, period))
    node.passes(600)
    allocated, used = node.value(ALLOCATED, "one"), node.value(USED, "one")
    assert allocated == pytest.approx(600)
    assert used is not None
    assert used / 600 == pytest.approx(0.8 * fraction, abs=0.02)


def test_a_pod_that_lives_for_ten_seconds_is_accounted_for(node: Node) -> None:
    node.prepare("short", WHOLE, load=busy(0.6))
    node.passes(10)
    node.end("short")
    assert node.value(ALLOCATED, "short") == pytest.approx(80)
    assert node.value(USED, "short") == pytest.approx(0.6 * 80)
    assert node.value(SLICES, "short") is None
    node.passes(LINGER_SECONDS - 20)
    assert node.value(ALLOCATED, "short") == pytest.approx(80)
    node.passes(40)
    assert node.value(ALLOCATED, "short") is None


def test_a_claim_that_is_created_again_under_its_name_goes_on_where_it_ended(node: Node) -> None:
    node.prepare("web-0", WHOLE)
    node.passes(100)
    node.end("web-0")
    node.passes(50)
    node.prepare("web-0", WHOLE)
    node.passes(100)
    assert node.value(ALLOCATED, "web-0") == pytest.approx(8 * 200)


def test_a_restart_loses_no_allocated_time_and_at_most_one_interval_of_use(node: Node) -> None:
    node.prepare("one", WHOLE, load=busy(1.0))
    node.passes(600)
    node.time.now += 30
    node.start()
    node.passes(600)
    allocated, used = node.value(ALLOCATED, "one"), node.value(USED, "one")
    assert allocated == pytest.approx(8 * 1230)
    assert used is not None
    not_yet_sampled = INTERVAL
    assert 8 * (1200 - INTERVAL - not_yet_sampled) <= used <= 8 * 1200


@pytest.mark.long
@given(st.lists(st.sampled_from(["pass", "restart", "end", "prepare"]), max_size=12))
def test_no_second_counts_twice(tmp_path_factory: pytest.TempPathFactory, moves: list[str]) -> None:
    node, prepared, expected = Node(tmp_path_factory.mktemp("node")), False, 0.0
    for move in moves:
        if move == "pass":
            node.passes(40)
            expected += 8 * 40 if prepared else 0
        elif move == "restart":
            node.sampler.sample()
            node.passes(INTERVAL + 1)
            expected += 8 * (INTERVAL + 1) if prepared else 0
            if prepared:
                node.start()
        elif prepared and move == "end":
            node.end("one")
            prepared = False
        elif not prepared and move == "prepare":
            node.prepare("one", WHOLE)
            prepared = True
    assert (node.value(ALLOCATED, "one") or 0.0) <= expected + 1e-6


def test_what_a_gpu_without_activity_counters_does_is_unknown_and_not_zero(tmp_path: Path) -> None:
    node = Node(tmp_path, "dgx-a100")
    node.prepare("whole", WHOLE, load=busy(0.7, 0.1, 20))
    node.passes(60)
    for name in (SM, DRAM, MEASURED, USED, IDLE):
        assert node.value(name, "whole") is None
    assert node.value("tessera_claim_gpu_utilization_ratio", "whole") == pytest.approx(1.0)
    assert node.value(MEMORY, "whole") == 20 * GIB
    assert node.value(ALLOCATED, "whole") == pytest.approx(8 * 60)
    assert node.labels("whole")["source"] == "utilization"
    assert node.unknown() == ["no activity counters on NVIDIA A100-SXM4-80GB"]


def test_a_share_has_the_memory_of_its_own_pods_and_the_activity_of_the_gpu(tmp_path: Path) -> None:
    node = Node(tmp_path, shares=4)
    node.prepare("one", "gpu-0-share-0", load=busy(0.3, memory=5), pid=7)
    node.prepare("two", "gpu-0-share-1", load=busy(0.2, memory=1), pid=8)
    for name in ("one", "two"):
        claim = node.api.claims["default", name]
        assert claim.status.reserved_for[0].resource == "pods"
    node.passes(30)
    assert node.value(SM, "one") == node.value(SM, "two") == pytest.approx(0.5)
    assert node.value(SLICES, "one") == 2
    assert node.labels("one")["source"] == "shared"
    assert node.value(MEMORY, "one") == 0  # no process in its pods


def test_a_part_of_a_shared_gpu_has_the_memory_of_its_claim_and_uses_what_its_pods_do(tmp_path: Path) -> None:
    node = Node(tmp_path, shared="all=time-slicing")
    node.pods = {7: "pod-a", 8: "pod-b"}
    part = result("gpu-0-shared", shareID="s1", consumedCapacity={"memory": "6Gi"})
    claim = node.api.allocate("claim", part, pods=("pod-a",))
    node.node.preparer.prepare(claim)
    node.load("claim", busy(0.3, memory=4), pid=7)
    node.load("claim", busy(0.1, memory=3), pid=8)
    node.passes(30)
    assert (node.value(MEMORY, "claim"), node.value(TOTAL, "claim")) == (4 * GIB, 6 * GIB)
    node.api.allocate("claim", part, pods=("pod-a", "pod-b"))
    node.node.preparer.prepare(claim)
    node.passes(30)
    assert node.value(MEMORY, "claim") == node.sampler.memory_used(claim.uid, "gpu-0-shared-s1") == 7 * GIB


def test_a_gpu_that_hangs_leaves_a_gap_in_its_own_claims_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "GPU_READ_TIMEOUT_SECONDS", 0.2)
    node = Node(tmp_path)
    node.prepare("hangs", SMALL, load=busy(0.8))
    node.prepare("fine", WHOLE, load=busy(0.4))
    node.passes(60)
    node.node.simulated.faults.slow(1.0, "nvmlDeviceGetMemoryInfo", gpu=0)
    node.passes(30)
    assert node.value(SM, "hangs") is None
    assert node.value(SM, "fine") == pytest.approx(0.4)
    assert node.value(ALLOCATED, "hangs") == pytest.approx(90)
    assert (node.value(MEASURED, "hangs") or 0.0) <= 60
    assert node.unknown() == ["the GPU does not answer"]
    node.node.simulated.faults.clear()


def test_claims_have_no_series_before_their_pod_is_known(node: Node) -> None:
    node.api.away = False
    claim = node.api.allocate("one", WHOLE)
    node.node.preparer.prepare(claim)
    node.api.away = True
    node.wait = node.sampler.sample()
    node.passes(60)
    assert node.value(ALLOCATED, "one") is None
    node.api.away = False
    node.passes(20)
    assert node.value(ALLOCATED, "one") == pytest.approx(8 * 80)


def test_idle_time_begins_with_the_last_activity(node: Node) -> None:
    node.prepare("one", WHOLE, load=busy(0.5))
    node.passes(60)
    assert node.value(IDLE, "one") == pytest.approx(0, abs=INTERVAL)
    node.node.simulated.end_load(node.node.node.inventory.gpus[1].uuid)
    node.passes(300)
    assert node.value(IDLE, "one") == pytest.approx(300, abs=2 * INTERVAL)


def test_the_docs_list_every_series_and_how_many_there_are_at_most(node: Node) -> None:
    node.prepare("one", WHOLE, load=busy(0.5, 0.5, 1))
    node.passes(60)
    table = dict(re.findall(r"\| `(tessera_claim_\w+|tessera_gpu_\w+)` \| (gauge|counter) \|", DOCS.read_text()))
    assert {name for name in table if name.startswith("tessera_claim_")} == {
        *(metric.name for metric in GAUGES),
        *(f"{metric.name}_total" for metric in COUNTERS),
        INFO,
    }
    assert f"at most {SERIES_PER_DEVICE} series" in DOCS.read_text()
    series = [line for line in generate_latest(node.registry).decode().splitlines() if 'claim="one"' in line]
    assert len({line.rpartition(" ")[0] for line in series}) == len(series) <= SERIES_PER_DEVICE


def test_an_unexpected_error_costs_one_round_and_not_the_plugin(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, stop = 0, threading.Event()

    def fails_at_first() -> float:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            raise ZeroDivisionError
        stop.set()
        return INTERVAL

    monkeypatch.setattr(node.sampler, "sample", fails_at_first)
    thread = threading.Thread(target=node.sampler.run, args=(stop,))
    thread.start()
    wait_for(lambda: rounds == 1, 60, "a round has failed")

    def stopped() -> bool:
        node.sampler.notify()
        return stop.is_set() and not thread.is_alive()

    wait_for(stopped, 60, "there was another round")
    thread.join()


def test_memory_in_use_is_without_what_the_driver_reserves(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.prepare("whole", WHOLE, load=constant(SimulatedActivity(), GIB))
    assert node.value(MEMORY, "whole") == GIB


def test_memory_in_use_is_known_where_the_library_has_only_the_first_version_of_the_struct(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.node.simulated.faults.fail("nvmlDeviceGetMemoryInfo", code=13, times=1)
    node.prepare("whole", WHOLE, load=constant(SimulatedActivity(), GIB))
    assert (node.value(MEMORY, "whole") or 0) >= GIB
