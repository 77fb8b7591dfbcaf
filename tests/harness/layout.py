"""Where the files of a cluster lie.

    <base>/<cluster>/
        state.json            what the cluster is (see state.py)
        run/<process>.json    every process started, recorded right after its start (see processes.py)
        log/<process>.log
        pki/                  certificates and keys
        admin.kubeconfig      what users get; the components have theirs beside it
        etcd/                 data
        <node>/               kubelet/ (its root), containerd/ (root and state), cdi/, cni/, pods/ (logs)
    /run/tessera-test/<cluster>/<node number>/    the sockets of containerd's shims, whose names are 64 characters

A unix socket's path has at most 107 characters: hence the short names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from driver.errors import UsageError

BASE = Path("/var/lib/tessera-test")
"""On a real disk: overlay snapshots and etcd lie here."""
RUN = Path("/run/tessera-test")
SOCKET_PATH_MAX = 107
PLUGIN_SOCKET = "kubelet/plugins_registry/gpu.nvidia.com-reg.sock"
"""The longest socket path below a node's directory that a DRA driver of ours makes."""


@dataclass(frozen=True)
class NodeLayout:
    """The files of one node, below ``root``."""

    cluster: Path
    index: int

    @property
    def name(self) -> str:
        return f"node-{self.index}"

    @property
    def root(self) -> Path:
        return self.cluster / self.name

    @property
    def kubelet(self) -> Path:
        """The kubelet's root: plugins/, plugins_registry/, pods/, checkpoints."""
        return self.root / "kubelet"

    @property
    def containerd(self) -> Path:
        return self.root / "containerd"

    @property
    def socket(self) -> Path:
        return self.root / "containerd.sock"

    @property
    def shim_sockets(self) -> Path:
        return RUN / self.cluster.name / str(self.index)

    @property
    def cdi(self) -> Path:
        return self.root / "cdi"

    @property
    def tessera(self) -> Path:
        """Where pods of a node in its usual places have their simulated GPUs."""
        return self.root / "tessera"

    @property
    def mps(self) -> Path:
        """Where a node in its usual places has its MPS daemons."""
        return self.root / "mps"

    @property
    def cni(self) -> Path:
        return self.root / "cni"

    @property
    def pod_logs(self) -> Path:
        return self.root / "pods"


@dataclass(frozen=True)
class Layout:
    """The files of one cluster, below ``root``."""

    root: Path

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def logs(self) -> Path:
        return self.root / "log"

    @property
    def pki(self) -> Path:
        return self.root / "pki"

    @property
    def lock(self) -> Path:
        """Beside the directory, not in it: it outlives the directory."""
        return self.root.parent / f".{self.root.name}.lock"

    @property
    def sockets(self) -> Path:
        return RUN / self.root.name

    def kubeconfig(self, name: str) -> Path:
        return self.root / f"{name}.kubeconfig"

    def node(self, index: int) -> NodeLayout:
        return NodeLayout(self.root, index)


def check_socket_paths(cluster: Path, nodes: int) -> None:
    """Raise UsageError if a socket of such a cluster would have too long a path."""
    longest = NodeLayout(cluster, max(nodes - 1, 0)).root / PLUGIN_SOCKET
    if len(str(longest)) > SOCKET_PATH_MAX:
        raise UsageError(
            f"{cluster} is too long: a socket below it would have {len(str(longest))} characters, "
            f"at most {SOCKET_PATH_MAX} work; choose a shorter name or base directory"
        )
