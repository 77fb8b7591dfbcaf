"""Opening the node's hardware: the real one, or a simulated node."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from driver.config.settings import NodeSettings
from driver.hardware.host import HostPaths
from driver.hardware.nvml_host import NvmlHost, load_nvml
from tessera.sim import SIMULATED_NODES

HOST = Path("/")


@contextmanager
def open_host(settings: NodeSettings, *, lasting: bool) -> Iterator[tuple[NvmlHost, HostPaths]]:
    """The node's hardware for the length of the block. Raises UsageError and EnvironmentFault.

    A simulated node lives in ``host_root``, or else, if it is to be ``lasting``, under SIMULATED_NODES by the
    node's name; one that is not lasting is made up and removed again.
    """
    with ExitStack() as stack:
        if settings.simulated is None:
            paths = HostPaths(settings.host_root, HOST)
            host = NvmlHost(load_nvml(settings.nvml_library), paths, simulated=False, driver_root=settings.driver_root)
        else:
            paths = _simulated_paths(settings, stack, lasting=lasting)
            host = _simulated(settings, paths, lasting=lasting)
        stack.callback(host.close)
        yield host, paths


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
