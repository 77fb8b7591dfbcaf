"""The nodes that come with Tessera, seen through NVML and sysfs and compared with the facts."""

from __future__ import annotations

from ctypes import byref
from pathlib import Path
from typing import Any

import pynvml
import pytest

from driver.hardware.host import Host
from driver.hardware.host_paths import HostPaths
from driver.hardware.pci_distance import Level, level, links_between, place_of
from driver.simulator.description import known_descriptions, load_description
from driver.simulator.node import SimulatedNode
from driver.simulator.products import facts, find_product, product_names
from driver.simulator.state.latency import ZERO_LATENCY

NODES = known_descriptions()

FACTS_OF = {
    "dgx-a100": "DGX A100",
    "dgx-h200": "DGX H100 / DGX H200",
    "hgx-h100": "HGX H100 8-GPU (capture)",
    "hgx-b200": "HGX B200 8-GPU (capture)",
    "dgx-b200": "DGX B200",
    "gb200-nvl72-tray": "GB200 NVL72 compute tray",
    "gb300-nvl72-tray": "GB300 NVL72 compute tray",
    "a100-pcie-bridged": "4x A100 PCIe, 2 sockets, bridged pairs",
    "l40s-8": "8x L40S, 2 sockets",
    "a30-4": "2-socket 4-GPU PCIe without NVLink",
    "rtx-pro-6000-8": "8x RTX PRO 6000 Server Edition (capture)",
}


def opened(name: str, root: Path, **changes: object) -> SimulatedNode:
    description = load_description(name).replaced(**changes)
    node = SimulatedNode.open(description, root, latency=ZERO_LATENCY)
    node.nvml.nvmlInit()
    return node


def handles(node: SimulatedNode) -> list[Any]:
    return [node.nvml.nvmlDeviceGetHandleByIndex(index) for index in range(node.nvml.nvmlDeviceGetCount())]


def levels(node: SimulatedNode, *pairs: tuple[int, int]) -> list[Level]:
    places = [place_of(node.root, gpu.pci_bus_id) for gpu in node.gpus]
    return [level(places[one], places[other]) for one, other in pairs]


def linked(node: SimulatedNode, one: int, other: int) -> bool:
    gpus = Host(node.nvml, HostPaths(node.root, node.root), simulated=True).discover().gpus
    return links_between(gpus[one], gpus[other]) > 0


def fabric(node: SimulatedNode, index: int) -> Any:
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    node.nvml.nvmlDeviceGetGpuFabricInfoV(handles(node)[index], byref(info))
    return info


@pytest.mark.parametrize(("name", "row"), FACTS_OF.items())
def test_bus_ids_and_numa_nodes_are_those_of_the_facts(name: str, row: str) -> None:
    fact = next(node for node in facts("node_topologies")["nodes"] if node["name"] == row)
    node = NODES[name]
    assert [gpu.pci_bus_id for gpu in node.gpus] == [gpu["pci_bus_id"].lower() for gpu in fact["gpus"]]
    numa = [-1 if gpu["numa_node"] is None else gpu["numa_node"] for gpu in fact["gpus"]]
    assert [gpu.numa_node for gpu in node.gpus] == numa
    assert (node.nvlink.links if node.nvlink else None) == fact["nvlink"].get("links_per_gpu")


def test_there_is_a_node_for_every_product_that_can_be_simulated() -> None:
    possible = {name for name in product_names() if (p := find_product(name)) and (p.profiles or not p.mig_capable)}
    assert {node.product for node in NODES.values()} == possible
    assert len({node.gpu_product.profiles for node in NODES.values() if node.gpu_product.profiles}) >= 16


# The facts have one card for both H20; it is that of the 96 GB variant.
@pytest.mark.parametrize("product", sorted({node.product for node in NODES.values()} - {"NVIDIA H20 (141GB)"}))
def test_clock_and_bus_width_give_the_published_bandwidth(product: str) -> None:
    found = find_product(product)
    assert found is not None
    bandwidth = 2 * found.memory_clock_mhz * found.memory_bus_bits / 8000
    assert bandwidth == pytest.approx(found.memory_bandwidth, rel=0.03)


@pytest.mark.parametrize("name", NODES)
def test_every_read_only_call_is_answered_on_every_node(name: str, tmp_path: Path) -> None:
    description = NODES[name]
    node = opened(name, tmp_path, gpus=description.gpus[:2])
    nvml = node.nvml
    for gpu in handles(node):
        assert nvml.nvmlDeviceGetName(gpu) == description.gpu_product.name
        assert nvml.nvmlDeviceGetMemoryBusWidth(gpu) > 0
        assert nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM) > 0
        assert nvml.nvmlDeviceGetBrand(gpu) > 0
        assert nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu) <= description.gpu_product.pcie_generation
        for index in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
            try:
                info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, index)
            except pynvml.NVMLError_NotSupported:
                continue
            assert 0 < info.memorySizeMB < description.gpu_product.memory_mib
            assert 0 < info.multiprocessorCount <= description.gpu_product.multiprocessors


