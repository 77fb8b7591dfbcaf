"""Descriptions of nodes that NVML and sysfs give: a simulated node made of one looks like the node itself."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from driver.errors import UsageError
from driver.hardware.host import Host
from driver.hardware.pci_distance import find_nics, place_of
from driver.model.gpu import Gpu
from driver.simulator.description import known_names, load_description, parse_description
from driver.simulator.node import SimulatedNode
from driver.simulator.state.latency import ZERO_LATENCY
from tests.support.node import usual_host


def opened(description: str, root: Path) -> tuple[Host, list[Gpu]]:
    host = usual_host(SimulatedNode.open(load_description(description), root, latency=ZERO_LATENCY))
    return host, list(host.discover().gpus)


def without_identity(gpu: Gpu) -> Gpu:
    """All that a description keeps: serial numbers, and the UUID of an NVLink domain, are left out."""
    clique = gpu.fabric_clique and gpu.fabric_clique.rpartition(".")[2]
    return replace(gpu, uuid="", fabric_clique=clique)


@pytest.mark.parametrize("name", known_names())
def test_a_captured_node_can_be_simulated_and_looks_the_same(name: str, tmp_path: Path) -> None:
    host, gpus = opened(name, tmp_path / "original")
    file = tmp_path / "capture.yaml"
    file.write_text(yaml.safe_dump(host.describe(gpus)))
    _, again = opened(str(file), tmp_path / "simulated")
    assert [without_identity(gpu) for gpu in again] == [without_identity(gpu) for gpu in gpus]
    roots = tmp_path / "original", tmp_path / "simulated"
    assert [[place_of(root, gpu.pci_bus_id) for gpu in gpus] for root in roots[:1]] == [
        [place_of(root, gpu.pci_bus_id) for gpu in again] for root in roots[1:]
    ]
    addresses = [{nic.place.address for nic in find_nics(root)} for root in roots]
    assert addresses[0] == addresses[1]
    opened(str(file), tmp_path / "simulated")  # the directory is recognised


@pytest.mark.parametrize("name", ["dgx-h100", "gb200-nvl72-tray"])
def test_a_capture_has_no_serial_numbers_and_no_uuids(name: str, tmp_path: Path) -> None:
    host, gpus = opened(name, tmp_path)
    text = json.dumps(host.describe(gpus))
    secrets = {gpu.uuid.removeprefix("GPU-") for gpu in gpus}
    secrets |= {gpu.fabric_clique.partition(".")[0] for gpu in gpus if gpu.fabric_clique}
    assert not [secret for secret in secrets if secret in text]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("brand", "TESLLA", "productFacts.brand: 'TESLLA' is unknown: NVML has no NVML_BRAND_TESLLA"),
        ("architecture", "Hoper", "productFacts.architecture: 'Hoper' is unknown: NVML has no NVML_DEVICE_ARCH_HOPER"),
        ("memorySlices", 65, "productFacts: Expected `int` <= 64 - at `$.memorySlices`"),
        ("profiles.name", "x" * 300, "productFacts: Expected `str` matching regex"),
        ("profiles.starts", [8], "productFacts.profiles[0]: 1g.10gb has the starts [8]"),
    ],
)
def test_a_product_that_cannot_be_simulated_is_refused_by_field(
    field: str, value: object, says: str, tmp_path: Path
) -> None:
    host, gpus = opened("h100-1", tmp_path)
    node = host.describe(gpus)
    facts = node["productFacts"]
    place, _, name = field.rpartition(".")
    (facts[place][0] if place else facts)[name] = value
    with pytest.raises(UsageError, match=re.escape(says)):
        parse_description(node, "node.yaml")
