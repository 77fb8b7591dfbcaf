"""Slices of every product: the real API server takes them as they are, and gives back what was sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from driver.model.device import devices_of
from driver.simulator.description import MAX_GPUS, known_descriptions, load_description
from tests.harness.cluster import Cluster
from tests.support.control_plane import control_plane
from tests.support.plugin import SLICES
from tests.support.published import devices_in, discover, slices_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.needs("shared counters")]

DEVICES_PER_SLICE = 64
"""Of a slice whose devices consume counters."""
COUNTER_SETS_PER_SLICE = 8
COUNTERS_PER_SET = 32
FACTS_PER_DEVICE = 32
"""Attributes and capacities together."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("products") as running:
        yield running


def stored(cluster: Cluster, slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The slices as the API server gives them back after it was sent ``slices``; it forgets them again."""
    try:
        for item in slices:
            cluster.api.post(SLICES, item)
        return [cluster.api.get(f"{SLICES}/{item['metadata']['name']}") for item in slices]
    finally:
        cluster.api.request("DELETE", SLICES)


def keeps_within_the_limits(slices: list[dict[str, Any]]) -> None:
    for item in slices:
        spec = item["spec"]
        assert ("devices" in spec) != ("sharedCounters" in spec)
        assert len(spec.get("devices") or ()) <= DEVICES_PER_SLICE
        assert len(spec.get("sharedCounters", ())) <= COUNTER_SETS_PER_SLICE
        assert all(len(counters["counters"]) <= COUNTERS_PER_SET for counters in spec.get("sharedCounters", ()))
        assert spec["pool"]["resourceSliceCount"] == len(slices)
    devices = list(devices_in(slices))
    # A full GPU has room left for facts of later versions.
    assert max(len(device["attributes"]) + len(device["capacity"]) for device in devices) < FACTS_PER_DEVICE
    assert set(Counter(device["name"] for device in devices).values()) == {1}


@pytest.mark.parametrize("name", sorted(known_descriptions()))
def test_the_api_server_keeps_the_slices_of_every_product_unchanged(
    cluster: Cluster, tmp_path: Path, name: str
) -> None:
    gpus = discover(load_description(name), tmp_path)
    sent = slices_of(name, gpus)
    assert len(list(devices_in(sent))) == sum(len(devices_of(gpu, gpu.minor)) for gpu in gpus)
    keeps_within_the_limits(sent)
    assert [item["spec"] for item in stored(cluster, sent)] == [item["spec"] for item in sent]


def node_of_64_gpus(path: Path) -> None:
    """A description of a node with as many H100 as a node may have, each behind a root of its own."""
    gpus = [
        {"pciBusId": f"{i // 32:04x}:{i % 32 * 8 + 1:02x}:00.0", "pcieRoot": f"pci{i // 32:04x}:{i % 32 * 8:02x}"}
        | {"numaNode": i // 8, "nvlinkClique": 0}
        for i in range(MAX_GPUS)
    ]
    node = {
        "name": "made-up",
        "product": "NVIDIA H100 80GB HBM3",
        "driverVersion": "580.95.05",
        "cudaDriverVersion": "13.0",
        "nvlink": {"links": 18, "switches": ["0000:ff:00.0"]},
        "gpus": gpus,
    }
    path.write_text(yaml.safe_dump(node))


def test_sixty_four_gpus_in_one_node_stay_within_all_limits(cluster: Cluster, tmp_path: Path) -> None:
    node_of_64_gpus(tmp_path / "node.yaml")
    gpus = discover(load_description(str(tmp_path / "node.yaml")), tmp_path / "host")
    assert len(gpus) == MAX_GPUS
    sent = slices_of("made-up", gpus)
    keeps_within_the_limits(sent)
    devices = Counter(device["name"].split("-mig-")[0] for device in devices_in(sent))
    assert devices == {f"gpu-{number}": 26 for number in range(MAX_GPUS)}
    assert [item["spec"] for item in stored(cluster, sent)] == [item["spec"] for item in sent]
