"""Several nodes on one machine that all find their directories where a node alone has them.

A DaemonSet names one path for all nodes: /var/lib/kubelet, /var/run/cdi. Here each node's lie elsewhere. So kubelet and
containerd of a node may run in a mount namespace of their own, in which the node's own directories are mounted there. A
process that does nothing holds the namespace; it ends with the cluster, and the mounts with it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from driver.errors import EnvironmentFault
from tests.harness.layout import NodeLayout
from tests.harness.processes import ProcessRecord, ProcessTable
from tests.harness.waiting import wait_for

KUBELET = Path("/var/lib/kubelet")
CDI = Path("/run/cdi")
TESSERA = Path("/var/lib/tessera")
"""Where simulated GPUs of a pod are."""
MPS = Path("/run/tessera-mps")
"""Where the node plugin and the containers of claims find the MPS daemons."""
HOLDER = ["/usr/bin/unshare", "--mount", "--propagation", "private", "/bin/sleep", "infinity"]
READY_S = 60.0


def places(node: NodeLayout) -> dict[Path, Path]:
    """What is mounted where: the node's own directory by the place where its pods look for it."""
    return {KUBELET: node.kubelet, CDI: node.cdi, TESSERA: node.tessera, MPS: node.mps}


class UsualPlaces:
    """The mount namespace of one node."""

    def __init__(self, node: NodeLayout, table: ProcessTable, log: Path) -> None:
        self._node = node
        self._table = table
        self._log = log

    def open(self) -> None:
        """Make the namespace and the mounts in it."""
        holder = self._table.spawn(self._name, HOLDER, self._log)
        # It becomes ``sleep`` when the namespace is its own in every respect; before, mounts in it might spread.
        wait_for(lambda: _name_of(holder.pid) == "sleep", READY_S, f"a mount namespace for {self._node.name}")
        for place, own in places(self._node).items():
            for folder in (place, own):
                folder.mkdir(parents=True, exist_ok=True)
            command = self.inside(["/bin/mount", "--bind", str(own), str(place)])
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise EnvironmentFault(f"{self._node.name}: {' '.join(command)}: {done.stderr.strip()}")

    def inside(self, command: list[str]) -> list[str]:
        """``command`` in the namespace, as the same process."""
        holder = self._table.get(self._name)
        if holder is None or not holder.alive:
            raise EnvironmentFault(f"nobody holds the mount namespace of {self._node.name}; start the cluster anew")
        return ["/usr/bin/nsenter", f"--mount={_namespace(holder)}", "--", *command]

    @property
    def _name(self) -> str:
        return f"mounts-{self._node.name}"


def _namespace(holder: ProcessRecord) -> str:
    return f"/proc/{holder.pid}/ns/mnt"


def _name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
