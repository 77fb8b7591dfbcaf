"""Opening the node's hardware: the real one, or a simulated node."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from driver.config.settings import NodeSettings
from driver.errors import EnvironmentFault, UsageError
from driver.hardware.driver_root import find_nvml
from driver.hardware.host import HostPaths
from driver.hardware.nvml_host import NvmlHost, load_nvml
from driver.hardware.real_gpus import real_gpus, told
from tessera.sim import SIMULATED_NODES

if TYPE_CHECKING:
    from driver.hardware.simulator import Latency, SimulatedNode

HOST = Path("/")


@contextmanager
def open_host(settings: NodeSettings, *, lasting: bool, machine: Path = HOST) -> Iterator[tuple[NvmlHost, HostPaths]]:
    """The node's hardware for the length of the block. Raises UsageError and EnvironmentFault.

    A simulated node that is to be ``lasting`` lives in ``host_root``, or else under SIMULATED_NODES by the node's name,
    and is made where it is missing; it is refused where ``machine``, the root directory of this one, shows a real GPU.
    Who only looks (not ``lasting``) finds the one in ``host_root``, or else one that is made up and removed again.
    """
    with ExitStack() as stack:
        if settings.simulated is None:
            paths = HostPaths(settings.host_root, HOST)
            host = NvmlHost(
                load_nvml(_nvml_library(settings, paths)), paths, simulated=False, driver_root=settings.driver_root
            )
        else:
            if lasting:
                refuse_beside_real_gpus(settings.gpus, machine)
            paths = _simulated_paths(settings, stack, lasting=lasting)
            host = _simulated(settings, paths, lasting=lasting)
        stack.callback(host.close)
        yield host, paths


def _nvml_library(settings: NodeSettings, paths: HostPaths) -> Path | None:
    """The library that was named, or that of the driver root, which in a container is below the host's root; None: what
    the dynamic linker finds."""
    root = paths.here(str(settings.driver_root))
    if settings.nvml_library is not None or root == HOST:
        return settings.nvml_library
    return find_nvml(root)


def refuse_beside_real_gpus(gpus: str, machine: Path) -> None:
    """Pods must never be sent to simulated GPUs of a machine that has real ones. Raises EnvironmentFault."""
    if signs := real_gpus(machine):
        raise EnvironmentFault(
            f"--gpus {gpus}: this machine has real GPUs ({told(signs)}); simulated ones are for machines without; "
            "leave --gpus out, or keep the node plugin off this node"
        )


def _simulated_paths(settings: NodeSettings, stack: ExitStack, *, lasting: bool) -> HostPaths:
    if settings.host_root != HOST:
        root = settings.host_root
    elif lasting:
        root = SIMULATED_NODES / settings.node_name
    else:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tessera-sim-")))
    return HostPaths(root, root)


def _simulated(settings: NodeSettings, paths: HostPaths, *, lasting: bool) -> NvmlHost:
    # Only a simulated node pays for loading the simulator.
    from driver.hardware.simulator import SimulatedNode, load_description, parse_latency

    description, latency = load_description(str(settings.simulated)), parse_latency(settings.sim_latency)
    if lasting:  # a cluster may have many nodes of one description, and no two GPUs of one UUID
        description = description.replaced(serial=settings.node_name)
    if lasting or settings.host_root == HOST:
        node = SimulatedNode.open(description, paths.root, latency=latency)
    else:
        node = _found(description.name, paths.root, latency)
    if lasting:
        note = {"stateDir": str(settings.state_dir), "driverName": settings.driver_name}
        (paths.root / "sim" / "plugin.json").write_text(json.dumps(note))
    return NvmlHost(node.nvml, paths, simulated=True, driver_root=settings.driver_root)


def _found(name: str, root: Path, latency: Latency) -> SimulatedNode:
    """The node that somebody made in ``root``; nothing is written. Raises EnvironmentFault and UsageError."""
    from driver.hardware.simulator import SimulatedNode

    if not SimulatedNode.is_in(root):
        raise EnvironmentFault(
            f"--host-root {root}: no simulated node is there; tessera node --gpus sim:NAME --host-root DIR makes one"
        )
    node = SimulatedNode.attach(root, latency=latency)
    if node.description.name != name:
        raise UsageError(f"--host-root {root}: the simulated node there is {node.description.name!r}, not {name!r}")
    return node
