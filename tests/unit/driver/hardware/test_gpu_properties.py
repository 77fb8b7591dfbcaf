"""Discovery: the facts of each GPU, whatever one of them, an old driver or the kernel does not say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from driver.errors import EnvironmentFault, HardwareError
from driver.hardware.gpu_properties import semantic_version
from driver.hardware.host import Discovery, Host, load_nvml
from driver.hardware.host_paths import HostPaths
from driver.hardware.pci_distance import numa_node, pci_address, pcie_root
from driver.model.device import number_gpus
from driver.model.gpu import MigMode, Placement
from driver.simulator.description import load_description
from driver.simulator.node import SimulatedNode
from driver.simulator.products import facts
from driver.simulator.state.latency import ZERO_LATENCY
from tests.harness.waiting import wait_for
from tests.support.gpus import H100, gpu_of


class Altered:
    """The simulator's functions, some of them replaced."""

    def __init__(self, nvml: Any, **functions: Callable[..., Any]) -> None:
        self._nvml = nvml
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        return self._functions.get(name) or getattr(self._nvml, name)


@pytest.fixture
def simulated(tmp_path: Path) -> SimulatedNode:
    return SimulatedNode.open(load_description("dgx-h100"), tmp_path, latency=ZERO_LATENCY)


def host_of(node: SimulatedNode, **functions: Callable[..., Any]) -> Host:
    return Host(Altered(node.nvml, **functions), HostPaths(node.root, node.root), simulated=True)


def discover(node: SimulatedNode, **functions: Callable[..., Any]) -> Discovery:
    return host_of(node, **functions).discover()


def fails(code: int) -> Callable[..., Any]:
    def function(*_: object) -> Any:
        raise pynvml.NVMLError(code)

    return function


def test_the_facts_of_a_gpu_are_those_of_its_product_and_place(simulated: SimulatedNode) -> None:
    found = discover(simulated)
    assert found.faults == ()
    row = next(row for row in facts("gpu_products")["products"] if row["product"].startswith(H100))
    described = simulated.description.gpus
    assert [gpu.minor for gpu in found.gpus] == list(range(8))
    for gpu, place in zip(found.gpus, described, strict=True):
        assert gpu.product_name == H100
        assert gpu.architecture == row["architecture"]
        assert gpu.cuda_compute_capability == f"{row['cuda_compute_capability']}.0"
        assert gpu.memory_bytes == row["nvml_total_memory_mib"] << 20
        assert gpu.multiprocessors == row["sm_count"]
        assert gpu.pci_bus_id == place.pci_bus_id
        assert gpu.pcie_root == place.pcie_root
        assert gpu.numa_node == place.numa_node
        assert (gpu.mig_capable, gpu.mig_mode, gpu.simulated) == (True, MigMode.DISABLED, True)


def test_the_mig_geometry_is_that_of_the_facts(simulated: SimulatedNode) -> None:
    row = next(row for row in facts("mig_geometry")["products"] if row["product"] == H100)
    gpu = discover(simulated).gpus[0]
    expected = {
        profile["name"]: (
            profile["gi_profile_id"],
            profile["max_instances"],
            tuple(Placement(place["start"], place["size"]) for place in profile["placements"]),
        )
        for profile in row["profiles"]
    }
    assert {p.name: (p.id, p.max_instances, p.placements) for p in gpu.profiles} == expected
    assert gpu.memory_slices == 8


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMigMode"],
)
def test_one_gpu_that_fails_is_named_and_hides_no_other(simulated: SimulatedNode, function: str) -> None:
    original = getattr(simulated.nvml, function)
    broken = None if function.endswith("Index") else simulated.nvml.nvmlDeviceGetHandleByIndex

    def lost(first: Any, *more: Any) -> Any:
        index = first if broken is None else simulated.nvml.nvmlDeviceGetMinorNumber(first)
        if index == 3:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return original(first, *more)

    simulated.nvml.nvmlInit()
    found = discover(simulated, **{function: lost})
    assert [gpu.index for gpu in found.gpus] == [0, 1, 2, 4, 5, 6, 7]
    [fault] = found.faults
    assert str(fault) == "GPU index 3"
    assert "GPU_IS_LOST" in fault.reason
    assert "reboot" in fault.reason


@pytest.mark.parametrize(
    ("function", "field", "value"),
    [
        ("nvmlDeviceGetBrand", "brand", "Unknown"),
        ("nvmlDeviceGetArchitecture", "architecture", "Unknown"),
        ("nvmlDeviceGetMigMode", "mig_capable", False),
        ("nvmlDeviceGetGpuInstanceProfileInfo", "profiles", ()),
    ],
)
@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NOT_SUPPORTED])
def test_an_older_driver_or_gpu_lacks_a_fact_and_no_more(
    simulated: SimulatedNode, function: str, field: str, value: object, code: int
) -> None:
    found = discover(simulated, **{function: fails(code)})
    assert len(found.gpus) == 8
    assert {getattr(gpu, field) for gpu in found.gpus} == {value}


def test_a_gpu_without_mig_has_one_memory_slice(simulated: SimulatedNode) -> None:
    gpu = discover(simulated, nvmlDeviceGetMigMode=fails(pynvml.NVML_ERROR_NOT_SUPPORTED)).gpus[0]
    assert (gpu.memory_slices, gpu.all_slices, gpu.mig_mode) == (1, 1, MigMode.UNSUPPORTED)


def test_where_the_kernel_says_minus_one_there_is_no_numa_node(simulated: SimulatedNode) -> None:
    address = simulated.description.gpus[0].pci_bus_id
    path = simulated.root / "sys/bus/pci/devices" / address / "numa_node"
    path.chmod(0o644)
    path.write_text("-1\n")
    assert discover(simulated).gpus[0].numa_node is None


