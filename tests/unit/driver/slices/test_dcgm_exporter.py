"""What dcgm-exporter finds in our slices: it labels its metrics with pods by their pool and device."""

from __future__ import annotations

from typing import Any

from driver.config.flag_values import NVIDIA_DRIVER
from driver.model.device import devices_of
from driver.slices.build import PublishedGpu, SliceBuilder, slice_object
from driver.slices.slice_names import Pool
from tests.support.node import NodeUnderTest
from tests.support.published import devices_in

POOL = Pool("node-a", NVIDIA_DRIVER)
MIG = "MIG-8d3f2c1e-0b5a-5c7d-9e4f-1a2b3c4d5e6f"


def read(slices: list[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """By device what it stores (internal/pkg/transformation/dra.go at d5e5f51): of a GPU its UUID, of a MIG device the
    UUID of the GPU, its own, and its profile; of other types nothing."""
    stored: dict[str, tuple[str, ...]] = {}
    for device in devices_in(item for item in slices if item["spec"]["driver"] == "gpu.nvidia.com"):
        strings = {name: value.get("string", "") for name, value in device["attributes"].items()}
        if strings.get("type") == "gpu" and strings.get("uuid"):
            stored[device["name"]] = (strings["uuid"],)
        if strings.get("type") == "mig" and strings.get("parentUUID"):
            names = ("parentUUID", "uuid", "profile")
            stored[device["name"]] = tuple(strings.get(name, "") for name in names)
    return stored


def test_it_finds_gpu_and_partition_by_the_four_attributes_under_nvidias_driver_name(node: NodeUnderTest) -> None:
    gpus = node.node.inventory.gpus[:2]
    full = devices_of(gpus[0], 0)[0]
    partitions = {device.name: device for device in devices_of(gpus[1], 1)}
    held, offered = partitions["gpu-1-mig-1g10gb-0"], partitions["gpu-1-mig-3g40gb-4"]
    published = [
        PublishedGpu(gpus[0], 0, (full,), ()),
        PublishedGpu(gpus[1], 1, (held,), (offered,), mig_uuids={held.name: MIG}),
    ]
    built = SliceBuilder(POOL).build(published)
    slices = [slice_object(name, content, POOL, 1, len(built), None) for name, content in built.items()]
    assert {item["spec"]["pool"]["name"] for item in slices} == {"node-a-gpu.nvidia.com"}
    assert read(slices) == {
        full.name: (gpus[0].uuid,),
        held.name: (gpus[1].uuid, MIG, "1g.10gb"),
        offered.name: (gpus[1].uuid, "", "3g.40gb"),
    }
