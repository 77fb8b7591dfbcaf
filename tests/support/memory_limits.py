"""Nodes whose driver limits GPU memory by cgroup, their cgroups and limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml
import pytest

from driver.simulator.description import NodeDescription, load_description
from driver.simulator.node import SimulatedNode
from driver.simulator.state.latency import ZERO_LATENCY
from driver.simulator.tree import CGROUPS, MACHINE_CGROUPS

GIB = 1 << 30


def description_with_limits(name: str = "h100-pcie-4", **changes: object) -> NodeDescription:
    """A node of a driver that limits memory."""
    changes = {"driver_version": "615.71.09", "cuda_driver_version": "13.4"} | changes
    return load_description(name).replaced(**changes)


def node_with_limits(root: Path, **changes: Any) -> SimulatedNode:
    """That node, with a session and without latency."""
    node = SimulatedNode.open(description_with_limits(**changes), root, latency=ZERO_LATENCY)
    node.nvml.nvmlInit()
    return node


def handle(node: SimulatedNode) -> Any:
    return node.nvml.nvmlDeviceGetHandleByIndex(0)


def make_cgroup(node: SimulatedNode, path: str) -> Path:
    """A cgroup and its parents."""
    cgroup = node.root / CGROUPS / path
    cgroup.mkdir(parents=True, exist_ok=True)
    return cgroup


def enable_below(cgroup: Path, *controllers: str) -> None:
    """Enable only these controllers for the cgroups below this one."""
    (cgroup / "cgroup.subtree_control").write_text(" ".join(controllers) + "\n")


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
