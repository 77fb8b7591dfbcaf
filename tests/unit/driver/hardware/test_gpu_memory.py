"""Memory type and bandwidth: by clock and width where NVML tells them, by product where it doesn't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest

from driver.hardware.gpu_properties import known_memory, read_memory_bandwidth
from driver.simulator.description import known_descriptions, load_description
from driver.simulator.products import facts
from tests.support.published import discover


def memory_type(product: str, memory_bytes: int) -> str | None:
    memory = known_memory(product, memory_bytes)
    return memory.kind if memory else None


CARDS = {row["product"].partition(" (")[0]: row for row in facts("gpu_products")["products"]}
GIB = 1 << 30


class Card:
    """NVML's two answers that bandwidth is made of; None stands for a fact that this GPU or driver lacks."""

    def __init__(self, clock_mhz: int | None, width_bits: int | None) -> None:
        self._clock_mhz = clock_mhz
        self._width_bits = width_bits

    def nvmlDeviceGetMaxClockInfo(self, _handle: object, kind: int) -> int:  # noqa: N802 - NVML's name
        assert kind == pynvml.NVML_CLOCK_MEM
        return self._answer(self._clock_mhz)

    def nvmlDeviceGetMemoryBusWidth(self, _handle: object) -> int:  # noqa: N802 - NVML's name
        return self._answer(self._width_bits)

    def _answer(self, value: int | None) -> int:
        if value is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value


@pytest.mark.parametrize("product", CARDS)
def test_the_memory_type_of_every_product_is_that_of_the_facts(product: str) -> None:
    card = CARDS[product]
    assert memory_type(product, card["memory_gb"] * 10**9) == card["memory_type"]


@pytest.mark.parametrize("product", CARDS)
def test_without_clock_or_width_the_bandwidth_is_that_of_the_data_sheet(product: str) -> None:
    card = CARDS[product]
    found = read_memory_bandwidth(Card(None, None), None, product, card["memory_gb"] * 10**9)
    assert found == card["memory_bandwidth_gbps"]


MEASURED = {name: row for name, row in CARDS.items() if row["max_memory_clock_mhz"] and row["memory_bus_width_bits"]}


@pytest.mark.parametrize("product", MEASURED)
def test_measured_clock_and_width_give_the_bandwidth_of_the_facts(product: str) -> None:
    card = MEASURED[product]
    nvml = Card(card["max_memory_clock_mhz"], card["memory_bus_width_bits"])
    found = read_memory_bandwidth(nvml, None, product, 0)
    assert found == card["bandwidth_check_2xclockxbus_gbps"]
    assert found == pytest.approx(card["memory_bandwidth_gbps"], rel=0.03)


@pytest.mark.parametrize(
    ("clock_mhz", "width_bits", "bandwidth"),
    [(2619, 5120, 3352), (2619, None, 3352), (None, 5120, 3352), (0, 5120, 3352), (2619, 0, 3352), (2000, 5120, 2560)],
)
def test_clock_and_width_count_only_together(clock_mhz: int | None, width_bits: int | None, bandwidth: int) -> None:
    found = read_memory_bandwidth(Card(clock_mhz, width_bits), None, "NVIDIA H100 80GB HBM3", 80 * GIB)
    assert found == bandwidth


def test_of_an_unknown_product_only_what_nvml_says_is_told() -> None:
    assert memory_type("NVIDIA X9000", 80 * GIB) is None
    assert read_memory_bandwidth(Card(None, None), None, "NVIDIA X9000", 80 * GIB) is None
    assert read_memory_bandwidth(Card(1000, 4096), None, "NVIDIA X9000", 80 * GIB) == 1024


def test_a_failing_gpu_is_not_taken_for_one_without_the_fact() -> None:
    class Lost(Card):
        def _answer(self, value: int | None) -> int:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        read_memory_bandwidth(Lost(1, 1), None, "NVIDIA H100 80GB HBM3", 80 * GIB)


@pytest.mark.parametrize(
    ("product", "gib", "kind"),
    [
        ("NVIDIA H20", 96, "HBM3"),
        ("NVIDIA H20", 140, "HBM3e"),
        ("NVIDIA H200", 140, "HBM3e"),
        ("NVIDIA GH200 480GB", 95, "HBM3"),
        ("NVIDIA GH200 144G HBM3e", 141, "HBM3e"),
        ("NVIDIA GB200", 185, "HBM3e"),
        ("NVIDIA B300 SXM6 AC", 268, "HBM3e"),
        ("NVIDIA H800", 80, "HBM3"),
        ("NVIDIA A800-SXM4-80GB", 80, "HBM2e"),
        ("NVIDIA L40", 45, None),
        ("NVIDIA A100X", 80, None),
    ],
)
def test_products_of_similar_names_are_kept_apart(product: str, gib: int, kind: str | None) -> None:
    assert memory_type(product, gib * GIB) == kind


@pytest.mark.parametrize("name", known_descriptions())
def test_every_simulated_node_tells_type_and_bandwidth(name: str, tmp_path: Path) -> None:
    description = load_description(name)
    gpu, *_ = discover(description, tmp_path)
    card: dict[str, Any] = CARDS[gpu.product_name]
    later_h20 = description.product == "NVIDIA H20 (141GB)"
    assert gpu.memory_type == ("HBM3e" if later_h20 else card["memory_type"])
    expected = 4800 if later_h20 else card["memory_bandwidth_gbps"]
    assert gpu.memory_bandwidth == pytest.approx(expected, rel=0.03)
