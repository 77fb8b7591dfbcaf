"""Node descriptions: what is known, what a user may write, what is refused and how."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from driver.errors import UsageError
from driver.simulator.description import known_descriptions, load_description, parse_description
from driver.simulator.node import SimulatedNode
from driver.simulator.products import facts, find_product, product_names

ONE_GPU = """
name: mine
product: NVIDIA H100 80GB HBM3
driverVersion: 580.95.05
cudaDriverVersion: "13.0"
gpus:
  - {pciBusId: "0000:0a:00.0", pcieRoot: "pci0000:09"}
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "node.yaml"
    path.write_text(text)
    return str(path)


def test_the_dgx_h100_is_the_one_of_the_facts() -> None:
    fact = next(node for node in facts("node_topologies")["nodes"] if node["name"].startswith("DGX H100"))
    node = load_description("dgx-h100")
    assert [gpu.pci_bus_id for gpu in node.gpus] == [gpu["pci_bus_id"].lower() for gpu in fact["gpus"]]
    assert [gpu.numa_node for gpu in node.gpus] == [gpu["numa_node"] for gpu in fact["gpus"]]
    assert [gpu.cpus for gpu in node.gpus] == [gpu["cpus"] for gpu in fact["gpus"]]
    nics = [(gpu.nic.pci_bus_id, gpu.nic.rdma_device) for gpu in node.gpus if gpu.nic]
    assert nics == [(gpu["rail_nic"]["bdf"], gpu["rail_nic"]["rdma"]) for gpu in fact["gpus"]]
    assert node.nvlink is not None
    assert node.nvlink.links == fact["nvlink"]["links_per_gpu"]


def test_every_known_node_opens(tmp_path: Path) -> None:
    for name, description in known_descriptions().items():
        assert description.name == name
        node = SimulatedNode.open(description, tmp_path / name)
        node.nvml.nvmlInit()
        assert node.nvml.nvmlDeviceGetCount() == len(description.gpus)


def test_a_node_of_ones_own_is_a_yaml_file(tmp_path: Path) -> None:
    description = load_description(written(tmp_path, ONE_GPU))
    assert (description.name, description.gpus[0].numa_node) == ("mine", -1)
    node = SimulatedNode.open(description, tmp_path / "root")
    assert SimulatedNode.attach(tmp_path / "root").description == description
    assert (node.root / "sys/bus/pci/devices/0000:0a:00.0/numa_node").read_text() == "-1\n"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match=r"no simulated node 'dgx-h10', .* dgx-h100, dgx-h200.*; did you mean dgx-h100"
    ):
        load_description("dgx-h10")


def test_every_mistake_in_a_file_is_listed_with_its_place(tmp_path: Path) -> None:
    content = yaml.safe_load(ONE_GPU)
    content["gpus"].append({"pciBusId": "0A:00.0", "pcieRoot": "pci0000:09", "numaNode": "zero"})
    content["colour"] = "green"
    content["product"] = "Voodoo 2"
    content["fabric"] = {"clusterUuid": "one", "cliqueId": -1}
    del content["driverVersion"]
    with pytest.raises(UsageError) as refused:
        load_description(written(tmp_path, yaml.safe_dump(content)))
    message = str(refused.value)
    assert "node.yaml" in message
    for place in (
        "driverVersion:",
        "product: product 'Voodoo 2' is unknown",
        "fabric.clusterUuid:",
        "fabric.cliqueId:",
        "gpus[1].pciBusId:",
        "gpus[1].numaNode:",
        "colour:",
    ):
        assert place in message


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        ("NVIDIA RTX PRO 5000 Blackwell", "geometry unknown"),
        ("Voodoo 2", "product 'Voodoo 2' is unknown; known: Tesla T4"),
    ],
)
def test_a_product_without_known_placements_is_refused(tmp_path: Path, product: str, reason: str) -> None:
    text = ONE_GPU.replace("NVIDIA H100 80GB HBM3", product)
    with pytest.raises(UsageError, match=reason):
        load_description(written(tmp_path, text))


def test_a_gpu_without_mig_needs_no_geometry(tmp_path: Path) -> None:
    node = SimulatedNode.open(
        load_description(written(tmp_path, ONE_GPU.replace("NVIDIA H100 80GB HBM3", "Tesla T4"))), tmp_path / "root"
    )
    node.nvml.nvmlInit()
    gpu = node.nvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(node.nvml.NVMLError_NotSupported):
        node.nvml.nvmlDeviceGetMigMode(gpu)


@pytest.mark.parametrize("product", product_names())
def test_every_product_of_the_facts_is_simulated_or_refused_for_its_geometry(tmp_path: Path, product: str) -> None:
    path = written(tmp_path, ONE_GPU.replace("NVIDIA H100 80GB HBM3", product))
    found = find_product(product)
    assert found is not None
    if found.mig_capable and not found.profiles:
        with pytest.raises(UsageError, match="geometry unknown"):
            load_description(path)
        return
    node = SimulatedNode.open(load_description(path), tmp_path / "root")
    node.nvml.nvmlInit()
    gpu = node.nvml.nvmlDeviceGetHandleByIndex(0)
    assert node.nvml.nvmlDeviceGetName(gpu) == product.partition(" (")[0]
    assert node.nvml.nvmlDeviceGetArchitecture(gpu) != node.nvml.NVML_DEVICE_ARCH_UNKNOWN
    memory = node.nvml.nvmlDeviceGetMemoryInfo(gpu)
    assert 0 < memory.free <= memory.total


def test_two_devices_cannot_have_one_bus_id(tmp_path: Path) -> None:
    twice = ONE_GPU + '  - {pciBusId: "0000:0a:00.0", pcieRoot: "pci0000:09"}\n'
    with pytest.raises(UsageError, match=r"one PCI bus id for two devices: 0000:0a:00\.0"):
        load_description(written(tmp_path, twice))


def test_what_is_not_yaml_is_said_to_be_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not readable as YAML"):
        load_description(written(tmp_path, "gpus: ["))
    with pytest.raises(UsageError, match="not valid"):
        load_description(written(tmp_path, "just words"))


def test_a_description_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        load_description("h100-1").name = "other"  # type: ignore[misc]


def test_the_description_in_the_docs_is_valid() -> None:
    text = (Path(__file__).parents[4] / "docs/simulator.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert parse_description(yaml.safe_load(example), "docs").nics[0].rdma_device == "mlx5_1"
