"""The simulated module looks like pynvml: names, signatures, structs, errors, handles."""

from __future__ import annotations

import inspect
import re
from ctypes import ArgumentError, byref, c_uint, pointer
from pathlib import Path
from types import FunctionType
from typing import Any

import pynvml
import pytest

from driver.simulator.description import load_description
from driver.simulator.node import SimulatedNode
from driver.simulator.nvml import SimulatedNvml
from driver.simulator.state.latency import ZERO_LATENCY
from tests.support.nvml_client import G1, G3, create, cut, enable_mig, one_h100, process_on, start_process

SIMULATED = sorted(name for name in dir(SimulatedNvml) if name.startswith("nvml"))
NOT_SIMULATED = sorted(
    name
    for name, value in vars(pynvml).items()
    if isinstance(value, FunctionType) and name.startswith(("nvml", "c_nvml")) and name not in SIMULATED
)
PURE = {"nvmlExceptionClass", "nvmlStructToFriendlyObject", "nvmlFriendlyObjectToStruct"}


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> SimulatedNvml:
    """A DGX H100 that the tests only look at."""
    root = tmp_path_factory.mktemp("dgx-h100")
    node = SimulatedNode.open(load_description("dgx-h100"), root, latency=ZERO_LATENCY)
    node.nvml.nvmlInit()
    return node.nvml


@pytest.fixture(scope="module")
def gpu(nvml: SimulatedNvml) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(0)


@pytest.fixture
def own(tmp_path: Path) -> SimulatedNvml:
    """An H100 of the test's own, to change."""
    return one_h100(tmp_path).nvml


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", SIMULATED)
def test_each_simulated_function_has_pynvmls_signature(name: str) -> None:
    assert parameters(getattr(SimulatedNvml, name))[1:] == parameters(getattr(pynvml, name))


def test_no_function_of_pynvml_reaches_a_real_library(nvml: SimulatedNvml) -> None:
    assert len(NOT_SIMULATED) > 200
    for name in set(NOT_SIMULATED) - PURE:
        with pytest.raises(pynvml.NVMLError_FunctionNotFound):
            getattr(nvml, name)()


def test_constants_structs_and_exceptions_are_pynvmls_own(nvml: SimulatedNvml) -> None:
    assert nvml.NVML_ERROR_IN_USE == 19
    assert nvml.c_nvmlGpuInstancePlacement_t is pynvml.c_nvmlGpuInstancePlacement_t
    assert nvml.NVMLError_NotFound is pynvml.NVMLError_NotFound
    assert nvml.nvmlExceptionClass(19) is pynvml.NVMLError_InUse


def test_what_pynvml_lacks_is_no_attribute_here_either(nvml: SimulatedNvml) -> None:
    with pytest.raises(AttributeError):
        nvml.nvmlDeviceMakeCoffee  # noqa: B018 - reading it is the test


def test_before_init_and_after_the_last_shutdown_everything_is_uninitialized(own: SimulatedNvml) -> None:
    own.nvmlInit()
    own.nvmlShutdown()
    assert own.nvmlDeviceGetCount() == 1
    own.nvmlShutdown()
    for call in (own.nvmlDeviceGetCount, own.nvmlSystemGetDriverVersion, own.nvmlShutdown):
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            call()


def test_the_node_introduces_itself(nvml: SimulatedNvml, gpu: Any) -> None:
    assert nvml.nvmlSystemGetDriverVersion() == "580.95.05"
    assert nvml.nvmlSystemGetCudaDriverVersion_v2() == 13000
    assert nvml.nvmlDeviceGetName(gpu) == "NVIDIA H100 80GB HBM3"
    assert nvml.nvmlDeviceGetCudaComputeCapability(gpu) == (9, 0)
    assert nvml.nvmlDeviceGetArchitecture(gpu) == nvml.NVML_DEVICE_ARCH_HOPPER
    assert nvml.nvmlDeviceGetBrand(gpu) == nvml.NVML_BRAND_NVIDIA
    assert nvml.nvmlDeviceGetEccMode(gpu) == [1, 1]
    assert nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu) == 5
    assert nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu) == 16