def test_pairs_of_a_dgx_a100_share_a_switch_complex_with_their_nics(tmp_path: Path) -> None:
    node = opened("dgx-a100", tmp_path)
    assert levels(node, (0, 1), (0, 2), (6, 7)) == [Level.PXB, Level.SYS, Level.PXB]
    root = (node.root / "sys/class/infiniband/mlx5_0").resolve().parts
    assert "pci0000:00" in root
    assert linked(node, 0, 7)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        fabric(node, 0)


def test_gpus_behind_one_switch_are_pix_and_those_of_a_socket_phb(tmp_path: Path) -> None:
    node = opened("l40s-8", tmp_path)
    assert levels(node, (0, 1), (0, 2), (0, 4)) == [Level.PIX, Level.PHB, Level.SYS]
    assert not linked(node, 0, 1)


def test_a_bridge_joins_two_gpus_only(tmp_path: Path) -> None:
    node = opened("a100-pcie-bridged", tmp_path)
    assert levels(node, (0, 1), (2, 3), (1, 2)) == [Level.NODE, Level.NODE, Level.SYS]
    assert [linked(node, 0, other) for other in (1, 2, 3)] == [True, False, False]
    gpus = handles(node)
    for link in range(12):
        assert node.nvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpus[0], link) == pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
        assert node.nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpus[0], link).busId == "00000000:65:00.0"


def test_pcie_gpus_without_nvlink_have_no_link_at_all(tmp_path: Path) -> None:
    node = opened("a30-4", tmp_path)
    assert levels(node, (0, 1), (2, 3), (0, 3)) == [Level.NODE, Level.NODE, Level.SYS]
    with pytest.raises(pynvml.NVMLError_NotSupported):
        node.nvml.nvmlDeviceGetNvLinkState(handles(node)[0], 0)


@pytest.mark.parametrize("name", ["gb200-nvl72-tray", "gb300-nvl72-tray"])
def test_a_rack_tray_belongs_to_a_fabric_of_its_own_cluster(name: str, tmp_path: Path) -> None:
    node = opened(name, tmp_path)
    clusters = {(bytes(fabric(node, index).clusterUuid), fabric(node, index).cliqueId) for index in range(4)}
    assert len(clusters) == 1
    assert clusters.pop()[0] != bytes(16)
    gpu = handles(node)[2]
    assert node.nvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, 17) == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
    with pytest.raises(pynvml.NVMLError_NotSupported):
        node.nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, 0)


def test_gb300_keeps_its_pci_domains(tmp_path: Path) -> None:
    node = opened("gb300-nvl72-tray", tmp_path)
    buses = [node.nvml.nvmlDeviceGetPciInfo(gpu).busId for gpu in handles(node)]
    assert buses == ["00000008:06:00.0", "00000009:06:00.0", "00000018:06:00.0", "00000019:06:00.0"]
    assert (node.root / "sys/bus/pci/devices/0019:06:00.0/numa_node").read_text() == "1\n"


def test_gb200_runs_its_pcie_below_what_it_can(tmp_path: Path) -> None:
    node = opened("gb200-nvl72-tray", tmp_path)
    gpu = handles(node)[0]
    assert node.description.gpu_product.pcie_generation == 6
    assert node.nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu) == 5


@pytest.mark.parametrize(("name", "version"), [("v100-4", 2), ("dgx-a100", 5), ("hgx-h100", 6), ("hgx-b200", 7)])
def test_nvlink_version_is_nvmls(name: str, version: int, tmp_path: Path) -> None:
    node = opened(name, tmp_path)
    assert node.nvml.nvmlDeviceGetNvLinkVersion(handles(node)[0], 0) == version


def test_fields_are_read_with_or_without_a_scope_and_fail_one_by_one(tmp_path: Path) -> None:
    node = opened("gh200", tmp_path)
    wanted = [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, (pynvml.NVML_FI_DEV_ECC_CURRENT, 0), 99999]
    values = node.nvml.nvmlDeviceGetFieldValues(handles(node)[0], wanted)
    assert [value.fieldId for value in values] == [wanted[0], pynvml.NVML_FI_DEV_ECC_CURRENT, 99999]
    refusals = [pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT]
    assert [value.nvmlReturn for value in values] == refusals
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        node.nvml.nvmlDeviceGetFieldValues(handles(node)[0], [])


def test_ecc_may_be_off(tmp_path: Path) -> None:
    node = opened("t4-4", tmp_path, ecc=False)
    assert node.nvml.nvmlDeviceGetEccMode(handles(node)[0]) == [0, 0]


def test_an_unfinished_fabric_says_so(tmp_path: Path) -> None:
    description = load_description("hgx-h100")
    assert description.fabric is not None
    waiting = description.fabric.replaced(state="in-progress")
    node = opened("hgx-h100", tmp_path, fabric=waiting)
    assert fabric(node, 0).state == pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS
