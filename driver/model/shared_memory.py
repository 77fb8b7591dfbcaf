"""How a GPU is shared by memory: many claims hold its one ``shared`` device at once, each a part of the memory.

The scheduler adds up what they request (consumable capacity, KEP-5075). Amounts are whole GiB: the request policy of
the capacity has this step, so the scheduler rounds requests up to it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

GIB = 1 << 30

MEMORY_CAPACITY = "memory"
"""The name of the capacity, in slices and in the requests of claims."""

COMPUTE_CAPACITY = "computeSlices"
"""The same of shared partitions, of which every claim gets one compute instance of the same size."""

SHARING_FIELD = "allowMultipleAllocations"
"""If the API server drops this field of devices, no GPU is shared: its shared device would be one claim's alone."""

MPS_SERVER_BYTES = 256 << 20
"""What the MPS server of a GPU takes of its memory."""

CLIENTS_CAPACITY = "clients"
"""The name of the capacity of which each claim of a GPU shared by MPS takes one."""

CLIENTS, CLIENTS_SINCE_CUDA_13_1 = 48, 60
"""The CUDA contexts that an MPS server serves on one GPU, with drivers for CUDA 13.0 and older, and from 13.1 on."""

WRITTEN_QUANTITY = re.compile(
    r"([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:([KMGTPE]i|[mkMGTPE]?)|[eE]([+]?[0-9]{1,2}))"
)
BINARY = {f"{letter}i": 1 << 10 * power for power, letter in enumerate("KMGTPE", start=1)}
DECIMAL = {"m": Decimal("0.001"), "": Decimal(1), "k": Decimal(1000)} | {
    letter: Decimal(1000) ** power for power, letter in enumerate("MGTPE", start=2)
}


class SharingStrategy(StrEnum):
    """How the claims of one GPU share its compute: in turns, or at once through NVIDIA's MPS."""

    TIME_SLICING = "time-slicing"
    MPS = "mps"

    @classmethod
    def _missing_(cls, value: object) -> SharingStrategy:
        """A later version of the node plugin reports a strategy that this version does not know."""
        return cls.TIME_SLICING


class MemoryLimit(StrEnum):
    """What holds a claim to its memory: the driver by cgroup, the MPS server, or nothing.

    UNKNOWN: the driver does not say.
    """

    CGROUP = "cgroup"
    MPS = "mps"
    NONE = "none"
    UNKNOWN = "unknown"

    @property
    def promised(self) -> MemoryLimit:
        """What slices say, for selectors: what is unknown is no promise."""
        return MemoryLimit.NONE if self is MemoryLimit.UNKNOWN else self

    @classmethod
    def _missing_(cls, value: object) -> MemoryLimit:
        """A later version of the node plugin reports a limit that this version does not know."""
        return cls.NONE


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The shared device of a GPU: all its claims together can have ``memory_bytes``."""

    strategy: SharingStrategy
    memory_bytes: int
    limit: MemoryLimit = MemoryLimit.NONE

    @classmethod
    def of(cls, memory_bytes: int, strategy: SharingStrategy, limit: MemoryLimit) -> SharedMemory | None:
        """Of a GPU with ``memory_bytes`` for programs; None if it has less than one GiB to share."""
        shareable = memory_bytes - (MPS_SERVER_BYTES if strategy is SharingStrategy.MPS else 0)
        return cls(strategy, shareable, limit) if shareable >= GIB else None

    @property
    def gib(self) -> int:
        """The GiB that claims can have: the whole ones."""
        return self.memory_bytes // GIB

    def clients(self, cuda_driver_version: str) -> int | None:
        """The number of claims that can have a part, with at least one CUDA context each; None: any number."""
        if self.strategy is not SharingStrategy.MPS:
            return None
        version = [int(number) for number in cuda_driver_version.split(".") if number.isdecimal()]
        return CLIENTS_SINCE_CUDA_13_1 if version >= [13, 1] else CLIENTS


def gib_of(consumed: Mapping[str, str | int] | None, whole: int) -> int | None:
    """The GiB that a claim has of a shared device, from its ``consumedCapacity`` or its requests, rounded up.

    ``whole``: what a claim gets that states no memory. None: the amount can't be read, or it is not positive.
    """
    if not consumed or MEMORY_CAPACITY not in consumed:
        return whole
    written = WRITTEN_QUANTITY.fullmatch(str(consumed[MEMORY_CAPACITY]))
    if written is None:
        return None
    number, suffix, exponent = written.groups()
    factor = Decimal(10) ** int(exponent) if exponent else Decimal(BINARY.get(suffix) or DECIMAL[suffix])
    return math.ceil(Decimal(number) * factor / GIB) or None
