"""The node plugin as a real process beside a real kubelet, on a simulated node (a DGX H100 unless told otherwise)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from driver.slices.slice_names import MONITORS
from tests.harness.cluster import Cluster
from tests.harness.processes import ProcessRecord, ProcessTable, kill, stop, wait_gone
from tests.harness.waiting import wait_for

DRIVER = "gpu.tessera.dev"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"

TESSERA = str(Path(sys.executable).with_name("tessera"))

READY_S = 60.0

QUIET_S = 2.0
"""Longer than anything waits that is still to be published."""

STOPPED_S = 60.0
"""What is killed instead of ending by itself leaves its sockets, its Lease and all that an uninstall should take."""

COMMAND_S = 120.0

REFUSED = "is forbidden: User"
"""What the API server says to a request for which the ServiceAccount has no right."""


def is_of_monitors(item: Mapping[str, Any]) -> bool:
    """Whether a slice is of a pool of monitor devices."""
    return str(item["spec"]["pool"]["name"]).endswith(MONITORS)


class PluginNode(Protocol):
    """What a plugin needs of a node: a real one of the harness, or a Node object and two directories."""

    @property
    def name(self) -> str: ...

    @property
    def kubelet_dir(self) -> Path: ...

    @property
    def cdi_dir(self) -> Path: ...


@dataclass(frozen=True)
class BareNode:
    """A Node object and the two directories a plugin needs; no kubelet behind it."""

    name: str
    kubelet_dir: Path
    cdi_dir: Path


def bare_node(cluster: Cluster, name: str) -> BareNode:
    """Add it to the cluster."""
    cluster.add_node_object(name)
    root = cluster.directory / name
    return BareNode(name, root / "kubelet", root / "cdi")


@dataclass
class PluginFlags:
    """What differs between tests; the rest follows from the cluster's node. An empty one is not given."""

    gpus: str = "sim:dgx-h100"
    sim_latency: str = "zero"
    log_level: str = "debug"
    mig_gpus: str = ""
    shares: str = ""
    shared: str = ""
    shares_only: str = ""
    compute_instances: str = ""
    layout: str = ""
    metrics_address: str = ""
    health_address: str = ""
    usage_interval: str = ""
    neighbours: str = ""
    exclude_gpus: str = ""
    driver_name: str = ""


