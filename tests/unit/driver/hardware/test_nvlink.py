"""NVLink and fabric: which GPUs are joined inside a node, and which node is part of a larger domain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from driver.hardware.nvlink import nvlink_cliques, read_fabric_clique, read_nvlink
from driver.model.gpu import NvLink
from driver.simulator.description import FabricDescription, NodeDescription, load_description
from driver.simulator.node import SimulatedNode
from driver.simulator.state.latency import ZERO_LATENCY
from tests.support.published import discover

A, B, C, D = (f"0000:{bus}:00.0" for bus in ("17", "65", "ca", "e3"))
SWITCH = "switch"
UUID = "5f3c9d2e-7a41-4b8e-9c60-1d2e3f4a5b6c"


def linked(**peers: int) -> NvLink:
    """A GPU's links, by the letter of the GPU at the far end or ``switch``."""
    names = {"a": A, "b": B, "c": C, "d": D, "switch": SWITCH, "elsewhere": "0000:ff:00.0"}
    return NvLink(4, sum(peers.values()), None, {names[peer]: count for peer, count in peers.items()})


@pytest.mark.parametrize(
    ("links", "cliques"),
    [
        pytest.param({}, {}, id="no GPU"),
        pytest.param({A: None, B: None}, {}, id="no links"),
        pytest.param(
            {A: linked(switch=18), B: linked(switch=18), C: linked(switch=18)},
            {A: "clique-0", B: "clique-0", C: "clique-0"},
            id="all behind NVSwitches",
        ),
        pytest.param({A: linked(switch=18)}, {}, id="alone behind NVSwitches"),
        pytest.param(
            {A: linked(switch=18), B: linked(switch=17), C: None},
            {A: "clique-0", B: "clique-0"},
            id="one GPU has lost all its links",
        ),
        pytest.param(
            {A: linked(b=12), B: linked(a=12), C: linked(d=12), D: linked(c=12)},
            {A: "clique-0", B: "clique-0", C: "clique-1", D: "clique-1"},
            id="bridged pairs",
        ),
        pytest.param(
            {D: linked(b=12), C: linked(a=12), B: linked(d=12), A: linked(c=12)},
            {A: "clique-0", C: "clique-0", B: "clique-1", D: "clique-1"},
            id="numbered by the first address, whatever order they come in",
        ),
        pytest.param(
            {A: linked(b=2), B: linked(a=2, c=2), C: linked(b=2, d=2), D: linked(c=2)},
            dict.fromkeys((A, B, C, D), "clique-0"),
            id="a chain",
        ),
        pytest.param(
            {A: linked(b=2), D: linked(c=2), B: linked(a=2, c=2), C: linked(b=2, d=2)},
            dict.fromkeys((A, B, C, D), "clique-0"),
            id="a chain found from both ends",
        ),
        pytest.param(
            {A: linked(b=12), C: linked(d=12), D: linked(c=12)}, {C: "clique-0", D: "clique-0"}, id="lost peer"
        ),
        pytest.param({A: linked(elsewhere=18), B: linked(elsewhere=18)}, {}, id="peers that are none of ours"),
        pytest.param({A: linked(b=12), B: linked(c=1)}, {A: "clique-0", B: "clique-0"}, id="only one end tells"),
        pytest.param(
            {A: linked(switch=18), B: linked(switch=18), C: linked(d=12), D: linked(c=12)},
            {A: "clique-0", B: "clique-0", C: "clique-1", D: "clique-1"},
            id="some behind switches, some bridged",
        ),
        pytest.param({A: NvLink(None, 3, None, {}), B: None}, {}, id="links to something that is no GPU"),
    ],
)
def test_cliques_are_the_gpus_that_links_join(links: dict[str, NvLink | None], cliques: dict[str, str]) -> None:
    assert nvlink_cliques(links) == cliques


def opened(description: NodeDescription, root: Path) -> tuple[Any, Any]:
    """The pynvml functions of a simulated node, and its first GPU."""
    node = SimulatedNode.open(description, root, latency=ZERO_LATENCY)
    node.nvml.nvmlInit()
    return node.nvml, node.nvml.nvmlDeviceGetHandleByIndex(0)


