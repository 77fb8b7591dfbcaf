"""Names of the pool, the slices and the counter sets: pinned, since people and tools rely on them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

NAME_LIMIT = 253
"""A DNS subdomain; node names may use all of it by themselves."""

COUNTER_SETS_PER_SLICE = 8
"""The API's limit (KEP-4815)."""

GPUS_PER_SLICE = 2
"""At most 64 devices a slice that consumes counters, and an H100 has 26: two GPUs and room for shares.

A GPU's slice depends on its number and on whether its node's settings divide it into shares, so a change of its
devices is an atomic update of one object.
"""

DEVICES_PER_GPU = 32
"""Two GPUs of this many devices fill a slice; more than that of one GPU are left out, worst offers first."""

DEVICE_SLICES_FROM = 100
"""First index of device slices: counter slices sort in front of them, up to 800 GPUs a node."""

SHARED_SLICES_FROM = 500
"""The same for GPUs that are divided into shares: the scheduler takes the first device that fits, in the order of slice
names, so a claim for a full GPU or a partition gets one that has no shares as long as there is one."""


MONITORS = "-monitor"
"""What the names of the pool of monitor devices and of its slice end with."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of a node: that of its devices, or with the suffix MONITORS that of its monitor devices."""

    node: str
    driver: str
    suffix: str = ""
    name: str = field(init=False)
    """``<node>-<driver>``: unique over drivers, since the 1.36 scheduler confuses pools of one name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", shortened(f"{self.node}-{self.driver}{self.suffix}"))

    @property
    def of_monitors(self) -> Pool:
        return Pool(self.node, self.driver, MONITORS)

    @property
    def names(self) -> tuple[str, str]:
        """The names of both pools of the node."""
        return self.name, self.of_monitors.name

    @property
    def monitor_slice(self) -> str:
        """Name of the slice with the monitor devices of all GPUs."""
        return shortened(f"00000-{self.node}-{self.driver}{MONITORS}")

    def counter_slice(self, number: int) -> str:
        """Name of the slice that holds the counter set of the GPU numbered ``number``."""
        index = number // COUNTER_SETS_PER_SLICE
        return shortened(f"{index:05d}-{self.node}-{self.driver}-counters")

    def device_slice(self, number: int, *, divided: bool = False) -> str:
        """Name of the slice that holds the devices of the GPU numbered ``number``; ``divided``: into shares."""
        index = number // GPUS_PER_SLICE + (SHARED_SLICES_FROM if divided else DEVICE_SLICES_FROM)
        return shortened(f"{index:05d}-{self.node}-{self.driver}-devices")


def counter_set(number: int) -> str:
    return f"gpu-{number}"


def shortened(name: str) -> str:
    """``name``, or its beginning and a hash where it is longer than a DNS subdomain may be."""
    if len(name) <= NAME_LIMIT:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:10]
    return f"{name[: NAME_LIMIT - 11].rstrip('.-')}-{digest}"
