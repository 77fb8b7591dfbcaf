"""Opening the node's hardware: the real one, or a simulated node."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from driver.config.settings import NodeSettings
from driver.errors import EnvironmentFault
from driver.hardware.driver_root import find_nvml
from driver.hardware.host import HostPaths
from driver.hardware.nvml_host import NvmlHost, load_nvml
from driver.hardware.real_gpus import real_gpus, told
from tessera.sim import SIMULATED_NODES

HOST = Path("/")


@contextmanager
def open_host(settings: NodeSettings, *, lasting: bool, machine: Path = HOST) -> Iterator[tuple[NvmlHost, HostPaths]]:
    """The node's hardware for the length of the block. Raises UsageError and EnvironmentFault.

    A simulated node lives in ``host_root``, or else, if it is to be ``lasting``, under SIMULATED_NODES by the
    node's name; one that is not lasting is made up and removed again. A lasting one is refused where ``machine``, the
    root directory of this one, shows a real GPU.
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

    description = load_description(str(settings.simulated))
    if lasting:  # a cluster may have many nodes of one description, and no two GPUs of one UUID
        description = description.replaced(serial=settings.node_name)
    node = SimulatedNode.open(description, paths.root, latency=parse_latency(settings.sim_latency))
    if lasting:
        note = {"stateDir": str(settings.state_dir), "driverName": settings.driver_name}
        (paths.root / "sim" / "plugin.json").write_text(json.dumps(note))
    return NvmlHost(node.nvml, paths, simulated=True, driver_root=settings.driver_root)
