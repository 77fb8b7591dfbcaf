"""What kind of memory a GPU has and how fast it is.

NVML has no field for either. Bandwidth follows from clock and bus width (checked against NVIDIA's data
sheets for A100, H100, B200, L40S, T4); the type is known by product, and left out for one that is not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pynvml

from driver.hardware.calls import fact

TRANSFERS_PER_CLOCK = 2
"""Double data rate: NVML's memory clock counts full cycles."""


@dataclass(frozen=True, slots=True)
class KnownMemory:
    """Type and data-sheet bandwidth in GB/s of the products whose name matches ``pattern``.

    ``over_gib`` tells apart what has one name and two sizes.
    """

    pattern: re.Pattern[str]
    kind: str
    bandwidth: int
    over_gib: int


def _known(pattern: str, kind: str, bandwidth: int, over_gib: int = 0) -> KnownMemory:
    return KnownMemory(re.compile(pattern), kind, bandwidth, over_gib)


PRODUCTS = (
    _known(r"Tesla T4\b", "GDDR6", 320),
    _known(r"V100", "HBM2", 900),
    _known(r"\bA10\b", "GDDR6", 600),
    _known(r"\bL4\b", "GDDR6", 300),
    _known(r"\bL40S\b", "GDDR6", 864),
    _known(r"\bA30\b", "HBM2", 933),
    _known(r"A[18]00.*40GB", "HBM2", 1555),
    _known(r"A[18]00-SXM4-80GB", "HBM2e", 2039),
    _known(r"A[18]00 80GB PCIe", "HBM2e", 1935),
    _known(r"GH200 144G", "HBM3e", 4900),
    _known(r"GH200", "HBM3", 4000),
    _known(r"H[18]00 PCIe", "HBM2e", 2039),
    _known(r"H[18]00 NVL", "HBM3", 3938),
    _known(r"H[18]00", "HBM3", 3352),
    _known(r"H200", "HBM3e", 4800),
    _known(r"\bH20\b", "HBM3e", 4800, over_gib=100),  # the later H20 has the memory of an H200
    _known(r"\bH20\b", "HBM3", 4000),
    _known(r"G?B[23]00\b", "HBM3e", 8000),
    _known(r"RTX PRO 6000 Blackwell", "GDDR7", 1597),
    _known(r"RTX PRO 5000 Blackwell", "GDDR7", 1344),
)
"""First match wins: narrower names stand in front of wider ones."""


def read_memory_bandwidth(nvml: Any, handle: Any, product: str, memory_bytes: int) -> int | None:
    """GB/s: 2 x highest memory clock x bus width / 8, else the product's data sheet, else None."""
    clock_mhz = fact(nvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM)
    width_bits = fact(nvml.nvmlDeviceGetMemoryBusWidth, handle)
    if clock_mhz and width_bits:
        bandwidth: int = round(TRANSFERS_PER_CLOCK * clock_mhz * width_bits / 8 / 1000)
        return bandwidth
    known = _find(product, memory_bytes)
    return known.bandwidth if known else None


def memory_type(product: str, memory_bytes: int) -> str | None:
    """``HBM3``, ``GDDR6`` and so on, or None for a product that is not in the table."""
    known = _find(product, memory_bytes)
    return known.kind if known else None


def _find(product: str, memory_bytes: int) -> KnownMemory | None:
    rows = (known for known in PRODUCTS if known.pattern.search(product))
    return next((known for known in rows if memory_bytes > known.over_gib << 30), None)
