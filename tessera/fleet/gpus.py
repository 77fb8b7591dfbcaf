"""The GPUs of nodes that are all alike."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from driver.errors import UsageError
from driver.hardware.host import HostPaths
from driver.hardware.nvml_host import NvmlHost
from driver.hardware.simulator import ZERO_LATENCY, NodeDescription, SimulatedNode
from driver.model.gpu import Gpu


def discover(description: NodeDescription) -> tuple[Gpu, ...]:
    """The GPUs of one such node, as the node plugin would find them. Raises UsageError where it has none."""
    with tempfile.TemporaryDirectory(prefix="tessera-fleet-") as directory:
        root = Path(directory)
        node = SimulatedNode.open(description, root, latency=ZERO_LATENCY)
        host = NvmlHost(node.nvml, HostPaths(root, root), simulated=True)
        try:
            found = host.discover()
        finally:
            host.close()
    if found.faults:
        raise UsageError(f"the GPUs of {description.name} can't be read: {found.faults[0]}")
    return tuple(found.gpus)


def gpus_of(node: str, like: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """``like`` with UUIDs of their own: the same for the same node at each start. All other facts are shared."""
    return tuple(replace(gpu, uuid=f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node}/{gpu.uuid}')}") for gpu in like)
