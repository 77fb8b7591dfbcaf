"""Real processes that get into trouble: a controller that obeys orders, a scheduler whose requests can be held."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.harness.cluster import Cluster
from tests.harness.control_plane import scheduler_flags
from tests.harness.processes import ProcessTable, kill, send
from tests.harness.state import read_state
from tests.support import faulty_controller
from tests.support.controller import ControllerProcess
from tests.support.partition import Wire


class Point(NamedTuple):
    """A moment of a step of the controller: ``before`` or ``after``."""

    step: str
    moment: str

    def __str__(self) -> str:
        return f"{self.moment} {self.step}"


class Seen(NamedTuple):
    """When (monotonic, in seconds) the controller came to a point."""

    at: float
    point: Point


LINGER_S = 2.0


@dataclass(frozen=True)
class Circumstances:
    """``lease_s``: how long others wait for a leader that is silent; ``server``: another address of the API server.

    ``offers``: how many of each kind stand; ``hasty``: what is not wanted is fenced at once, without the seconds in
    which its taint keeps decisions away. ``publish_held``: nodes without offers publish their held devices.
    ``interval_s``: between two looks for pods for which others may be evicted; ``reservation_s``: the longest time that
    devices are reserved for one.
    """

    lease_s: int = 3
    clock_off_s: float = 0.0
    server: str = ""
    offers: int = 2
    hasty: bool = False
    publish_held: bool = False
    offer_mode: str = "auto"
    interval_s: float = 10.0
    reservation_s: float = 300.0


class FaultyController(ControllerProcess):
    """``tessera controller`` that is killed or stopped, or slow, where a test says (``faulty_controller``)."""

    def __init__(self, cluster: Cluster, name: str, circumstances: Circumstances | None = None) -> None:
        super().__init__(cluster, name)
        self.folder = cluster.directory / "controllers" / name
        self._circumstances = circumstances or Circumstances()

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # An earlier process of this name led and had orders of its own; this one has not yet led.
        (self.folder / "seen").write_text("")
        for name in ("order", "delay"):
            (self.folder / name).unlink(missing_ok=True)
        near = self._circumstances
        kubeconfig = self.cluster.service_account_kubeconfig("tessera", "tessera-controller")
        own = self.folder / "kubeconfig"
        own.write_text(kubeconfig.read_text().replace(self.cluster.server, near.server or self.cluster.server))
        own.chmod(0o600)
        settings: dict[str, object] = {
            "kubeconfig": str(own),
            "identity": self._name,
            "offers": near.offers,
            "settle_s": 0.0,
            "offer_mode": near.offer_mode,
        }
        settings["publish_held"] = "always" if near.publish_held else "auto"
        settings["publish_held_gpus"] = 0
        settings["linger_s"] = 0.0 if near.hasty else LINGER_S
        more = {"lease_s": near.lease_s, "clock_off_s": near.clock_off_s, "hasty": near.hasty}
        more |= {"interval_s": near.interval_s, "reservation_s": near.reservation_s}
        (self.folder / "settings.json").write_text(json.dumps({**settings, **more}))
        program = [sys.executable, "-P", faulty_controller.__file__]
        self._table.spawn(self._name, [*program, str(self.folder)], self.log)

    def order(self, number: signal.Signals, *points: Point) -> None:
        """Send itself this signal when it has come to these points, one after the other."""
        self._write("order", " ".join([str(number.value), *(word for point in points for word in point)]))

    def delay(self, most_s: float) -> None:
        """Be late at every point from now on: short delays often, ones up to this long seldom."""
        self._write("delay", str(most_s))

    def obeyed(self) -> bool:
        """Whether it came to where it was ordered to."""
        return not (self.folder / "order").exists()

    def seen(self) -> list[Seen]:
        lines = (line.split() for line in (self.folder / "seen").read_text().splitlines())
        return [Seen(float(at), Point(step, moment)) for at, step, moment in lines]

    def leads(self) -> bool:
        """Whether it has decided anything, which only a leader does."""
        return any(seen.point == ("decide", "after") for seen in self.seen())

    def signal(self, number: signal.Signals) -> None:
        for record in self._records():
            send(record, number)

    @property
    def running(self) -> bool:
        return any(record.alive for record in self._records())

    def _write(self, name: str, text: str) -> None:
        new = self.folder / f".{name}"
        new.write_text(text)
        new.rename(self.folder / name)


def signal_scheduler(cluster: Cluster, number: signal.Signals) -> None:
    record = ProcessTable(cluster.directory).get("kube-scheduler")
    assert record is not None
    assert send(record, number)


class HeldScheduler:
    """The cluster's own kube-scheduler, its requests to the API server behind ``wire``.

    While ``wire`` holds requests it hears everything and decides; what it decides arrives when they are let go.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.wire = Wire(cluster.server)
        self.log = cluster.logs_dir / "kube-scheduler.log"
        self._cluster = cluster
        self._table = ProcessTable(cluster.directory)

    def signal(self, number: signal.Signals) -> None:
        signal_scheduler(self._cluster, number)

    def move(self, server: str) -> None:
        """Start it anew, talking to ``server``."""
        state = read_state(self._cluster.directory)
        assert state is not None
        kill([record for record in (self._table.get("kube-scheduler"),) if record])
        kubeconfig = self._write_kubeconfig(state.layout.kubeconfig("kube-scheduler"), server)
        flags = [*scheduler_flags(state), f"--kubeconfig={kubeconfig}"]
        self._table.spawn("kube-scheduler", [state.program("kube-scheduler"), *flags], self.log)

    def _write_kubeconfig(self, original: Path, server: str) -> Path:
        file = self._cluster.directory / "kube-scheduler-held.kubeconfig"
        file.touch(mode=0o600)
        file.write_text(original.read_text().replace(self._cluster.server, server))
        return file


@contextmanager
def held_scheduler(cluster: Cluster) -> Iterator[HeldScheduler]:
    """While the block runs; then it talks to the API server itself again."""
    found = HeldScheduler(cluster)
    with found.wire:
        found.move(found.wire.url)
        yield found
        found.wire.mend()
        found.move(cluster.server)