class PluginProcess:
    """``tessera node`` for one node of a cluster, with its own ServiceAccount. Start, kill, start again.

    It belongs to the cluster, and ends with it at the latest.
    """

    def __init__(self, cluster: Cluster, node: PluginNode, flags: PluginFlags | None = None) -> None:
        self.cluster = cluster
        self.node = node
        self.flags = flags or PluginFlags()
        self.host_root = cluster.directory / f"gpus-{node.name}"
        self._driver = self.flags.driver_name or DRIVER
        self.state_dir = node.kubelet_dir / "plugins" / self._driver
        self.log = cluster.logs_dir / f"tessera-{node.name}.log"
        self.socket = self.state_dir / "dra.sock"
        self.registration_socket = node.kubelet_dir / "plugins_registry" / f"{self._driver}-reg.sock"
        self._table = ProcessTable(cluster.directory)
        self._name = f"tessera-{node.name}"
        self._mark = 0

    def start(self) -> None:
        """Start it and wait until its slices are published and the kubelet knows it."""
        self.spawn()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until its slices are published and the kubelet knows it."""
        self.wait_published()
        wait_for(self.registered, READY_S, f"registration on {self.node.name}")

    def wait_published(self) -> None:
        """Wait until its slices are complete at the API server."""
        wait_for(self.slices, READY_S, f"slices of {self.node.name}")

    def spawn(self) -> None:
        """Start it without waiting for anything."""
        # As the token in a pod of that node: the API server lets it write the status of that node's claims.
        kubeconfig = self.cluster.service_account_kubeconfig("tessera", "tessera-node", node=self.node.name)
        self._mark = self.log.stat().st_size if self.log.exists() else 0
        self._table.spawn(self._name, self.command(kubeconfig), self.log)

    def command(self, kubeconfig: Path | None = None) -> list[str]:
        flags = {
            "--node-name": self.node.name,
            "--kubeconfig": kubeconfig,
            "--gpus": self.flags.gpus,
            "--kubelet-dir": self.node.kubelet_dir,
            "--cdi-dir": self.node.cdi_dir,
            "--host-root": self.host_root,
            "--sim-latency": self.flags.sim_latency,
            "--log-level": self.flags.log_level,
            "--mig-gpus": self.flags.mig_gpus,
            "--shares": self.flags.shares,
            "--shared": self.flags.shared,
            "--shares-only": self.flags.shares_only,
            "--compute-instances": self.flags.compute_instances,
            "--layout": self.flags.layout,
            "--metrics-address": self.flags.metrics_address,
            "--health-address": self.flags.health_address,
            "--usage-interval": self.flags.usage_interval,
            "--neighbours": self.flags.neighbours,
            "--exclude-gpus": self.flags.exclude_gpus,
            "--driver-name": self.flags.driver_name,
        }
        pairs = [str(part) for pair in flags.items() if pair[1] for part in pair]
        return [TESSERA, "node", *pairs]

    def kill(self) -> None:
        """SIGKILL: it gets no chance to tidy up."""
        kill(self._started())

    def refused(self) -> list[str]:
        """Lines of its log about a right that it lacks."""
        return [line for line in self.log.read_text().splitlines() if REFUSED in line]

    def stop(self) -> None:
        """SIGTERM, and wait until it is gone; stopping twice is fine."""
        stop(self._started(), STOPPED_S)

    def restart(self) -> None:
        self.stop()
        self.start()

    @property
    def pid(self) -> int:
        """Of the process started last."""
        return self._started()[0].pid

    @property
    def running(self) -> bool:
        return bool(wait_gone(self._started(), 0))

    def slices(self) -> list[dict[str, Any]]:
        """The slices of this node's pool, by name; empty while the pool is incomplete."""
        items = self._slices(monitors=False)
        spec = {i["metadata"]["name"]: i for i in items}
        newest = max((i["spec"]["pool"]["generation"] for i in spec.values()), default=0)
        mine = [spec[name] for name in sorted(spec) if spec[name]["spec"]["pool"]["generation"] == newest]
        complete = mine and len(mine) == mine[0]["spec"]["pool"]["resourceSliceCount"]
        return mine if complete else []

    def monitors(self) -> list[str]:
        """The names of the published monitor devices."""
        return [device["name"] for item in self.monitor_slices() for device in item["spec"]["devices"]]

    def monitor_slices(self) -> list[dict[str, Any]]:
        return self._slices(monitors=True)

    def _slices(self, *, monitors: bool) -> list[dict[str, Any]]:
        items = (i for i in self.cluster.api.get(SLICES)["items"] if i["spec"].get("nodeName") == self.node.name)
        return [item for item in items if is_of_monitors(item) is monitors]

    def versions(self) -> list[str]:
        """The versions of its slices, which each write changes."""
        return [item["metadata"]["resourceVersion"] for item in self.slices()]

    def wait_quiet(self) -> None:
        """Wait until no slice was written for a while: all that happened before is published then."""
        last, since = self.versions(), time.monotonic()

        def is_quiet() -> bool:
            nonlocal last, since
            if (now := self.versions()) != last or not now:
                last, since = now, time.monotonic()
            return time.monotonic() - since > QUIET_S

        wait_for(is_quiet, READY_S, f"the slices of {self.node.name} stay as they are")

    def devices(self) -> dict[str, dict[str, Any]]:
        """Every published device by name."""
        return {device["name"]: device for item in self.slices() for device in item["spec"].get("devices") or ()}

    @property
    def _whole_gpus(self) -> set[str]:
        """Those of the eight GPUs without a layout."""
        return {f"gpu-{number}" for number in range(8)} - {
            f"gpu-{each[0]}" for each in self.flags.layout.split(";") if each
        }

    def everything_offered(self) -> bool:
        """Whether all GPUs are offered whole: nothing is held then, and nothing is about to be published."""
        return self._whole_gpus <= self.devices().keys()

    def holds_something(self) -> bool:
        """Whether its slices, all of them, say that something is held; with a layout they look the same."""
        devices = self.devices()
        return bool(devices) and (bool(self.flags.layout) or not self._whole_gpus <= devices.keys())

    def faults_of_gpus(self) -> dict[str, list[dict[str, Any]]]:
        """What it keeps of faults, by GPU, of those of which it also knows what NVML says they need."""
        file = self.state_dir / "health.json"
        kept = json.loads(file.read_text())["record"] if file.exists() else {"faults": [], "actions": {}}
        found: dict[str, list[dict[str, Any]]] = {}
        for fault in kept["faults"]:
            if fault["gpu"] in kept["actions"]:
                found.setdefault(fault["gpu"], []).append(fault)
        return found

    def registered(self) -> bool:
        """Whether the kubelet accepted this process (and not an earlier one)."""
        with self.log.open("rb") as log:
            log.seek(self._mark)
            return b"registered with the kubelet" in log.read()

    def partitions(self) -> list[dict[str, Any]]:
        """What exists on the simulated hardware, as ``tessera sim smi -o json`` tells it."""
        return [{**partition, "gpu": gpu["index"]} for gpu in self.gpus() for partition in gpu["migDevices"]]

    def gpus(self) -> list[dict[str, Any]]:
        """The simulated GPUs as they are now, as ``tessera sim smi -o json`` tells it."""
        found: list[dict[str, Any]] = json.loads(self.smi("-o", "json"))
        return found

    def cdi_specs(self) -> list[Path]:
        return sorted(self.node.cdi_dir.glob(f"{self._driver}-claim_*.json"))

    def records(self) -> list[Path]:
        return sorted((self.state_dir / "claims").glob("*.json"))

    def nothing_left(self) -> bool:
        """No partition, no CDI spec, no checkpoint record."""
        return not (self.partitions() or self.cdi_specs() or self.records())

    def smi(self, *flags: str) -> str:
        """What ``tessera sim smi`` prints for this node, from a process of its own."""
        return self._sim("smi", *flags)

    def fault(self, *arguments: str) -> None:
        """``tessera sim fault`` on this node, from a process of its own."""
        self._sim("fault", *arguments)

    def _sim(self, command: str, *arguments: str) -> str:
        whole = [TESSERA, "sim", command, "--host-root", str(self.host_root), *arguments]
        return subprocess.run(whole, capture_output=True, text=True, check=True, timeout=COMMAND_S).stdout

    def _started(self) -> list[ProcessRecord]:
        """The process started last, running or not; empty before the first start."""
        record = self._table.get(self._name)
        return [record] if record else []