def test_memory_bandwidth_computed_from_clock_and_width_is_the_published_one(nvml: SimulatedNvml, gpu: Any) -> None:
    clock = nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM)
    assert 2 * clock * nvml.nvmlDeviceGetMemoryBusWidth(gpu) // 8000 == 3352


def test_memory_info_is_that_of_the_product(nvml: SimulatedNvml, gpu: Any) -> None:
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2)
    free = 81559 * 2**20 - memory.reserved
    assert (memory.total, memory.reserved, memory.used, memory.free) == (81559 * 2**20, 615 * 2**20, 0, free)


def test_the_first_version_of_memory_info_counts_the_drivers_reserve_as_used(nvml: SimulatedNvml, gpu: Any) -> None:
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    assert (memory.total, memory.used, memory.free) == (81559 * 2**20, 615 * 2**20, (81559 - 615) * 2**20)


def test_a_wrong_struct_version_is_refused(nvml: SimulatedNvml, gpu: Any) -> None:
    with pytest.raises(pynvml.NVMLError) as refused:
        nvml.nvmlDeviceGetMemoryInfo(gpu, 0x3000028)
    assert refused.value.value == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
    with pytest.raises(pynvml.NVMLError_FunctionNotFound):
        nvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0, version=9)


def test_gpus_are_found_by_index_and_uuid(nvml: SimulatedNvml) -> None:
    for index in range(8):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(gpu)
        found = [
            nvml.nvmlDeviceGetHandleByUUID(uuid),
            nvml.nvmlDeviceGetHandleByUUID(uuid.encode()),
        ]
        assert {nvml.nvmlDeviceGetMinorNumber(handle) for handle in (gpu, *found)} == {index}


def test_pci_info_has_nvmls_spelling(nvml: SimulatedNvml, gpu: Any) -> None:
    info = nvml.nvmlDeviceGetPciInfo(gpu)
    assert (info.busId, info.busIdLegacy) == ("00000000:1B:00.0", "0000:1B:00.0")
    assert (info.domain, info.bus, info.device, info.pciDeviceId) == (0, 0x1B, 0, 0x233010DE)


def test_gpu_uuids_are_the_same_on_every_machine_that_runs_the_node(tmp_path: Path, nvml: SimulatedNvml) -> None:
    other = SimulatedNode.open(load_description("dgx-h100"), tmp_path / "other", latency=ZERO_LATENCY).nvml
    other.nvmlInit()

    def uuids(nvml: SimulatedNvml) -> list[str]:
        return [nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(8)]

    assert uuids(nvml) == uuids(other)
    assert len(set(uuids(nvml))) == 8


@pytest.mark.parametrize(
    ("call", "failure"),
    [
        (lambda n: n.nvmlDeviceGetHandleByIndex(8), pynvml.NVMLError_InvalidArgument),
        (lambda n: n.nvmlDeviceGetHandleByIndex(-1), pynvml.NVMLError_InvalidArgument),
        (lambda n: n.nvmlDeviceGetHandleByIndex("0"), ArgumentError),
        (lambda n: n.nvmlDeviceGetHandleByUUID(None), pynvml.NVMLError_InvalidArgument),
        (lambda n: n.nvmlDeviceGetHandleByUUID("GPU-1"), pynvml.NVMLError_InvalidArgument),
        (lambda n: n.nvmlDeviceGetHandleByUUID(7), TypeError),
        (
            lambda n: n.nvmlDeviceGetHandleByUUID("MIG-00000000-0000-0000-0000-000000000000"),
            pynvml.NVMLError_NotFound,
        ),
        (lambda n: n.nvmlDeviceGetName(None), pynvml.NVMLError_InvalidArgument),
        (lambda n: n.nvmlDeviceGetName(0), pynvml.NVMLError_InvalidArgument),
        (lambda n: n.nvmlDeviceGetName(pynvml.c_nvmlDevice_t()), pynvml.NVMLError_InvalidArgument),
        (lambda n: n.nvmlGpuInstanceGetInfo(n.nvmlDeviceGetHandleByIndex(0)), pynvml.NVMLError_InvalidArgument),
        (
            lambda n: n.nvmlDeviceGetMaxClockInfo(n.nvmlDeviceGetHandleByIndex(0), 99),
            pynvml.NVMLError_InvalidArgument,
        ),
        (
            lambda n: n.nvmlDeviceSetMigMode(n.nvmlDeviceGetHandleByIndex(0), 2),
            pynvml.NVMLError_InvalidArgument,
        ),
    ],
)
def test_wrong_arguments_are_refused_as_nvml_does(nvml: SimulatedNvml, call: Any, failure: type[Exception]) -> None:
    with pytest.raises(failure):
        call(nvml)


