"""What a device says of itself: the table in the docs, the table in the code, and what is published agree."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from driver.model.device import Monitor, devices_of, shared_device
from driver.model.offer import DeviceKind
from driver.model.shared_memory import GIB, SharedMemory, SharingStrategy
from driver.slices.attributes import FACTS, attributes, capacity, monitor_attributes, quantity
from tests.support.gpus import gpu_of
from tests.support.node import NodeUnderTest

DOCS = Path(__file__).parents[4] / "docs" / "attributes.md"
ROW = re.compile(r"^\| `(?P<name>[^`]+)` \| (?P<kind>string|int|bool|version) \| (?P<on>[a-z, -]+) \|", re.MULTILINE)
API_LIMIT = 32


def documented(kind: str) -> dict[str, str]:
    rows = ((row, row["on"].split(", ")) for row in ROW.finditer(DOCS.read_text()))
    return {row["name"]: row["kind"] for row, on in rows if "all" in on or kind in on}


@pytest.mark.parametrize("kind", list(DeviceKind))
def test_the_documented_attributes_are_the_published_ones(kind: DeviceKind) -> None:
    assert documented(kind.value) == {fact.name: fact.kind for fact in FACTS[kind]}


def test_a_monitor_device_tells_its_gpu_and_that_it_is_one(node: NodeUnderTest) -> None:
    gpu = node.node.inventory.gpus[3]
    found = monitor_attributes(Monitor.of(gpu, 3))
    assert set(found) == set(documented("monitor"))
    assert found["type"] == {"string": "monitor"}
    assert found["uuid"] == {"string": gpu.uuid}


@pytest.mark.parametrize("kind", list(DeviceKind))
def test_there_is_room_left_below_the_limit_of_the_api(kind: DeviceKind) -> None:
    assert len(FACTS[kind]) + 2 < API_LIMIT


def test_a_full_h100_tells_everything_but_a_multi_node_fabric(node: NodeUnderTest) -> None:
    full, *_ = devices_of(node.node.inventory.gpus[0], 0)
    found = {name: next(iter(value.values())) for name, value in attributes(full).items()}
    assert set(documented("gpu")) - set(found) == {"fabricClique"}
    assert found["memoryType"] == "HBM3"
    assert found["memoryBandwidth"] == 3352
    assert found["nvlinkClique"] == "clique-0"
    assert (found["nvlinkGeneration"], found["nvlinkLinks"], found["nvlinkBandwidth"]) == (4, 18, 900)
    assert (found["pcieGeneration"], found["pcieWidth"]) == (5, 16)
    assert found["migMode"] == "disabled"
    assert capacity(full) == {"memory": {"value": "81559Mi"}, "multiprocessors": {"value": "132"}}


@pytest.mark.parametrize(
    ("strategy", "cuda", "clients"),
    [
        (SharingStrategy.MPS, "12.4.0", "48"),
        (SharingStrategy.MPS, "13.0.0", "48"),
        (SharingStrategy.MPS, "13.1.0", "60"),
        (SharingStrategy.MPS, "14.0.0", "60"),
        (SharingStrategy.TIME_SLICING, "13.1.0", None),
    ],
)
def test_a_gpu_shared_by_mps_has_room_for_as_many_claims_as_its_server_serves_contexts(
    strategy: SharingStrategy, cuda: str, clients: str | None
) -> None:
    gpu = replace(gpu_of(), cuda_driver_version=cuda)
    amounts = capacity(shared_device(gpu, 0, SharedMemory(strategy, 64 * GIB)))
    each_takes_one = {"default": "1", "validRange": {"min": "1", "max": "1", "step": "1"}}
    assert amounts.get("clients") == (clients and {"value": clients, "requestPolicy": each_takes_one})


def test_a_partition_tells_its_own_size_and_place(node: NodeUnderTest) -> None:
    by_name = {device.name: device for device in devices_of(node.node.inventory.gpus[3], 3)}
    found = attributes(by_name["gpu-3-mig-3g40gb-4"])
    assert found["profile"] == {"string": "3g.40gb"}
    assert found["parentUUID"] == {"string": node.node.inventory.gpus[3].uuid}
    assert [found[name]["int"] for name in ("placementStart", "placementSize", "memorySlices", "computeSlices")] == [
        4,
        4,
        4,
        3,
    ]


def test_a_share_tells_its_gpu_and_how_many_there_are_and_promises_no_memory(node: NodeUnderTest) -> None:
    gpu = node.node.inventory.gpus[3]
    share = {device.name: device for device in devices_of(gpu, 3, shares=10)}["gpu-3-share-9"]
    found = attributes(share)
    assert found["type"] == {"string": "share"}
    assert found["parentUUID"] == {"string": gpu.uuid}
    assert found["shares"] == {"int": 10}
    assert capacity(share) == {}


@pytest.mark.parametrize(
    ("number", "written"),
    [(0, "0"), (132, "132"), (1024, "1Ki"), (81559 << 20, "81559Mi"), (80 << 30, "80Gi"), (1500, "1500")],
)
def test_quantities_are_written_as_the_api_server_would(number: int, written: str) -> None:
    assert quantity(number) == written
