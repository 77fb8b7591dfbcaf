"""Pages of node plugins: what is read of them, and what becomes of pages that can't be read."""

from __future__ import annotations

import pytest

from driver.errors import ApiError, EnvironmentFault
from tessera.usage.pages import parse_page, read_pages
from tessera.usage.report import GpuOfNode, GpuSlices, UsageRecord
from tests.support.usage_pages import A100, GIB, H100, GpuSeries, Held, usage_page

GPU = GpuOfNode("node-1", "gpu-0")


def device_of(**values: float) -> UsageRecord:
    page = parse_page(usage_page("node-1", [GpuSeries()], [Held(values=values)]))
    assert page is not None
    [device] = page.devices.values()
    return device


def unreachable() -> str:
    raise ApiError("GET /api: 503: dial tcp 10.0.0.7:9400: connect: connection refused\x1b[2J", 503)


@pytest.mark.parametrize(
    ("values", "used"),
    [
        pytest.param({"sm_active_ratio": 0.25, "dram_active_ratio": 0.5}, 4.0, id="the larger of both"),
        pytest.param({"sm_active_ratio": 0.25}, 2.0, id="only SM activity is known"),
        pytest.param({"sm_active_ratio": 0.0, "dram_active_ratio": 0.0}, 0.0, id="idle"),
        pytest.param({"sm_active_ratio": 1.02}, 8.0, id="never more than allocated"),
        pytest.param({}, None, id="unknown is not 0"),
        pytest.param({"gpu_utilization_ratio": 0.95}, None, id="a utilization rate is no activity"),
        pytest.param({"sm_active_ratio": float("nan")}, None, id="not a number"),
    ],
)
def test_used_slices_follow_from_the_activity(values: dict[str, float], used: float | None) -> None:
    assert device_of(**values).used == used


def test_a_page_says_who_has_what() -> None:
    text = usage_page(
        "node-1",
        [GpuSeries(), GpuSeries("gpu-1", A100, 8, "no activity counters on NVIDIA A100")],
        [
            Held(values={"memory_used_bytes": 2 * GIB, "memory_total_bytes": 80 * GIB, "idle_seconds": 90}),
            Held("team-b/serve", "gpu-1-1g-10gb-0", "gpu-1", 1, "gpu-inference"),
        ],
    )
    page = parse_page(text)
    assert page is not None
    assert page.gpus == {GPU: GpuSlices(H100, 8), GpuOfNode("node-1", "gpu-1"): GpuSlices(A100, 8)}
    assert page.reasons == {GpuOfNode("node-1", "gpu-1"): "no activity counters on NVIDIA A100"}
    assert list(page.devices.values()) == [
        UsageRecord(GPU, 8, None, "team-a", "train", "gpu-training", (2 * GIB, 80 * GIB), 90),
        UsageRecord(GpuOfNode("node-1", "gpu-1"), 1, None, "team-b", "serve", "gpu-inference"),
    ]


def test_the_memory_of_a_share_is_its_part_of_the_gpu() -> None:
    values = {"memory_used_bytes": 5 * GIB, "memory_total_bytes": 80 * GIB}
    shares = [Held(f"team-{i}/dev", f"gpu-0-share-{i}", slices=2, source="shared", values=values) for i in range(4)]
    page = parse_page(usage_page("node-1", [GpuSeries()], shares))
    assert page is not None
    assert [device.memory for device in page.devices.values()] == [(5 * GIB, 20 * GIB)] * 4


def test_the_memory_of_a_part_of_a_shared_gpu_is_what_its_claim_has() -> None:
    values = {"memory_used_bytes": 5 * GIB, "memory_total_bytes": 6 * GIB}
    part = Held("team/dev", "gpu-0-shared-1f0c3c1e", slices=0.6, source="shared", values=values)
    page = parse_page(usage_page("node-1", [GpuSeries()], [part]))
    assert page is not None
    assert [device.memory for device in page.devices.values()] == [(5 * GIB, 6 * GIB)]


@pytest.mark.parametrize("text", ["", "<html>a proxy that knows better</html>", 'tessera_gpus{a="', "x{} y\n", "{}\n"])
def test_a_page_that_is_no_metrics_is_a_node_that_can_not_be_read(text: str) -> None:
    reading = read_pages({"node-1": [lambda: usage_page("node-1", [GpuSeries()])], "node-2": [lambda: text]})
    assert [warning.split(" ")[0] for warning in reading.warnings] == ["node-2"]
    assert reading.capacity == 8


def test_a_node_without_an_answer_is_named_with_the_reason() -> None:
    reading = read_pages({"node-1": [lambda: usage_page("node-1", [GpuSeries()])], "node-2": [unreachable]})
    assert reading.warnings == [
        "node-2 can't be read: GET /api: 503: dial tcp 10.0.0.7:9400: connect: connection refused?[2J"
    ]


def test_a_plugin_that_measures_no_usage_is_named_with_the_flag() -> None:
    reading = read_pages(
        {"node-1": [lambda: usage_page("node-1", [GpuSeries()])], "node-2": [lambda: "tessera_gpus 8\n"]}
    )
    assert reading.warnings == ["node-2 serves no usage metrics; start its plugin with --usage-interval"]


def test_many_nodes_without_an_answer_take_few_lines_that_name_them_all() -> None:
    names = [f"node-{number:02}" for number in range(25)]
    reading = read_pages({"up": [lambda: usage_page("up", [GpuSeries()])], **{name: [unreachable] for name in names}})
    assert len(reading.warnings) == 11
    assert all(any(name in warning for warning in reading.warnings) for name in names)


def test_no_node_with_an_answer_is_an_error() -> None:
    with pytest.raises(EnvironmentFault, match="no node could be read: node-1 can't be read"):
        read_pages({"node-1": [unreachable]})


def test_two_plugins_of_a_node_during_an_update_count_once() -> None:
    text = usage_page("node-1", [GpuSeries()], [Held()])
    for sources in (
        [lambda: text, lambda: text],
        [unreachable, lambda: text],
        [lambda: "tessera_gpus 8\n", lambda: text],
    ):
        reading = read_pages({"node-1": sources})
        assert (len(reading.devices), reading.capacity, reading.warnings) == (1, 8, [])