def test_handles_of_one_node_mean_nothing_to_another(tmp_path: Path, gpu: Any) -> None:
    stranger = one_h100(tmp_path / "stranger").nvml
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        stranger.nvmlDeviceGetName(gpu)


def test_handles_survive_being_kept_in_c_structs_and_arrays(own: SimulatedNvml) -> None:
    device = enable_mig(own)
    partition = cut(own, device, G3, 0, 4)
    array = (pynvml.c_nvmlGpuInstance_t * 1)(partition.gpu_instance)
    info = own.nvmlComputeInstanceGetInfo_v2(partition.compute_instance)
    same = [partition.gpu_instance, array[0], info.gpuInstance]
    assert len({own.nvmlGpuInstanceGetInfo(handle).id for handle in same}) == 1
    assert own.nvmlDeviceGetUUID(own.nvmlGpuInstanceGetInfo(array[0]).device) == own.nvmlDeviceGetUUID(device)


def test_placements_are_taken_by_reference_or_pointer_never_by_value(own: SimulatedNvml) -> None:
    device = enable_mig(own)
    placement = pynvml.c_nvmlGpuInstancePlacement_t(2, 1)
    with pytest.raises(ArgumentError):
        own.nvmlDeviceCreateGpuInstanceWithPlacement(device, G1, placement)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        own.nvmlDeviceCreateGpuInstanceWithPlacement(device, G1, None)
    instance = own.nvmlDeviceCreateGpuInstanceWithPlacement(device, G1, pointer(placement))
    assert own.nvmlGpuInstanceGetInfo(instance).placement.start == 2


def test_arrays_that_nvml_would_overrun_are_refused(own: SimulatedNvml) -> None:
    device, count = enable_mig(own), c_uint(3)
    short = (pynvml.c_nvmlGpuInstancePlacement_t * 3)()
    with pytest.raises(pynvml.NVMLError_InsufficientSize):
        own.nvmlDeviceGetGpuInstancePossiblePlacements(device, G1, short, byref(count))
    assert count.value == 7
    with pytest.raises(ArgumentError, match="7 elements"):
        own.nvmlDeviceGetGpuInstances(device, G1, (pynvml.c_nvmlGpuInstance_t * 3)(), byref(count))


def test_handles_of_what_was_destroyed_are_invalid(own: SimulatedNvml) -> None:
    device = enable_mig(own)
    partition = cut(own, device, G3, 0, 4)
    mig = own.nvmlDeviceGetHandleByUUID(partition.uuid)
    own.nvmlComputeInstanceDestroy(partition.compute_instance)
    own.nvmlGpuInstanceDestroy(partition.gpu_instance)
    again = create(own, device, G3, 0, 4)
    assert own.nvmlGpuInstanceGetInfo(again).id == 1
    for call, handle in (
        (own.nvmlGpuInstanceGetInfo, partition.gpu_instance),
        (own.nvmlGpuInstanceDestroy, partition.gpu_instance),
        (own.nvmlComputeInstanceGetInfo_v2, partition.compute_instance),
        (own.nvmlDeviceGetUUID, mig),
    ):
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            call(handle)
    with pytest.raises(pynvml.NVMLError_NotFound):
        own.nvmlDeviceGetHandleByUUID(partition.uuid)


def test_nvlinks_end_at_the_nvswitches(nvml: SimulatedNvml, gpu: Any) -> None:
    for link in range(18):
        assert nvml.nvmlDeviceGetNvLinkState(gpu, link) == nvml.NVML_FEATURE_ENABLED
        assert nvml.nvmlDeviceGetNvLinkVersion(gpu, link) == nvml.NVML_NVLINK_VERSION_4_0
        assert nvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        assert nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).bus in range(5, 9)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        nvml.nvmlDeviceGetNvLinkState(gpu, 18)


