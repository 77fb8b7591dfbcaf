"""What a later run must know of a cluster, kept in its directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.harness.addresses import Network
from tests.harness.layout import Layout
from tests.harness.processes import ProcessRecord, ProcessTable
from tests.harness.versions import KubernetesRelease


class NodePorts(msgspec.Struct, frozen=True):
    """The ports of a node's kubelet, on the node's address."""

    kubelet: int
    health: int


class ControlPorts(msgspec.Struct, frozen=True):
    """The ports of the control plane, on its address; the API server's is always 443 on its own."""

    etcd: int
    etcd_peer: int
    scheduler: int
    controller_manager: int


class ClusterState(msgspec.Struct, frozen=True):
    """A cluster that was started: enough to use it, to restart its parts and to end it.

    ``owner`` is the process the cluster ends with; None once it is meant to stay.
    """

    directory: str
    network: int
    binaries: str
    release: KubernetesRelease
    token: str
    control: ControlPorts
    nodes: list[NodePorts]
    extra_args: dict[str, list[str]]
    owner: ProcessRecord | None
    usual_places: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(Path(self.directory))

    @property
    def addresses(self) -> Network:
        return Network(self.network)

    @property
    def name(self) -> str:
        return self.layout.root.name

    @property
    def server(self) -> str:
        """The URL of the API server."""
        return f"https://{self.addresses.api}"

    def program(self, name: str) -> str:
        """The path of one of the programs."""
        return str(Path(self.binaries) / name)

    def in_use(self) -> bool:
        """Whether somebody still wants this cluster: its owner lives, or it is meant to stay and runs."""
        if self.owner is not None:
            return self.owner.alive
        return any(record.alive for record in ProcessTable(self.layout.root).all())

    def write(self) -> None:
        """Keep it, atomically and for root only (it holds the admin's token)."""
        temporary = self.layout.state.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        temporary.chmod(0o600)
        temporary.rename(self.layout.state)


def read_state(directory: Path) -> ClusterState | None:
    """The state in ``directory``; None if there is none or it is unreadable (a crash, an older harness)."""
    try:
        return msgspec.json.decode(Layout(directory).state.read_bytes(), type=ClusterState)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def cluster_directories(base: Path) -> list[Path]:
    """The directories of all clusters below ``base``, also of half-started and half-ended ones."""
    return sorted(folder for folder in base.glob("[!.]*") if folder.is_dir()) if base.is_dir() else []
