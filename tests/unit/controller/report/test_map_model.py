"""The map as values: every memory slice of every GPU is in one span, with its holder and class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.report.map_model import Holder, MapNode, NodeState, cluster_map, requested_kinds
from controller.report.map_summary import MapFilter, summarize
from controller.report.slice_states import SliceState, capacity_of
from tests.support.gpus import H100
from tests.support.map_cluster import MapCluster, example
from tests.support.queues import profile, request
from tests.support.shared_gpus import shared_memory

L4 = "NVIDIA L4"
A100 = "NVIDIA A100-SXM4-80GB"
Drawn = list[tuple[int, int, str, str]]


def spans(cluster: MapCluster, number: int = 0) -> Drawn:
    """Start, size, state and content of each span of a GPU of the only node."""
    [node] = cluster.map()
    [gpu] = [gpu for gpu in node.gpus if gpu.number == number]
    return [(each.start, each.size, each.state.value, str(each.holder or " ".join(each.kinds))) for each in gpu.spans]


def one(*held: str, **gpu: Any) -> MapCluster:
    """A node with one GPU, of which claims ``t/0``, ``t/1`` and so on hold devices."""
    cluster = MapCluster().gpu("n", 0, **gpu)
    shares = gpu.get("shares", 1)
    for number, device in enumerate(held):
        cluster.holds(f"t/{number}", "n", device, shares=shares if "share" in device else 1)
    return cluster


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        pytest.param(one(), [(0, 8, "free", "")], id="free"),
        pytest.param(one("gpu-0"), [(0, 8, "held", "t/0")], id="full"),
        pytest.param(one().offers("n", "gpu-0"), [(0, 8, "offered", "full")], id="offered"),
        pytest.param(
            one("gpu-0-mig-3g40gb-4"), [(0, 4, "free", ""), (4, 4, "held", "t/0")], id="a second half fits beside it"
        ),
        pytest.param(
            one("gpu-0-mig-3g40gb-4", "gpu-0-mig-1g10gb-0").offers("n", "gpu-0-mig-1g20gb-2"),
            [(0, 1, "held", "t/1"), (1, 1, "free", ""), (2, 2, "offered", "1g.20gb"), (4, 4, "held", "t/0")],
            id="partitions",
        ),
        pytest.param(
            one(*(f"gpu-0-mig-1g10gb-{start}" for start in range(7))),
            [*((start, 1, "held", f"t/{start}") for start in range(7)), (7, 1, "stranded", "")],
            id="the eighth slice is stranded",
        ),
        pytest.param(
            one("gpu-0-mig-3g40gb-0").offers("n", "gpu-0-mig-1g10gb-4", "gpu-0-mig-1g10gb-5"),
            [(0, 4, "held", "t/0"), (4, 1, "offered", "1g.10gb"), (5, 1, "offered", "1g.10gb"), (6, 2, "free", "")],
            id="disjoint offers are apart",
        ),
        pytest.param(
            one("gpu-0-mig-3g40gb-0").offers("n", "gpu-0-mig-1g10gb-4", "gpu-0-mig-2g20gb-4", "gpu-0-mig-3g40gb-4"),
            [(0, 4, "held", "t/0"), (4, 4, "offered", "3g.40gb 2g.20gb 1g.10gb")],
            id="overlapping offers are one span",
        ),
        pytest.param(
            one(foreign=0b1100),
            [(0, 2, "free", ""), (2, 2, "unavailable", ""), (4, 4, "free", "")],
            id="partitions of others",
        ),
        pytest.param(
            one("gpu-0-mig-3g40gb-0", fault="lost"),
            [(0, 4, "held", "t/0"), (4, 4, "unavailable", "")],
            id="what is held stays visible on a faulty GPU",
        ),
        pytest.param(
            one("gpu-0-share-1", shares=4).offers("n", "gpu-0-share-0"),
            [(0, 8, "held", "t/0"), (0, 8, "offered", "share"), (0, 8, "free", "share"), (0, 8, "free", "share")],
            id="shares",
        ),
        pytest.param(
            one(product=L4, shares=2, shares_only=True),
            [(0, 1, "free", "share"), (0, 1, "free", "share")],
            id="a GPU without MIG that has only shares",
        ),
        pytest.param(
            MapCluster().node("n", unschedulable=True).gpu("n", 0), [(0, 8, "unavailable", "")], id="cordoned node"
        ),
    ],
)  # fmt: skip
def test_every_memory_slice_is_in_one_span(cluster: MapCluster, expected: Drawn) -> None:
    assert spans(cluster) == expected


def test_a_share_of_another_size_keeps_its_part_of_the_memory() -> None:
    cluster = MapCluster().gpu("n", 0, shares=8).holds("t/0", "n", "gpu-0-share-0", shares=2)
    [node] = cluster.map()
    assert [span.slices for span in node.gpus[0].spans] == [4, 1, 1, 1, 1]


def test_a_rest_that_is_too_small_for_a_share_is_shown() -> None:
    cluster = MapCluster().gpu("n", 0).holds("t/0", "n", "gpu-0-share-0", shares=4)
    [node] = cluster.map()
    assert [(span.slices, span.kinds) for span in node.gpus[0].spans] == [(2, ("share",)), (6, ())]


def test_slices_are_stranded_unless_a_pending_claim_could_have_them() -> None:
    cluster = one("gpu-0-mig-3g40gb-0", "gpu-0-mig-2g20gb-4")
    assert spans(cluster)[2:] == [(6, 2, "stranded", "")]
    cluster.situation.wants(request(selector=profile("1g.10gb")))
    assert spans(cluster)[2:] == [(6, 1, "free", ""), (7, 1, "stranded", "")]


@pytest.mark.parametrize(
    ("requests", "result", "expected"),
    [
        ([request("gpu-dev", "gpu")], "gpu", "gpu-dev"),
        ([request("gpu-dev", "one"), request("gpu-training", "gpu")], "gpu", "gpu-training"),
        (
            [{"name": "gpu", "firstAvailable": [{"name": name, "deviceClassName": f"of-{name}"} for name in "ab"]}],
            "gpu/b",
            "of-b",
        ),
        ([request("gpu-dev", "gpu")], "gone", None),
        ([], "gpu", None),
    ],
)  # fmt: skip
def test_the_class_is_that_of_the_request_or_alternative(
    requests: list[dict[str, Any]], result: str, expected: str | None
) -> None:
    cluster = MapCluster().gpu("n", 0)
    allocated = {"request": result, "driver": "gpu.tessera.dev", "pool": "n-gpu.tessera.dev", "device": "gpu-0"}
    cluster.situation.claim("c", *requests, status={"allocation": {"devices": {"results": [allocated]}}})
    [node] = cluster.map()
    assert [span.holder for span in node.gpus[0].spans] == [Holder("default", "c", expected)]


def test_two_claims_with_one_device_and_overlapping_devices_are_shown() -> None:
    cluster = one("gpu-0-mig-3g40gb-0", "gpu-0-mig-3g40gb-0", "gpu-0-mig-1g10gb-1")
    assert [each[3] for each in spans(cluster) if each[2] == "held"] == ["t/0", "t/1", "t/2"]
    [node] = cluster.map()
    assert list(map(set, node.gpus[0].overlaps)) == [{"gpu-0-mig-1g10gb-1", "gpu-0-mig-3g40gb-0"}]


def test_a_held_device_of_a_gpu_that_the_node_does_not_report_is_not_lost() -> None:
    [node] = MapCluster().gpu("n", 0).holds("t/a", "n", "gpu-7").map()
    assert [(each.device, str(each.holder)) for each in node.lost_devices] == [("gpu-7", "t/a")]


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (MapCluster().node("n", unschedulable=True).gpu("n", 0), {NodeState.CORDONED}),
        (
            MapCluster()
            .node("n", taints=[{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}])
            .gpu("n", 0),
            {NodeState.NOT_READY},
        ),
        (MapCluster().node("n"), {NodeState.UNREPORTED}),
        (MapCluster().node("n", {"status": {"mode": "Alone"}}).gpu("n", 0), {NodeState.STANDALONE}),
        (MapCluster().node("n", {"status": {"mode": "Complete"}}).gpu("n", 0), {NodeState.COMPLETE}),
        (
            MapCluster()
            .node("n", {"metadata": {"name": "n", "annotations": {"gpu.tessera.dev/paused": "true"}}})
            .gpu("n", 0),
            {NodeState.PAUSED},
        ),
        (MapCluster(missing_slices={"n"}).gpu("n", 0), {NodeState.INCOMPLETE}),
        (MapCluster().gpu("n", 0), set()),
    ],
)  # fmt: skip
def test_a_node_that_is_not_available_as_usual_says_so(cluster: MapCluster, expected: set[NodeState]) -> None:
    [node] = cluster.map()
    assert set(node.states) == expected


def test_a_cordon_is_shown_before_the_node_has_taken_it_over() -> None:
    [node] = MapCluster().node("n", {"spec": {"cordoned": ["n/0 fan on Friday"]}}).gpu("n", 0).map()
    assert (node.gpus[0].cordon, node.gpus[0].fault) == ("fan on Friday", None)


PROFILES = st.sampled_from(["1g10gb", "1g20gb", "2g20gb", "3g40gb", "4g40gb"])


@given(
    held=st.lists(st.tuples(PROFILES, st.integers(0, 7)), max_size=4),
    offered=st.lists(st.tuples(PROFILES, st.integers(0, 7)), max_size=4),
    foreign=st.integers(0, 255),
    shares=st.integers(0, 4),
    held_shares=st.integers(0, 2),
    fault=st.sampled_from([None, "lost"]),
)
def test_spans_and_summary_agree_with_the_controllers_metrics(
    held: list[tuple[str, int]],
    offered: list[tuple[str, int]],
    foreign: int,
    shares: int,
    held_shares: int,
    fault: str | None,
) -> None:
    cluster = one(
        *(f"gpu-0-mig-{profile}-{start}" for profile, start in held),
        *(f"gpu-0-share-{index}" for index in range(min(held_shares, shares))),
        shares=shares, foreign=foreign, fault=fault,
    ).offers("n", *(f"gpu-0-mig-{profile}-{start}" for profile, start in offered))  # fmt: skip
    view = cluster.view()
    nodes = tuple(cluster_map(view))
    [summary] = summarize(nodes)
    expected = capacity_of(view.fleet, view.devices.offered, requested_kinds(view)).slices
    assert summary.slices == {state: expected.get((H100, state), 0) for state in SliceState}
    [gpu] = nodes[0].gpus
    if not gpu.is_divided:
        for state in SliceState:
            covered = {
                n for span in gpu.spans if span.state is state for n in range(span.start, span.start + span.size)
            }
            assert len(covered) == gpu.slices.get(state, 0)
    elif not held:
        assert sum(span.slices for span in gpu.spans) == pytest.approx(8)


def test_the_summary_counts_what_can_be_allocated_whole_and_the_largest_partition() -> None:
    cluster = MapCluster()
    for number in range(2):
        cluster.gpu("free", number).gpu("partly", number)
        cluster.gpu("ampere", number, A100, facts={"mig_mode": "enabled"})
    cluster.holds("t/0", "partly", "gpu-0-mig-4g40gb-0").holds("t/1", "ampere", "gpu-0-mig-2g20gb-0")
    a100, h100 = summarize(cluster.map())
    assert (h100.nodes, h100.free_nodes, h100.gpus, h100.free_gpus) == (2, 1, 4, 3)
    assert h100.largest_partition is not None
    assert (h100.largest_partition.profile, h100.largest_partition_gpus) == ("7g.80gb", 3)
    assert (a100.free_nodes, a100.free_gpus) == (0, 0)
    assert a100.largest_partition is not None
    assert (a100.largest_partition.profile, a100.largest_partition_gpus) == ("7g.80gb", 1)


def kept(nodes: tuple[MapNode, ...]) -> dict[str, list[int]]:
    return {node.name: [gpu.number for gpu in node.gpus] for node in nodes}


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, {"node-1": [0, 1, 2, 3], "node-2": [0, 1, 2, 3], "node-3": [0], "node-4": []}),
        ({"nodes": ("node-1", "node-3")}, {"node-1": [0, 1, 2, 3], "node-3": [0]}),
        ({"product": "l4"}, {"node-3": [0]}),
        ({"namespace": "team-a"}, {"node-1": [0, 1]}),
        ({"device_class": "gpu-dev"}, {"node-2": [2]}),
        ({"namespace": "team-a", "device_class": "gpu-dev"}, {}),
        ({"free": True}, {"node-1": [2], "node-2": [0, 1, 2, 3]}),
        ({"unhealthy": True}, {"node-1": [3], "node-3": [0], "node-4": []}),
        ({"unhealthy": True, "nodes": ("node-1",)}, {"node-1": [3]}),
    ],
)
def test_filters_keep_the_gpus_that_match_all_of_them(
    filters: Mapping[str, Any], expected: dict[str, list[int]]
) -> None:
    cluster = example().node("node-3", unschedulable=True).gpu("node-3", 0, L4).node("node-4")
    chosen = MapFilter(**filters)
    assert kept(chosen.apply(cluster.map())) == expected
    assert bool(chosen) == bool(filters)


def test_a_node_is_free_only_with_all_of_its_gpus_whatever_is_filtered() -> None:
    [summary] = summarize(MapFilter(free=True, nodes=("node-1",)).apply(example().map()))
    assert (summary.gpus, summary.free_gpus, summary.free_nodes) == (1, 1, 0)


def test_json_has_camel_case_and_plain_values() -> None:
    [first, *_] = msgspec.json.decode(msgspec.json.encode(example().map()))
    assert first["gpus"][0]["spans"] == [
        {
            "start": 0,
            "size": 8,
            "slices": 8,
            "state": "held",
            "devices": ["gpu-0"],
            "kinds": ["full"],
            "holder": {"namespace": "team-a", "claim": "train", "deviceClass": "gpu-training", "problem": None},
            "foreign": False,
            "memoryGib": None,
        }
    ]
    assert first["gpus"][2]["largestPartition"] == {"memorySlices": 8, "computeSlices": 7, "profile": "7g.80gb"}


def test_each_claim_of_a_shared_gpu_has_a_span_with_its_memory_and_what_is_left_has_one() -> None:
    cluster = MapCluster().gpu("n", 0, shared=shared_memory(80))
    cluster.holds("a/one", "n", "gpu-0-shared", gib=6).holds("b/two", "n", "gpu-0-shared", gib=30)
    [gpu] = cluster.offers("n", "gpu-0-shared").map()[0].gpus
    spans = [(str(span.holder or span.state), span.memory_gib, span.devices, span.kinds) for span in gpu.spans]
    device = (("gpu-0-shared",), ("shared",))
    assert spans == [("a/one", 6, *device), ("b/two", 30, *device), ("offered", 44, *device)]
    assert (gpu.shared_memory_gib, gpu.is_divided, gpu.is_whole) == (80, True, False)
    assert gpu.slices == {SliceState.HELD: 8 * 36 / 80, SliceState.OFFERED: 8 * 44 / 80}
    assert sum(span.slices for span in gpu.spans) == pytest.approx(8)


def test_a_shared_gpu_that_is_full_or_faulty_has_nothing_to_offer() -> None:
    cluster = MapCluster().gpu("n", 0, shared=shared_memory(80)).gpu("n", 1, shared=shared_memory(80), fault="XID 79")
    for number, part in enumerate([80, 20]):
        cluster.holds(f"a/{number}", "n", f"gpu-{number}-shared", gib=part)
    full, faulty = cluster.map()[0].gpus
    assert [(str(span.state), span.memory_gib) for span in full.spans] == [("held", 80)]
    assert [(str(span.state), span.memory_gib) for span in faulty.spans] == [("held", 20), ("unavailable", 60)]
