"""Nodes whose driver limits GPU memory by cgroup, their cgroups and limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml
import pytest

from driver.simulator.description import load_description
from driver.simulator.node import SimulatedNode
from driver.simulator.state.latency import ZERO_LATENCY
from driver.simulator.tree import CGROUPS, MACHINE_CGROUPS

GIB = 1 << 30


def node_with_limits(root: Path, **changes: object) -> SimulatedNode:
    """A node of a driver that limits memory, with a session and without latency."""
    changes = {"driver_version": "615.71.09", "cuda_driver_version": "13.4"} | changes
    node = SimulatedNode.open(load_description("h100-pcie-4").replaced(**changes), root, latency=ZERO_LATENCY)
    node.nvml.nvmlInit()
    return node


def handle(node: SimulatedNode) -> Any:
    return node.nvml.nvmlDeviceGetHandleByIndex(0)


def make_cgroup(node: SimulatedNode, path: str, *, files: bool = True) -> Path:
    """A cgroup and its parents; ``files``: the controller dmem is on for them."""
    cgroup = node.root / CGROUPS
    for part in Path(path).parts:
        cgroup /= part
        cgroup.mkdir(parents=True, exist_ok=True)
        if files:
            (cgroup / "dmem.max").touch()
    return cgroup


def set_limit(node: SimulatedNode, cgroup: Path, hard: int, soft: int = 0) -> None:
    limits = pynvml.c_nvmlSetMemoryLimits_v1_t()
    limits.nameSpace, limits.softLimit, limits.hardLimit = str(cgroup).encode(), soft, hard
    node.nvml.nvmlDeviceSetMemoryLimits_v1(handle(node), limits)


def read_limits(node: SimulatedNode, cgroup: Path) -> tuple[int, int, int]:
    """Soft limit, hard limit and use, as NVML reports them."""
    limits = pynvml.c_nvmlGetMemoryLimits_v1_t()
    limits.nameSpace = str(cgroup).encode()
    node.nvml.nvmlDeviceGetMemoryLimits_v1(handle(node), limits)
    return limits.softLimit, limits.hardLimit, limits.currentUsed


@contextmanager
def machine_cgroup(node: SimulatedNode) -> Iterator[Path]:
    """A cgroup of the machine that runs the test."""
    cgroup = node.root / MACHINE_CGROUPS / f"tessera-limits-{os.getpid()}"
    if not (node.root / MACHINE_CGROUPS).exists() or not os.access(cgroup.parent, os.W_OK):
        pytest.skip("needs root and a cgroup v2 hierarchy")
    cgroup.mkdir()
    try:
        yield cgroup
    finally:
        if cgroup.exists():
            cgroup.rmdir()
