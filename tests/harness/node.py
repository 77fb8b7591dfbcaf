"""One real node: a containerd and a kubelet with directories, sockets, ports and a cgroup of their own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import yaml

from driver.errors import EnvironmentFault, RecoverableError
from tests.harness import host, processes
from tests.harness.cgroups import Cgroups
from tests.harness.node_config import CNI, containerd_config, kubelet_config, kubelet_flags
from tests.harness.processes import ProcessRecord, ProcessTable
from tests.harness.readiness import Probe, accepts, http_ok, log_end, wait_ready
from tests.harness.state import ClusterState
from tests.harness.usual_places import UsualPlaces

READY_S = 180.0
COMMAND_S = 180.0
"""For one call of ctr, an exec in a container included."""


class NodeError(RecoverableError):
    """A command on the node failed: no such container, or it ended with an error."""


class Node:
    """A node of the cluster that ``state`` describes; several objects for the same node are fine.

    kubelet_dir   the kubelet's root: a DRA plugin registers in ``kubelet_dir/plugins_registry``
    cdi_dir       the only directory in which this node's containerd looks for CDI specs
    pod_logs_dir  the logs of its pods
    mps_dir       the directory of the MPS daemons, if the node is in its usual places
    """

    def __init__(self, state: ClusterState, index: int) -> None:
        self._state = state
        self._table = ProcessTable(state.layout.root)
        self._layout = state.layout.node(index)
        self._index = index
        log = state.layout.logs / f"mounts-{self._layout.name}.log"
        self._places = UsualPlaces(self._layout, self._table, log) if state.usual_places else None
        self.name = self._layout.name
        self.address = state.addresses.node(index)
        self.kubelet_dir = self._layout.kubelet
        self.cdi_dir = self._layout.cdi
        self.pod_logs_dir = self._layout.pod_logs
        self.mps_dir = self._layout.mps
        self.containerd_socket = self._layout.socket

    def __repr__(self) -> str:
        return f"Node({self.name!r})"

    # The kubelet

    def start_kubelet(self) -> None:
        """Start the kubelet and wait until it is healthy."""
        self.spawn_kubelet()
        self.wait_kubelet()

    def stop_kubelet(self) -> None:
        """End the kubelet with SIGTERM; its pods go on."""
        processes.stop(self._records("kubelet"))

    def kill_kubelet(self) -> None:
        """End the kubelet with SIGKILL; its pods go on."""
        processes.kill(self._records("kubelet"))

    def restart_kubelet(self) -> None:
        """Stop it, start it, wait until it is healthy."""
        self.stop_kubelet()
        self.start_kubelet()

    # containerd

    def start_containerd(self) -> None:
        """Start containerd and wait until it accepts connections."""
        self.spawn_containerd()
        self.wait_containerd()

    def stop_containerd(self) -> None:
        """End containerd with SIGTERM; containers go on, and the next start finds them."""
        processes.stop(self._records("containerd"))

    def kill_containerd(self) -> None:
        """End containerd with SIGKILL; containers go on, and the next start finds them."""
        processes.kill(self._records("containerd"))

    def restart_containerd(self) -> None:
        """Stop it, start it, wait until it accepts connections."""
        self.stop_containerd()
        self.start_containerd()

    def import_image(self, archive: Path) -> None:
        """Make the images in the OCI archive known to this node's kubelet."""
        self._ctr("images", "import", str(archive))

    # Pods

    def exec(self, namespace: str, pod: str, command: Sequence[str], container: str | None = None) -> str:
        """Run ``command`` in the running container of the pod and return what it printed.

        Through containerd: works without a kubelet. Without ``container`` the pod must have just one running. Raises
        NodeError with the command's output if it fails.
        """
        identity = self._container(namespace, pod, container)
        exec_id = f"exec-{os.urandom(6).hex()}"
        fifos = self._layout.containerd / "fifo"
        return self._ctr("tasks", "exec", "--fifo-dir", str(fifos), "--exec-id", exec_id, identity, *command)

    def kill_container(self, namespace: str, pod: str, container: str | None = None) -> None:
        """SIGKILL to the container's first process; whether another is started is the kubelet's affair."""
        self._ctr("tasks", "kill", "--signal", "SIGKILL", self._container(namespace, pod, container))

    def read_log(self, pod: str, namespace: str = "default", container: str | None = None) -> str:
        """Everything the pod's containers (or that one) wrote; empty if there is nothing yet.

        Needs no kubelet, and finds the log of a pod of an earlier life, too, as long as the kubelet keeps it.
        """
        files = sorted(self.pod_logs_dir.glob(f"{namespace}_{pod}_*/{container or '*'}/*.log"))
        return "".join(_without_prefix(line) for file in files for line in file.read_text().splitlines())

    def inside(self, command: list[str]) -> list[str]:
        """``command`` as a process that finds directories where this node has them."""
        return self._places.inside(command) if self._places else command

    # Called by Cluster

    def prepare(self) -> None:
        """Make its directories, its cgroup and its configuration files."""
        layout = self._layout
        for folder in (layout.kubelet, layout.containerd, layout.cdi, layout.cni, layout.pod_logs, layout.shim_sockets):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        config = kubelet_config(self._state, layout)
        (layout.root / "kubelet.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        (layout.root / "containerd.toml").write_text(containerd_config(layout))
        (layout.cni / "10-loopback.conflist").write_text(json.dumps(CNI))
        Cgroups.detect().create(config["cgroupRoot"].lstrip("/"))
        if self._places:
            self._places.open()

    def spawn_kubelet(self) -> None:
        """Start the kubelet and wait only until another may start (see ``host.kubelet_start``), half a second."""
        if self._places:  # it has a /var/lib/kubelet of its own
            self._spawn("kubelet", kubelet_flags(self._state, self._layout))
            return
        with host.kubelet_start(self._state.layout.root.parent) as done:
            self._spawn("kubelet", kubelet_flags(self._state, self._layout))
            self._wait("kubelet", done)

    def wait_kubelet(self) -> None:
        """Wait until the kubelet is healthy."""
        port = self._state.nodes[self._index].health
        self._wait("kubelet", http_ok(f"http://{self.address}:{port}/healthz"))

    def spawn_containerd(self) -> None:
        """Start containerd without waiting for it."""
        self._spawn("containerd", [f"--config={self._layout.root / 'containerd.toml'}", "--log-level=info"])

    def wait_containerd(self) -> None:
        """Wait until containerd accepts connections: all its plugins are loaded then."""
        self._wait("containerd", accepts(self._layout.socket))

    def _spawn(self, program: str, flags: list[str]) -> None:
        if any(record.alive for record in self._records(program)):
            raise EnvironmentFault(f"the {program} of {self.name} runs already; stop or kill it first")
        command = [self._state.program(program), *flags, *self._state.extra_args.get(program, [])]
        self._table.spawn(f"{program}-{self.name}", self.inside(command), self._log(program))

    def _wait(self, program: str, probe: Probe) -> None:
        for record in self._records(program):
            wait_ready(record, probe, self._log(program), READY_S)

    def _records(self, program: str) -> list[ProcessRecord]:
        record = self._table.get(f"{program}-{self.name}")
        return [] if record is None else [record]

    def _log(self, program: str) -> Path:
        return self._state.layout.logs / f"{program}-{self.name}.log"

    def _container(self, namespace: str, pod: str, container: str | None) -> str:
        labels = {"pod.namespace": namespace, "pod.name": pod}
        if container is not None:
            labels["container.name"] = container
        chosen = [f'labels."io.kubernetes.{name}"=={json.dumps(value)}' for name, value in labels.items()]
        known = self._ctr(
            "containers", "list", "--quiet", ",".join([*chosen, 'labels."io.cri-containerd.kind"==container'])
        )
        tasks = (line.split() for line in self._ctr("tasks", "list").splitlines())
        running = {columns[0] for columns in tasks if columns[-1] == "RUNNING"}
        found = [identity for identity in known.split() if identity in running]
        if len(found) != 1:
            raise NodeError(f"pod {namespace}/{pod} has {len(found)} running containers on {self.name}; 1 is needed")
        return found[0]

    def _ctr(self, *arguments: str) -> str:
        command = [self._state.program("ctr"), f"--address={self._layout.socket}", "--namespace=k8s.io", *arguments]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        if answer.returncode != 0:
            lines = (answer.stdout + answer.stderr).splitlines()
            output = "\n".join(line for line in lines if 'msg="DEPRECATION: ' not in line)
            end = log_end(self._log("containerd"))
            raise NodeError(f"{self.name}: ctr {' '.join(arguments)}: exit status {answer.returncode}: {output}{end}")
        return answer.stdout


def _without_prefix(line: str) -> str:
    """A line of a CRI log without "<time> <stream> <F or P>"; P marks a line that goes on."""
    _, _, tag, text = [*line.split(" ", 3), "", "", ""][:4]
    return text if tag == "P" else text + "\n"