def test_a_device_that_sysfs_does_not_know_has_neither_root_nor_node(tmp_path: Path) -> None:
    assert numa_node(tmp_path, "0000:00:00.0") is None
    assert pcie_root(tmp_path, "0000:00:00.0") is None


@pytest.mark.parametrize(
    ("nvml", "kernel"), [("00000000:1B:00.0", "0000:1b:00.0"), ("0000000A:01:00.0", "000a:01:00.0")]
)
def test_bus_ids_are_spelled_as_the_kernel_does(nvml: str, kernel: str) -> None:
    assert pci_address(nvml) == kernel


@pytest.mark.parametrize(
    ("version", "semantic"),
    [("580.95.05", "580.95.5"), ("550.54", "550.54.0"), ("570.1.2.3", "570.1.2"), ("595", "595.0.0")],
)
def test_driver_versions_become_semantic_versions(version: str, semantic: str) -> None:
    assert semantic_version(version) == semantic


def test_held_names_stay_when_minors_move() -> None:
    first, second, third = (gpu_of(H100, minor) for minor in range(3))
    assert number_gpus([first, second, third], {}) == {"GPU-0": 0, "GPU-1": 1, "GPU-2": 2}
    # GPU-2 held number 0 from an earlier boot; who has minor 0 now takes the next free one.
    assert number_gpus([first, second, third], {"GPU-2": 0}) == {"GPU-2": 0, "GPU-0": 1, "GPU-1": 2}
    assert number_gpus([first], {"GPU-gone": 0}) == {"GPU-0": 1}


def test_nvml_that_does_not_start_says_what_to_do(simulated: SimulatedNode) -> None:
    with pytest.raises(EnvironmentFault, match=r"DRIVER_NOT_LOADED.*kernel module.*--gpus sim:dgx-h100"):
        host_of(simulated, nvmlInit=fails(pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
    with pytest.raises(EnvironmentFault, match=r"--nvml-library /nowhere\.so: can't be loaded"):
        load_nvml(Path("/nowhere.so"))


def test_gpus_that_cannot_be_counted_are_a_hardware_error(simulated: SimulatedNode) -> None:
    with pytest.raises(HardwareError, match="counting GPUs: NVML says UNKNOWN"):
        discover(simulated, nvmlDeviceGetCount=fails(pynvml.NVML_ERROR_UNKNOWN))


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_IN_USE])
def test_a_mode_that_was_not_activated_is_an_error(simulated: SimulatedNode, code: int) -> None:
    host = host_of(simulated, nvmlDeviceSetMigMode=lambda *_: code)
    with pytest.raises(HardwareError) as refused:
        host.set_mig_mode(host.discover().gpus[0], enabled=True)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "the loaded kernel module is older than the libraries: reboot"),
        (pynvml.NVML_ERROR_UNKNOWN, "dmesg"),
        (pynvml.NVML_ERROR_IN_USE, "dcgm-exporter or nvidia-persistenced"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, "or reboot the node where a reset is not supported"),
    ],
)
def test_an_error_of_nvml_says_what_helps(simulated: SimulatedNode, code: int, remedy: str) -> None:
    with pytest.raises(HardwareError, match=remedy):
        discover(simulated, nvmlDeviceGetCount=fails(code))


def test_a_mode_that_is_only_pending_after_success_is_an_error(simulated: SimulatedNode) -> None:
    host = host_of(simulated, nvmlDeviceSetMigMode=lambda *_: pynvml.NVML_SUCCESS)
    with pytest.raises(HardwareError, match=r"switching MIG mode on on GPU-.*only pending; the GPU needs a reset"):
        host.set_mig_mode(host.discover().gpus[0], enabled=True)


def test_missing_device_nodes_and_capability_files_are_named(simulated: SimulatedNode) -> None:
    host = host_of(simulated)
    gpu = host.discover().gpus[0]
    host.set_mig_mode(gpu, enabled=True)
    profile = gpu.profile_named("1g.10gb")
    assert profile is not None
    partition = host.create_compute_instance(gpu, host.create_gpu_instance(gpu, profile, Placement(0, 1)))
    assert len([node for node in host.nodes.of_partition(gpu, partition) if node.major is not None]) == 2
    (simulated.root / "dev/nvidia-uvm").unlink()
    with pytest.raises(HardwareError, match=r"device node /dev/nvidia-uvm is missing under .*nvidia-modprobe"):
        host.nodes.of_gpu(gpu)
    (simulated.root / "proc/devices").unlink()
    with pytest.raises(HardwareError, match=r"can't read .*/proc/devices: No such file"):
        host.nodes.of_partition(gpu, partition)


@pytest.mark.long
def test_a_gpu_that_hangs_keeps_nobody_waiting_for_the_others(
    simulated: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driver.hardware.host.GPU_ANSWER_TIMEOUT_SECONDS", 2.0)
    go_on = threading.Event()

    def hangs(handle: Any) -> str:
        uuid = str(simulated.nvml.nvmlDeviceGetUUID(handle))
        assert uuid != simulated.description.gpu_uuid(3) or go_on.wait(60)
        return uuid

    host = host_of(simulated, nvmlDeviceGetUUID=hangs)
    first, second = host.discover(), host.discover()
    assert [[gpu.index for gpu in each.gpus] for each in (first, second)] == [[0, 1, 2, 4, 5, 6, 7]] * 2
    assert [fault.reason for fault in (*first.faults, *second.faults)] == [
        "it did not answer within 2 s",
        "it has not answered for more than 2 s",
    ]
    go_on.set()
    wait_for(lambda: len(host.discover().gpus) == 8, 60, "the GPU to be found again")
    host.close()
