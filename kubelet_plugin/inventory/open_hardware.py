"""Opening the node's hardware: real GPUs, or a simulated node."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from driver.config.flag_values import SIMULATED_NODES
from driver.errors import DriverMissing, EnvironmentFault, RecoverableError, UsageError
from driver.hardware.host import Host, load_nvml
from driver.hardware.host_paths import HOST, HostPaths, find_nvml, missing_driver, real_gpus, summary
from kubelet_plugin.settings import NodeSettings

if TYPE_CHECKING:
    from driver.simulator.node import SimulatedNode
    from driver.simulator.state.latency import Latency


def host_paths(settings: NodeSettings) -> HostPaths:
    """Where the host's files are: those of the machine, or of the simulated node that lasts."""
    if settings.simulated is None:
        return HostPaths(settings.host_root, HOST)
    root = settings.host_root if settings.host_root != HOST else SIMULATED_NODES / settings.node_name
    return HostPaths(root, root)


def require_driver_files(settings: NodeSettings) -> None:
    """Call it before NVML's library is loaded. Raises DriverMissing until a container (the GPU Operator's) has
    installed its driver completely."""
    if settings.simulated is None and settings.driver_root != HOST:
        missing = missing_driver(host_paths(settings), settings.driver_root)
        if missing is not None:
            raise DriverMissing(f"--driver-root {settings.driver_root}: {missing}", missing)


def missing_hardware(settings: NodeSettings) -> str | None:
    """Why the GPUs can't be found at present; None if they can. Raises FatalError if that will stay so."""
    try:
        require_driver_files(settings)
        with open_host(settings, lasting=True) as (host, _):
            host.count_gpus()
    except DriverMissing as error:
        return error.reason
    except RecoverableError as error:
        return str(error)
    return None


@contextmanager
def open_host(settings: NodeSettings, *, lasting: bool, machine: Path = HOST) -> Iterator[tuple[Host, HostPaths]]:
    """Open the node's hardware for the length of the block. Raises UsageError and EnvironmentFault.

    A ``lasting`` simulated node is stored in ``host_root``, or else under SIMULATED_NODES by the node's name. It is
    created if it is missing, and refused if ``machine``, the root directory of this machine, shows a real GPU. If
    not ``lasting``, the simulated node in ``host_root`` is opened, or a temporary one is created and removed again.
    """
    with ExitStack() as stack:
        if settings.simulated is None:
            paths = host_paths(settings)
            host = Host(
                load_nvml(_nvml_library(settings, paths)), paths, simulated=False, driver_root=settings.driver_root
            )
        else:
            if lasting:
                refuse_beside_real_gpus(settings.gpus, machine)
            paths = host_paths(settings)
            if not lasting and settings.host_root == HOST:
                root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tessera-sim-")))
                paths = HostPaths(root, root)
            host = _simulated(settings, paths, lasting=lasting)
        stack.callback(host.close)
        yield host, paths


def _nvml_library(settings: NodeSettings, paths: HostPaths) -> Path | None:
    """The library of ``--nvml-library``, or of the driver root, which in a container is below the host's root; None:
    let the dynamic linker find it."""
    root = paths.here(str(settings.driver_root))
    if settings.nvml_library is not None or root == HOST:
        return settings.nvml_library
    return find_nvml(root)


def refuse_beside_real_gpus(gpus: str, machine: Path) -> None:
    """Refuse simulated GPUs on a machine with real ones: pods must never get them. Raises EnvironmentFault."""
    signs = real_gpus(machine)
    if signs:
        raise EnvironmentFault(
            f"--gpus {gpus}: this machine has real GPUs ({summary(signs)}); simulated ones are for machines without; "
            "leave --gpus out, or keep the node plugin off this node"
        )


def _simulated(settings: NodeSettings, paths: HostPaths, *, lasting: bool) -> Host:
    # Only a simulated node pays for loading the simulator.
    from driver.simulator.description import load_description
    from driver.simulator.node import SimulatedNode
    from driver.simulator.state.latency import parse_latency

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
    return Host(node.nvml, paths, simulated=True, driver_root=settings.driver_root)


def _found(name: str, root: Path, latency: Latency) -> SimulatedNode:
    """Open the existing simulated node in ``root``; writes nothing. Raises EnvironmentFault and UsageError."""
    from driver.simulator.node import SimulatedNode

    if not SimulatedNode.is_in(root):
        raise EnvironmentFault(
            f"--host-root {root}: no simulated node is there; tessera node --gpus sim:NAME --host-root DIR makes one"
        )
    node = SimulatedNode.attach(root, latency=latency)
    if node.description.name != name:
        raise UsageError(f"--host-root {root}: the simulated node there is {node.description.name!r}, not {name!r}")
    return node
