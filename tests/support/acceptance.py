"""The acceptance test on a simulated node: the plugin's part, and a socket on which the command finds it."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from driver.model.gpu import Gpu
from driver.model.gpu_settings import UNSHARED, GpuSharing
from driver.simulator.description import NodeDescription
from driver.step_observer import unobserved
from kubelet_plugin.acceptance.protocol import AcceptanceRequest, AcceptanceStep, StepState
from kubelet_plugin.acceptance.session import CORDON_REASON, AcceptanceService, AcceptanceTest, Messages
from kubelet_plugin.claims.rehearsals import Rehearsals
from kubelet_plugin.dra.kubelet_sockets import SocketServer
from kubelet_plugin.settings import plugin_socket
from kubelet_plugin.step_names import Observer
from kubelet_plugin.upgrade.instance_lock import InstanceLock
from tests.support.health import HealthUnderTest
from tests.support.node import start_node

DRIVER = "gpu.tessera.dev"


@dataclass
class KnownUse:
    """What the plan says is claimed, and what the controller has still to withdraw, by GPU."""

    claimed: dict[str, set[str]] = field(default_factory=dict)
    offered: dict[str, set[str]] = field(default_factory=dict)

    def claimed_devices(self, gpu: Gpu) -> set[str]:
        return self.claimed.get(gpu.uuid, set())

    def offers_to_withdraw(self, gpu: Gpu) -> set[str]:
        return self.offered.get(gpu.uuid, set())


@dataclass
class AcceptanceNode:
    """A node, its health, and the acceptance test of its plugin."""

    root: Path
    gpus: str | NodeDescription = "dgx-h100"
    observer: Observer = unobserved
    sharing: GpuSharing = UNSHARED
    use: KnownUse = field(default_factory=KnownUse)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.health = HealthUnderTest(
            start_node(self.root, observer=self.observer, gpus=self.gpus, sharing=self.sharing)
        )
        self.node = self.health.node
        rehearsals = Rehearsals(self.node.node, self.node.partitions_of_claims, self.node.cleanup)
        self.test = AcceptanceTest(rehearsals, self.health.health, self.use, settling_seconds=0.0)

    def messages(self, gpu: str = "", *, read_only: bool = False, wait: float = 0.0) -> Messages:
        return self.test.run(AcceptanceRequest(gpu, read_only, wait), self.ended)

    def steps(self, gpu: str = "", *, read_only: bool = False) -> dict[str, AcceptanceStep]:
        """The steps that have ended, by name."""
        steps = [message.step for message in self.messages(gpu, read_only=read_only) if message.step is not None]
        return {step.step: step for step in steps if step.state is not StepState.RUNNING}

    def cordoned(self) -> set[str]:
        """The GPUs that are cordoned for a test."""
        reports = self.node.node.inventory.states()
        return {f"gpu-{report.number}" for report in reports if report.fault == f"cordoned: {CORDON_REASON}"}

    @contextmanager
    def serving(self) -> Iterator[list[str]]:
        """Serve it like the plugin does; yields the flags by which the command finds it."""
        service = AcceptanceService(self.test)
        with listening(service.handler()) as flags:
            try:
                yield flags
            finally:
                service.close()


@contextmanager
def listening(*handlers: grpc.GenericRpcHandler) -> Iterator[list[str]]:
    """A plugin that serves ``handlers``; yields the flags by which the command finds it."""
    with tempfile.TemporaryDirectory(prefix="tac-") as folder:
        kubelet, state = Path(folder) / "kubelet", Path(folder) / "state"
        InstanceLock(state).take()
        server = SocketServer(plugin_socket(kubelet / "plugins" / DRIVER, ""), handlers)
        try:
            yield ["--kubelet-dir", str(kubelet), "--state-dir", str(state)]
        finally:
            server.stop()