class Altered:
    """The simulator's functions, some of them replaced by what it can't be told to do."""

    def __init__(self, nvml: Any, **functions: Callable[..., Any]) -> None:
        self._nvml = nvml
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        return self._functions.get(name) or getattr(self._nvml, name)


def fails(code: int) -> Callable[..., Any]:
    def function(*_: object) -> Any:
        raise pynvml.NVMLError(code)

    return function


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dgx-h100", NvLink(4, 18, 900, {SWITCH: 18})),
        ("dgx-a100", NvLink(3, 12, 600, {SWITCH: 12})),
        ("dgx-b200", NvLink(5, 18, 1800, {SWITCH: 18})),
        ("gb200-nvl72-tray", NvLink(5, 18, 1800, {SWITCH: 18})),
        ("a100-pcie-bridged", NvLink(3, 12, 600, {B: 12})),
        ("v100-4", NvLink(2, 6, 300, {"0000:17:00.0": 2, "0000:b2:00.0": 2, "0000:b4:00.0": 2})),
        ("l40s-8", None),
        ("gh200", None),
    ],
)
def test_links_are_counted_by_far_end(name: str, expected: NvLink | None, tmp_path: Path) -> None:
    assert read_nvlink(*opened(load_description(name), tmp_path)) == expected


@pytest.mark.parametrize(
    ("version", "generation", "bandwidth"),
    [
        (pynvml.NVML_NVLINK_VERSION_1_0, 1, 720),
        (pynvml.NVML_NVLINK_VERSION_2_2, 2, 900),
        (pynvml.NVML_NVLINK_VERSION_3_0, 3, 900),
        (pynvml.NVML_NVLINK_VERSION_3_1, 3, 900),
        (pynvml.NVML_NVLINK_VERSION_5_0, 5, 1800),
        (pynvml.NVML_NVLINK_VERSION_INVALID, None, None),
        (99, None, None),
    ],
)
def test_nvmls_code_of_a_link_version_is_not_the_generation(
    version: int, generation: int | None, bandwidth: int | None, tmp_path: Path
) -> None:
    nvml, gpu = opened(load_description("dgx-h100"), tmp_path)
    found = read_nvlink(Altered(nvml, nvmlDeviceGetNvLinkVersion=lambda *_: version), gpu)
    assert found == NvLink(generation, 18, bandwidth, {SWITCH: 18})


def test_links_that_are_down_or_left_out_do_not_count(tmp_path: Path) -> None:
    nvml, gpu = opened(load_description("dgx-h100"), tmp_path)

    def state(device: Any, link: int) -> int:
        if link == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        is_up: int = nvml.nvmlDeviceGetNvLinkState(device, link)
        return pynvml.NVML_FEATURE_DISABLED if link in {3, 17} else is_up

    found = read_nvlink(Altered(nvml, nvmlDeviceGetNvLinkState=state), gpu)
    assert found == NvLink(4, 15, 750, {SWITCH: 15})


def test_a_gpu_with_every_link_down_has_no_nvlink(tmp_path: Path) -> None:
    nvml, gpu = opened(load_description("dgx-h100"), tmp_path)
    down = Altered(nvml, nvmlDeviceGetNvLinkState=lambda *_: pynvml.NVML_FEATURE_DISABLED)
    assert read_nvlink(down, gpu) is None


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetNvLinkVersion", "nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetNvLinkRemotePciInfo"],
)
def test_links_whose_details_nvml_does_not_know_still_count(function: str, tmp_path: Path) -> None:
    nvml, gpu = opened(load_description("a100-pcie-bridged"), tmp_path)
    found = read_nvlink(Altered(nvml, **{function: fails(pynvml.NVML_ERROR_NOT_SUPPORTED)}), gpu)
    assert found is not None
    assert found.links == 12
    assert (found.generation is None) == (function == "nvmlDeviceGetNvLinkVersion")
    assert bool(found.peers) == (function == "nvmlDeviceGetNvLinkVersion")


