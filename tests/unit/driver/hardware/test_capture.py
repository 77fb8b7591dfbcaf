"""Descriptions of nodes that NVML and sysfs give: a simulated node made of one looks like the node itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from driver.hardware.host import Host
from driver.hardware.pci_distance import find_nics, place_of
from driver.model.gpu import Gpu
from driver.simulator.description import known_names, load_description
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
