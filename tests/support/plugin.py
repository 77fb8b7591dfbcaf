"""The node plugin as a real process beside a real kubelet, on a simulated DGX H100."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.cluster import Cluster
from tests.harness.node import Node
from tests.harness.waiting import wait_for

PROJECT = Path(__file__).parents[2]
DRIVER = "gpu.tessera.dev"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"

READY_S = 30.0


@dataclass
class PluginFlags:
    """What differs between tests; the rest follows from the cluster's node."""

    gpus: str = "sim:dgx-h100"
    sim_latency: str = "zero"
    log_level: str = "debug"


class PluginProcess:
    """``tessera node`` for one node of a cluster, with its own ServiceAccount. Start, kill, start again."""

    def __init__(self, cluster: Cluster, node: Node, flags: PluginFlags | None = None) -> None:
        self.cluster = cluster
        self.node = node
        self.flags = flags or PluginFlags()
        self.host_root = cluster.directory / f"gpus-{node.name}"
        self.state_dir = node.kubelet_dir / "plugins" / DRIVER
        self.log = cluster.logs_dir / f"tessera-{node.name}.log"
        self.socket = self.state_dir / "dra.sock"
        self.registration_socket = node.kubelet_dir / "plugins_registry" / f"{DRIVER}-reg.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until its slices are published and the kubelet knows it."""
        self.spawn()
        wait_for(self.slices, READY_S, f"slices of {self.node.name}")
        wait_for(self.registered, READY_S, f"registration on {self.node.name}")

    def spawn(self) -> None:
        """Start it without waiting for anything."""
        kubeconfig = self.cluster.service_account_kubeconfig("tessera", "tessera-node")
        self._mark = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(kubeconfig), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=PROJECT
            )

    def command(self, kubeconfig: Path) -> list[str]:
        flags = {
            "--node-name": self.node.name,
            "--kubeconfig": kubeconfig,
            "--gpus": self.flags.gpus,
            "--kubelet-dir": self.node.kubelet_dir,
            "--cdi-dir": self.node.cdi_dir,
            "--host-root": self.host_root,
            "--sim-latency": self.flags.sim_latency,
            "--log-level": self.flags.log_level,
        }
        pairs = [str(part) for pair in flags.items() for part in pair]
        return [str(Path(sys.executable).with_name("tessera")), "node", *pairs]

    def kill(self) -> None:
        """SIGKILL: it gets no chance to tidy up."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and wait until it is gone; stopping twice is fine."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        self.stop()
        self.start()

    @property
    def pid(self) -> int:
        """Of the running process. Raises AssertionError if there is none."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def slices(self) -> list[dict[str, Any]]:
        """This driver's slices of this node, by name; empty while the pool is incomplete."""
        items = self.cluster.api.get(SLICES)["items"]
        spec = {i["metadata"]["name"]: i for i in items if i["spec"].get("nodeName") == self.node.name}
        newest = max((i["spec"]["pool"]["generation"] for i in spec.values()), default=0)
        mine = [spec[name] for name in sorted(spec) if spec[name]["spec"]["pool"]["generation"] == newest]
        complete = mine and len(mine) == mine[0]["spec"]["pool"]["resourceSliceCount"]
        return mine if complete else []

    def devices(self) -> dict[str, dict[str, Any]]:
        """Every published device by name."""
        return {device["name"]: device for item in self.slices() for device in item["spec"].get("devices", ())}

    def registered(self) -> bool:
        """Whether the kubelet accepted this process (and not an earlier one)."""
        with self.log.open("rb") as log:
            log.seek(self._mark)
            return b"registered with the kubelet" in log.read()

    def partitions(self) -> list[dict[str, Any]]:
        """What exists on the simulated hardware, as ``tessera sim smi -o json`` tells it."""
        command = [str(Path(sys.executable).with_name("tessera")), "sim", "smi", "-o", "json"]
        answer = subprocess.run(
            [*command, "--host-root", str(self.host_root)], capture_output=True, text=True, check=True, timeout=30
        )
        gpus = json.loads(answer.stdout)
        return [{**partition, "gpu": gpu["index"]} for gpu in gpus for partition in gpu["migDevices"]]

    def cdi_specs(self) -> list[Path]:
        return sorted(self.node.cdi_dir.glob(f"{DRIVER}-claim_*.json"))

    def records(self) -> list[Path]:
        return sorted((self.state_dir / "claims").glob("*.json"))

    def nothing_left(self) -> bool:
        """No partition, no CDI spec, no checkpoint record."""
        return not (self.partitions() or self.cdi_specs() or self.records())

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            os.kill(self._process.pid, number)
        self._process.wait(READY_S)
        self._process = None
