"""Health of a simulated node: production parts, with events given by the test as a thread would."""

from __future__ import annotations

from dataclasses import dataclass, field

from driver.model.device import Device
from driver.model.gpu_events_and_conditions import GpuEvent
from driver.slices.build import UNHEALTHY
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.health.device_health import HealthMonitor
from kubelet_plugin.health.recorded_faults import HealthFile
from tests.support.node import KeptNodeEvents, NodeUnderTest
from tests.support.published import build_slices


@dataclass
class HealthUnderTest:
    """``told`` is what was said about the node: (reason, message), and ``about`` what each is about."""

    node: NodeUnderTest
    now: float = 1_800_000_000.0
    told: list[tuple[str, str]] = field(default_factory=list)
    about: list[str] = field(default_factory=list)
    changes: int = 0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A new process's, on what the last one left on disk."""
        held, changes, file = self.node.node, ChangeNotifier(), HealthFile(self.node.root / "state")
        changes.subscribe(NodeChange.HEALTH, self._changed)
        events = KeptNodeEvents(self.told, self.about)
        self.health = HealthMonitor(
            self.node.host, held.inventory, held.checkpoint, file, changes, events, lambda: self.now
        )
        self.node.outcomes.receivers = [self.health]
        self.health.handle_scan(self.node.node.inventory.gpus)

    def hear(self) -> list[GpuEvent]:
        """Everything that happened since the last time, as the listener's thread would."""
        found = []
        while (event := self.node.host.wait_for_event(0.0)) is not None:
            found.append(event)
            self.health.handle_event(event)
        return found

    def look(self) -> None:
        self.node.scanner.scan(self.node.node.inventory, [self.health])

    def xid(self, gpu: int, number: int, device: str | None = None) -> None:
        """It happens, is heard, and makes the scanner look."""
        self.node.simulated.faults.xid(gpu, number, device)
        self.hear()
        self.look()

    def restart(self) -> HealthUnderTest:
        """A new process on the same disk and hardware."""
        return HealthUnderTest(self.node.restart(), self.now)

    def device(self, name: str) -> Device:
        found = self.node.node.inventory.device(name)
        assert found is not None, name
        return found

    def taints(self) -> dict[str, str]:
        """The value of the taint of every device that is published as unhealthy, by name."""
        slices = build_slices(self.node.node.pool, self.node.node.inventory.published())
        devices = (device for content in slices.values() for device in content.get("devices", ()))
        found = {device["name"]: taint for device in devices for taint in device.get("taints", ())}
        return {name: taint["value"] for name, taint in found.items() if taint["key"] == UNHEALTHY}

    def unhealthy(self) -> set[str]:
        """The GPUs of which any device is published as unhealthy."""
        return {"-".join(name.split("-")[:2]) for name in self.taints()}

    def _changed(self) -> None:
        self.changes += 1
