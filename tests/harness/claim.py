"""Taking a name, a network and ports for a cluster, and letting the cluster outlive whoever took them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from driver.errors import EnvironmentFault, UsageError
from tests.harness import cleanup, host
from tests.harness.addresses import Network, choose_network, choose_port
from tests.harness.layout import BASE, Layout
from tests.harness.locks import file_lock
from tests.harness.processes import ProcessRecord, record_of
from tests.harness.settings import Settings
from tests.harness.state import ClusterState, ControlPorts, NodePorts, cluster_directories, read_state


def claim(settings: Settings, binaries: Path) -> ClusterState:
    """Make the cluster's directory and state, owned by this process: from here on name, network and ports are ours.

    Removes what a crashed cluster of that name left. Raises UsageError if a cluster of that name is in use.
    """
    owner = record_of("owner", os.getpid())
    if owner is None:
        raise EnvironmentFault("/proc doesn't show this very process; is it mounted?")
    BASE.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file_lock(host.base_lock(BASE)), file_lock(Layout(settings.directory).lock):
        require_unused(settings)
        cleanup.destroy_locked(settings.directory)
        host.remember(BASE)
        states = (read_state(folder) for folder in cluster_directories(BASE))
        network = choose_network({state.network for state in states if state is not None})
        state = _state(settings, binaries, network, owner)
        layout = state.layout
        for folder in (layout.root, layout.run, layout.logs, layout.pki):
            folder.mkdir(mode=0o700)
        state.write()
    return state


def require_unused(settings: Settings) -> None:
    """Raise UsageError if a cluster of that name is in use."""
    if cleanup.in_use(settings.directory):
        raise UsageError(
            f"cluster {settings.name} runs already; choose another name for yours (NAME=...), "
            f"or end that one with `make cluster-down NAME={settings.name}`"
        )


def let_stay(state: ClusterState) -> None:
    """Let the cluster outlive this process: its guard, finding no owner, ends without touching it."""
    msgspec.structs.replace(state, owner=None).write()


def _state(settings: Settings, binaries: Path, network: Network, owner: ProcessRecord) -> ClusterState:
    control = network.control_plane
    nodes = [network.node(index) for index in range(settings.nodes)]
    return ClusterState(
        directory=str(settings.directory),
        network=network.number,
        binaries=str(binaries),
        release=settings.release,
        token=secrets.token_urlsafe(32),
        control=ControlPorts(*(choose_port(control, port) for port in (2379, 2380, 10259, 10257))),
        nodes=[NodePorts(*(choose_port(node, port) for port in (10250, 10248))) for node in nodes],
        extra_args={name: list(values) for name, values in settings.extra_args.items()},
        owner=owner,
        usual_places=settings.usual_places,
    )
