"""The comparison on the real scheduler: what it does without one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from driver.model.device import number_gpus
from driver.slices.slice_names import Pool
from kubelet_plugin.inventory.inventory import ClaimReference, Inventory
from tests.bench.placement import plot, report
from tests.bench.placement.fleet import Mode, lowest_start_first
from tests.bench.placement.measures import count_refusals, mean, percentile, thinned
from tests.bench.placement.real import RealResult
from tests.bench.placement.replay import Agenda, claim
from tests.bench.placement.trace import FULL_NODE, UNIFORM
from tests.support.gpus import gpu_of
from tests.support.published import build_slices


def test_the_peers_order_is_gpu_after_gpu_and_the_lowest_start_first() -> None:
    gpus = [gpu_of(minor=number) for number in range(2)]
    inventory = Inventory(gpus, number_gpus(gpus, {}))
    held = inventory.device("gpu-0-mig-1g10gb-6")
    assert held is not None
    inventory.hold(ClaimReference("default", "infer", "u"), [held])
    published = inventory.published()
    built = lowest_start_first(build_slices(Pool("n1", "gpu.tessera.dev"), published), published, inventory)
    names = [device["name"] for content in built.values() for device in content.get("devices", ())]
    small = [name for name in names if "-1g10gb-" in name]
    assert small[0] == names[0] == held.name
    assert small[1:] == [f"gpu-0-mig-1g10gb-{start}" for start in range(6)] + [
        f"gpu-1-mig-1g10gb-{start}" for start in range(7)
    ]


def test_work_is_done_in_order_of_its_time_even_if_it_comes_late() -> None:
    agenda, done, now = Agenda(), list[str](), time.monotonic()
    agenda.at(now + 0.02, lambda: done.append("last"))
    agenda.at(now, lambda: agenda.at(now + 0.01, lambda: done.append("middle")))
    agenda.at(now - 1, lambda: done.append("first"))
    agenda.run(lambda: len(done) == 3)
    assert done == ["first", "middle", "last"]


def test_means_are_over_time_and_between_the_bounds() -> None:
    assert mean([(0.0, 0.0), (1.0, 1.0), (3.0, 0.0)], 2.0, 4.0) == pytest.approx(0.5)
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0
    assert percentile([], 0.5) == 0.0
    assert thinned([(-1.0, 5.0), (0.1, 1.0), (0.2, 2.0), (0.7, 3.0)]) == [(0.2, 2.0), (0.7, 3.0)]


def test_a_refusal_by_the_fence_counts_once(tmp_path: Path) -> None:
    log = tmp_path / "kube-scheduler.log"
    log.write_text(
        '"Plugin failed" err="Tessera is taking back a/b"\n'
        '"Error scheduling pod; retrying" err="... Tessera is taking back a/b"\n'
        '"Error scheduling pod; retrying" err="pods not found"\n'
    )
    assert count_refusals(log) == 1


def test_a_claim_for_a_whole_node_asks_for_one_clique() -> None:
    devices = claim("big", FULL_NODE)["spec"]["devices"]
    assert devices["requests"][0]["exactly"] == {"deviceClassName": "gpu-training", "count": 8}
    assert devices["constraints"] == [{"matchAttribute": "gpu.tessera.dev/nvlinkClique"}]


@pytest.mark.slow
def test_the_results_become_a_table_and_two_pictures(tmp_path: Path) -> None:
    requests = {str(request): 0.9 for request in UNIFORM.weights}
    result = RealResult(
        mode=Mode.CURATED.value,
        mix="uniform",
        arrivals=300,
        counted=200,
        acceptance=0.95,
        by_request=requests,
        held=0.9,
        p50_ms=20,
        p99_ms=900,
        cpu_s={"kube-scheduler": 16.0},
        allocations=280,
        slice_updates=2.0,
        plan_writes=2.0,
        plan_statuses=1.0,
        fence_refusals=1,
        overlaps=(),
        fitted=0,
        simulated=0.954,
        reasons={},
        slices_over_time=[(0.5, 0.8), (1.0, 0.9)],
    )
    assert "0.950 (.950)" in report.real([result])
    plot.draw([result, result], tmp_path / "picture")
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg"}