def test_a_link_to_a_cpu_joins_no_gpus(tmp_path: Path) -> None:
    nvml, gpu = opened(load_description("dgx-h100"), tmp_path)
    npu = Altered(nvml, nvmlDeviceGetNvLinkRemoteDeviceType=lambda *_: pynvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU)
    found = read_nvlink(npu, gpu)
    assert found is not None
    assert (found.links, found.peers) == (18, {})


def test_a_lost_gpu_is_an_error_and_not_a_gpu_without_links(tmp_path: Path) -> None:
    nvml, gpu = opened(load_description("dgx-h100"), tmp_path)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        read_nvlink(Altered(nvml, nvmlDeviceGetNvLinkState=fails(pynvml.NVML_ERROR_GPU_IS_LOST)), gpu)


ZERO = "00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("fabric", "clique"),
    [
        pytest.param(None, None, id="no fabric"),
        pytest.param(FabricDescription(cluster_uuid=ZERO, clique_id=0), None, id="one node's own NVSwitches"),
        pytest.param(FabricDescription(cluster_uuid=ZERO, clique_id=7), None, id="the zero UUID with any clique"),
        pytest.param(FabricDescription(cluster_uuid=UUID, clique_id=2), f"{UUID}.2", id="a rack"),
        pytest.param(FabricDescription(cluster_uuid=UUID, clique_id=0), f"{UUID}.0", id="clique 0 of a rack"),
        pytest.param(FabricDescription(cluster_uuid=UUID, clique_id=32766), f"{UUID}.32766", id="a high clique"),
        pytest.param(
            FabricDescription(cluster_uuid=UUID, clique_id=2, state="in-progress"), None, id="still being set up"
        ),
        pytest.param(FabricDescription(cluster_uuid=UUID, clique_id=2, state="not-started"), None, id="not set up"),
    ],
)
def test_a_fabric_clique_is_named_once_a_multi_node_fabric_is_complete(
    fabric: FabricDescription | None, clique: str | None, tmp_path: Path
) -> None:
    description = load_description("dgx-h100").replaced(fabric=fabric)
    assert read_fabric_clique(*opened(description, tmp_path)) == clique


def test_a_fabric_whose_set_up_failed_has_no_clique(tmp_path: Path) -> None:
    nvml, gpu = opened(load_description("gb200-nvl72-tray"), tmp_path)

    def failed(device: Any, info: Any) -> None:
        nvml.nvmlDeviceGetGpuFabricInfoV(device, info)
        info._obj.status = pynvml.NVML_ERROR_UNKNOWN

    assert read_fabric_clique(nvml, gpu) is not None
    assert read_fabric_clique(Altered(nvml, nvmlDeviceGetGpuFabricInfoV=failed), gpu) is None


def test_a_driver_without_the_fabric_function_knows_no_fabric(tmp_path: Path) -> None:
    nvml, gpu = opened(load_description("gb200-nvl72-tray"), tmp_path)
    old = Altered(nvml, nvmlDeviceGetGpuFabricInfoV=fails(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND))
    assert read_fabric_clique(old, gpu) is None


@pytest.mark.parametrize(
    ("name", "cliques"),
    [
        ("dgx-h100", ["clique-0"] * 8),
        ("hgx-b300", ["clique-0"] * 8),
        ("gb300-nvl72-tray", ["clique-0"] * 4),
        ("a100-pcie-bridged", ["clique-0", "clique-0", "clique-1", "clique-1"]),
        ("h200-nvl-bridged", ["clique-0", "clique-0", "clique-1", "clique-1"]),
        ("v100-4", ["clique-0"] * 4),
        ("l40s-8", [None] * 8),
        ("gh200", [None]),
        ("h100-1", [None]),
    ],
)
def test_discovery_gives_every_gpu_its_clique(name: str, cliques: list[str | None], tmp_path: Path) -> None:
    assert [gpu.nvlink_clique for gpu in discover(load_description(name), tmp_path)] == cliques
