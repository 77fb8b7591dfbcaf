"""``tessera topology``: kept outputs for every node, the facts behind them, and how distances are found."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from driver.hardware.pci_distance import Level, Nic, Place, find_nics, level, links_between, place_of
from driver.model.gpu import NvLink, Placement
from driver.simulator.description import known_descriptions, load_description
from driver.simulator.node import SimulatedNode
from driver.simulator.products import facts
from driver.simulator.state.latency import ZERO_LATENCY
from tests.support.gpus import gpu_of
from tests.support.published import simulated_host
from tests.unit.golden.outputs import FOLDER, kept, printed

NODES = sorted(known_descriptions())
RENEW = "renew them with `python -m tests.unit.golden` and read the difference"


@pytest.mark.parametrize("node", NODES)
def test_the_output_for_every_node_is_the_kept_one(node: str) -> None:
    assert printed("--gpus", f"sim:{node}") == kept(node).read_text(encoding="utf-8"), RENEW


def test_no_output_is_kept_of_a_node_that_is_gone() -> None:
    assert sorted(file.stem for file in FOLDER.glob("*.txt")) == NODES, RENEW


# The facts, read by hand: which row is about which node, and what nvidia-smi's matrix says there.

FACTS = {row["name"]: row for row in facts("node_topologies")["nodes"]}
EVERY_PAIR = tuple(permutations(range(8), 2))
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
SOCKETS = ((0, 1), (2, 3))
MATRICES: dict[str, tuple[str, str, tuple[tuple[int, int], ...], str]] = {
    # node: row of the facts, level of the pairs that follow, level of all the others; "" where the facts don't say
    "dgx-a100": ("DGX A100", "NV12", EVERY_PAIR, ""),
    "dgx-a100-40gb": ("DGX A100", "NV12", EVERY_PAIR, ""),
    "dgx-h100": ("DGX H100 / DGX H200", "NV18", EVERY_PAIR, ""),
    "dgx-h200": ("DGX H100 / DGX H200", "NV18", EVERY_PAIR, ""),
    "hgx-h100": ("HGX H100 8-GPU (capture)", "NV18", EVERY_PAIR, ""),
    "hgx-b200": ("HGX B200 8-GPU (capture)", "NV18", EVERY_PAIR, ""),
    "dgx-b200": ("DGX B200", "NV18", EVERY_PAIR, ""),
    "gb200-nvl72-tray": ("GB200 NVL72 compute tray", "NV18", EVERY_PAIR, ""),
    "gb300-nvl72-tray": ("GB300 NVL72 compute tray", "NV18", EVERY_PAIR, ""),
    "a100-pcie-bridged": ("4x A100 PCIe, 2 sockets, bridged pairs", "NV12", SOCKETS, "SYS"),
    "l40s-8": ("8x L40S, 2 sockets", "PIX", PAIRS, ""),
    "a30-4": ("2-socket 4-GPU PCIe without NVLink", "NODE", SOCKETS, "SYS"),
    "l4-4": ("2-socket 4-GPU PCIe without NVLink", "NODE", SOCKETS, "SYS"),
    "rtx-pro-6000-4": ("2-socket 4-GPU PCIe without NVLink", "NODE", SOCKETS, "SYS"),
    "rtx-pro-6000-8": ("8x RTX PRO 6000 Server Edition (capture)", "SYS", EVERY_PAIR, ""),
}


def as_json(node: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(printed("--gpus", f"sim:{node}", "-o", "json"))
    return found


@pytest.mark.parametrize("node", MATRICES)
def test_the_matrix_says_what_the_facts_say(node: str) -> None:
    row, near, pairs, far = MATRICES[node]
    gpus = as_json(node)
    described = FACTS[row]["gpus"]
    assert [gpu["pciBusID"] for gpu in gpus] == [fact["pci_bus_id"].lower() for fact in described]
    assert [gpu["numaNode"] for gpu in gpus] == [fact["numa_node"] for fact in described]
    for gpu, fact in zip(gpus, described, strict=True):
        assert gpu["cpuAffinity"] == fact.get("cpus", gpu["cpuAffinity"])
    joined = {frozenset(pair) for pair in pairs}
    for one, other in permutations(gpus, 2):
        expected = near if {one["index"], other["index"]} in joined else far
        assert one["gpus"][other["uuid"]] == expected or not expected


def test_gpus_of_one_socket_but_different_switches_meet_at_its_host_bridge() -> None:
    gpus = as_json("l40s-8")
    levels = [gpus[0]["gpus"][gpus[other]["uuid"]] for other in range(1, 8)]
    assert levels == ["PIX", "PHB", "PHB", "SYS", "SYS", "SYS", "SYS"]


@pytest.mark.parametrize("node", ["dgx-h100", "dgx-h200"])
def test_each_gpu_of_a_dgx_is_nearest_to_its_rail_nic(node: str) -> None:
    gpus = as_json(node)
    for gpu, fact in zip(gpus, FACTS["DGX H100 / DGX H200"]["gpus"], strict=True):
        nearest = [name for name, distance in gpu["nics"].items() if distance == "PIX"]
        assert nearest == [fact["rail_nic"]["rdma"]]
        assert set(gpu["nics"].values()) == {"PIX", "NODE", "SYS"}
    storage = {"mlx5_1": "NODE", "mlx5_2": "NODE", "mlx5_7": "SYS", "mlx5_8": "SYS"}
    assert storage.items() <= gpus[0]["nics"].items()


def test_a_pair_of_a_dgx_a100_shares_its_switch_complex_with_two_nics() -> None:
    gpus = as_json("dgx-a100")
    for gpu, fact in zip(gpus[:4], FACTS["DGX A100"]["gpus"][:4], strict=True):
        assert [name for name, distance in gpu["nics"].items() if distance == "PXB"] == fact["nics"]
    assert all(sorted(gpu["nics"].values()) == ["PXB"] * 2 + ["SYS"] * 6 for gpu in gpus)


def test_nics_of_a_gb200_tray_are_near_no_gpu() -> None:
    assert {distance for gpu in as_json("gb200-nvl72-tray") for distance in gpu["nics"].values()} == {"SYS"}


def test_a_gpu_lists_the_mig_profiles_that_it_can_be_cut_into_with_their_number_and_memory() -> None:
    assert {gpu["productName"]: gpu["profiles"] for gpu in as_json("a30-4") + as_json("l4-4")} == {
        "NVIDIA A30": [
            {"name": name, "maxInstances": most, "memoryBytes": mebibytes << 20}
            for name, most, mebibytes in (
                ("1g.6gb", 4, 5952),
                ("2g.12gb", 2, 11968),
                ("4g.24gb", 1, 24000),
                ("1g.6gb+me", 1, 5952),
                ("2g.12gb+me", 1, 11968),
            )
        ],
        "NVIDIA L4": [],
    }


# Rules without a node.

ROOT, OTHER_ROOT = "pci0000:00", "pci0000:40"
PORT, UP, DOWN, SECOND_DOWN = "0000:00:01.0", "0000:01:00.0", "0000:02:00.0", "0000:02:01.0"
LOWER_UP, LOWER_DOWN = "0000:03:00.0", "0000:04:00.0"
GPU, NIC = "0000:07:00.0", "0000:0c:00.0"


def place(address: str, *bridges: str, root: str | None = ROOT, numa: int | None = 0) -> Place:
    return Place(address, root, (*bridges, address) if root else (), numa, None)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        pytest.param(place(GPU, PORT), place(GPU, PORT), Level.SELF, id="itself"),
        pytest.param(place(GPU, PORT), place("0000:07:00.1", PORT), Level.PIX, id="two functions of one card"),
        pytest.param(place(GPU, PORT, UP), place(NIC, PORT, UP), Level.PIX, id="one bus below a switch"),
        pytest.param(
            place(GPU, PORT, UP, DOWN), place(NIC, PORT, UP, SECOND_DOWN), Level.PIX, id="two ports of one switch"
        ),
        pytest.param(
            place(GPU, PORT, UP, DOWN, LOWER_UP, LOWER_DOWN),
            place(NIC, PORT, UP, SECOND_DOWN),
            Level.PXB,
            id="a switch below another",
        ),
        pytest.param(
            place(GPU, PORT, UP, DOWN, LOWER_UP), place(NIC, PORT, UP, DOWN), Level.PIX, id="one bridge further down"
        ),
        pytest.param(
            place(GPU, PORT, UP, DOWN), place(NIC, "0000:00:02.0", "0000:09:00.0"), Level.PHB, id="two root ports"
        ),
        pytest.param(place(GPU), place(NIC), Level.PHB, id="both on the root bus"),
        pytest.param(place(GPU, PORT), place(NIC, PORT, root=OTHER_ROOT), Level.NODE, id="two host bridges of a node"),
        pytest.param(place(GPU, PORT), place(NIC, PORT, root=OTHER_ROOT, numa=1), Level.SYS, id="two NUMA nodes"),
        pytest.param(
            place(GPU, PORT, numa=0), place(NIC, PORT, numa=1), Level.PIX, id="one switch, whatever the kernel says"
        ),
        pytest.param(
            place(GPU, numa=None), place(NIC, root=OTHER_ROOT, numa=None), Level.SYS, id="both NUMA nodes unknown"
        ),
        pytest.param(place(GPU, numa=0), place(NIC, root=OTHER_ROOT, numa=None), Level.SYS, id="one NUMA node unknown"),
        pytest.param(place(GPU, root=None), place(NIC, root=None), Level.NODE, id="roots unknown, one NUMA node"),
        pytest.param(place(GPU, root=None, numa=None), place(NIC), Level.SYS, id="root and NUMA node unknown"),
    ],
)
def test_how_far_two_devices_are_apart(one: Place, other: Place, expected: Level) -> None:
    assert level(one, other) == expected
    assert level(other, one) == expected


A, B = "0000:00:00.0", "0000:01:00.0"


@pytest.mark.parametrize(
    ("one", "other", "links"),
    [
        pytest.param(None, None, 0, id="no NVLink"),
        pytest.param({"switch": 18}, {"switch": 18}, 18, id="through switches"),
        pytest.param({"switch": 18}, {"switch": 16}, 16, id="the narrower one decides"),
        pytest.param({B: 12}, {A: 12}, 12, id="a bridge"),
        pytest.param({B: 12}, {A: 11}, 11, id="a link that is down at one end"),
        pytest.param({B: 12}, {}, 12, id="only one end tells"),
        pytest.param({B: 2, "x": 2}, {A: 2, "y": 2}, 2, id="a mesh"),
        pytest.param({"x": 4}, {"x": 4}, 0, id="only through a third GPU"),
        pytest.param({"switch": 18}, None, 0, id="one without NVLink"),
        pytest.param({"switch": 18}, {"x": 12}, 0, id="one at switches, one bridged"),
    ],
)
def test_links_that_join_two_gpus(one: dict[str, int] | None, other: dict[str, int] | None, links: int) -> None:
    first, second = (
        replace(
            gpu_of(minor=minor),
            nvlink=None if peers is None else NvLink(4, sum(peers.values()), None, peers),
            nvlink_clique=None if peers is None else "clique-0",
        )
        for minor, peers in enumerate((one, other))
    )
    assert (first.pci_bus_id, second.pci_bus_id) == (A, B)
    assert links_between(first, second) == links
    assert links_between(second, first) == links


def test_gpus_of_different_cliques_are_not_joined() -> None:
    link = NvLink(4, 18, 900, {"switch": 18})
    first, second = (replace(gpu_of(minor=n), nvlink=link, nvlink_clique=f"clique-{n}") for n in range(2))
    assert links_between(first, second) == 0


# What the kernel tells.


def test_a_node_without_rdma_has_no_nics(tmp_path: Path) -> None:
    assert find_nics(tmp_path) == []
    SimulatedNode.open(load_description("l40s-8"), tmp_path, latency=ZERO_LATENCY)
    assert find_nics(tmp_path) == []


def test_nics_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    SimulatedNode.open(load_description("dgx-h100"), tmp_path, latency=ZERO_LATENCY)
    assert [nic.name for nic in find_nics(tmp_path)] == [f"mlx5_{number}" for number in range(12)]


def test_a_device_the_kernel_does_not_know_is_placed_nowhere(tmp_path: Path) -> None:
    assert place_of(tmp_path, GPU) == Place(GPU, None, (), None, None)


def test_a_nic_is_placed_by_the_pci_device_behind_it(tmp_path: Path) -> None:
    SimulatedNode.open(load_description("dgx-a100"), tmp_path, latency=ZERO_LATENCY)
    first = find_nics(tmp_path)[0]
    path = ("0000:00:01.0", "0000:01:02.0", "0000:0a:00.0", "0000:0c:00.0")
    assert first == Nic("mlx5_0", Place("0000:0c:00.0", "pci0000:00", path, 3, "48-63,176-191"))


# The command on a node where something is going on.


def test_partitions_are_drawn_where_they_lie(tmp_path: Path) -> None:
    with simulated_host(load_description("h100-1"), tmp_path) as host:
        gpu = host.discover().gpus[0]
        host.set_mig_mode(gpu, enabled=True)
        for name, start in (("3g.40gb", 4), ("1g.10gb", 0)):
            profile = gpu.profile_named(name)
            assert profile is not None
            cut = host.create_gpu_instance(gpu, profile, Placement(start, 4 if start else 1))
            host.create_compute_instance(gpu, cut)
        flags = ("--gpus", "sim:h100-1", "--host-root", str(tmp_path))
        assert "GPU0   [1g.10gb-|........|........|........|3g.40gb----------------------------]" in printed(*flags)
        [found] = json.loads(printed(*flags, "-o", "json"))
        assert found["migMode"] == "enabled"
        assert {(each["profile"], each["start"], each["size"]) for each in found["partitions"]} == {
            ("1g.10gb", 0, 1),
            ("3g.40gb", 4, 4),
        }


def test_a_lost_gpu_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    node = SimulatedNode.open(load_description("a100-pcie-bridged"), tmp_path, latency=ZERO_LATENCY)
    node.faults.lose_gpu(1)
    shown = printed("--gpus", "sim:a100-pcie-bridged", "--host-root", str(tmp_path))
    assert "GPU_IS_LOST" in shown.splitlines()[-1]
    matrix = [line.split() for line in shown.splitlines()[:4]]
    assert matrix[0][:3] == ["GPU0", "GPU2", "GPU3"]
    assert [row[0] for row in matrix[1:]] == ["GPU0", "GPU2", "GPU3"]
    assert matrix[2][1:4] == ["SYS", "X", "NV12"]