def test_gpus_without_peers_have_no_nvlink(tmp_path: Path) -> None:
    nvml = one_h100(tmp_path / "lonely").nvml
    with pytest.raises(pynvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetNvLinkState(nvml.nvmlDeviceGetHandleByIndex(0), 0)


def test_the_fabric_of_one_dgx_has_a_zero_cluster_uuid(nvml: SimulatedNvml, gpu: Any) -> None:
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    assert nvml.nvmlDeviceGetGpuFabricInfoV(gpu, byref(info)) == nvml.NVML_SUCCESS
    assert (info.state, info.cliqueId, bytes(info.clusterUuid)) == (3, 0, bytes(16))


def test_a_fabric_struct_of_another_version_is_refused(nvml: SimulatedNvml, gpu: Any) -> None:
    with pytest.raises(pynvml.NVMLError) as refused:
        nvml.nvmlDeviceGetGpuFabricInfoV(gpu, byref(pynvml.c_nvmlGpuFabricInfo_v3_t()))
    assert refused.value.value == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH


def test_processes_are_listed_with_the_instances_they_run_on(tmp_path: Path) -> None:
    node = one_h100(tmp_path)
    nvml, device = node.nvml, enable_mig(node.nvml)
    partition = cut(nvml, device, G3, 4, 4)
    with process_on(node, partition.uuid, pid=12, memory=7 * 2**20):
        (process,) = nvml.nvmlDeviceGetComputeRunningProcesses(device)
        assert (process.pid, process.gpuInstanceId, process.computeInstanceId) == (12, 1, 0)
        assert nvml.nvmlDeviceGetMemoryInfo(device, pynvml.nvmlMemory_v2).used == 7 * 2**20
    assert nvml.nvmlDeviceGetComputeRunningProcesses(device) == []


def test_a_process_on_the_whole_gpu_belongs_to_no_instance(tmp_path: Path) -> None:
    node = one_h100(tmp_path)
    nvml, device = node.nvml, node.nvml.nvmlDeviceGetHandleByIndex(0)
    start_process(node, nvml.nvmlDeviceGetUUID(device), pid=11, memory=5 * 2**20)
    (process,) = nvml.nvmlDeviceGetComputeRunningProcesses(device)
    assert (process.pid, process.gpuInstanceId) == (11, pynvml.NVML_GPU_INSTANCE_ID_ANY)
    assert nvml.nvmlDeviceGetMemoryInfo(device, pynvml.nvmlMemory_v2).used == 5 * 2**20


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda n, g: n.nvmlDeviceGetPciInfo(g), pynvml.nvmlPciInfo_t),
        (lambda n, g: n.nvmlDeviceGetNvLinkRemotePciInfo(g, 0), pynvml.nvmlPciInfo_t),
        (lambda n, g: n.nvmlDeviceGetMemoryInfo(g), pynvml.c_nvmlMemory_t),
        (lambda n, g: n.nvmlDeviceGetMemoryInfo(g, pynvml.nvmlMemory_v2), pynvml.c_nvmlMemory_v2_t),
        (lambda n, g: n.nvmlDeviceGetGpuInstanceProfileInfo(g, 0), pynvml.c_nvmlGpuInstanceProfileInfo_v2_t),
        (lambda n, g: n.nvmlDeviceGetFieldValues(g, [91])[0], pynvml.c_nvmlFieldValue_t),
        (lambda n, g: n.nvmlEventSetCreate(), pynvml.c_nvmlEventSet_t),
        (lambda n, g: n.nvmlDeviceGetNvLinkVersion(g, 0), int),
        (lambda n, g: n.nvmlDeviceGetSupportedEventTypes(g), int),
    ],
)
def test_results_are_of_pynvmls_own_types(nvml: SimulatedNvml, gpu: Any, call: Any, kind: type) -> None:
    assert type(call(nvml, gpu)) is kind


def test_every_constant_that_the_simulator_uses_is_pynvmls() -> None:
    folder = Path(inspect.getfile(SimulatedNvml)).parent
    used = {name for path in folder.glob("*.py") for name in re.findall(r"pynvml\.(\w+)", path.read_text())}
    assert len(used) > 60
    assert not {name for name in used if not hasattr(pynvml, name)}
