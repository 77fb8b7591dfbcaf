"""The checks behind ``/livez`` and ``/readyz`` of the node plugin.

A plugin that loses the API server is alive but not ready: prepared claims keep running, and it recovers by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from driver.clock import Clock, seconds_time
from driver.errors import StateError
from driver.http import Check, health_pages, serve
from driver.kube.client import ApiReach
from driver.kube.events import REPEAT_INTERVAL_SECONDS
from driver.model.gpu import Gpu
from driver.watchdog import Watchdog
from kubelet_plugin.changes import NodeEventSink
from kubelet_plugin.inventory.inventory import Inventory
from kubelet_plugin.settings import NodeSettings
from kubelet_plugin.status.events import EventReason
from kubelet_plugin.upgrade.instance_lock import is_listening

if TYPE_CHECKING:
    from driver.http import Page

log = logging.getLogger(__name__)

SCAN_TIMEOUT_SECONDS = 30.0
"""A scan starts every 5 s and takes milliseconds; a GPU that hangs is skipped after 15 s."""

DIRECTORY_PROBE_INTERVAL_SECONDS = 10.0
"""Time between two probes of the directories; each writes 16 KiB."""

REPORT_INTERVAL_SECONDS = REPEAT_INTERVAL_SECONDS + DIRECTORY_PROBE_INTERVAL_SECONDS
"""Longer than equal Events are suppressed: a suppressed Event would be written after the failure has ended."""

PROBE = "probe"
"""Name of the probe's file in the state directory."""

SOCKET_TIMEOUT_SECONDS = 60.0
"""How long the plugin's socket may lack a listener: it is created after the health pages are served."""


class NodeProbes:
    """Thread-safe. The plugin reports to ``reach`` and ``watchdog``."""

    def __init__(self, settings: NodeSettings, stop: threading.Event) -> None:
        self.reach = ApiReach()
        self.watchdog = Watchdog(stop)
        self.publishing = self.watchdog.watch("publishing slices")
        self.plan_status = self.watchdog.watch("writing the plan's status")
        self._settings = settings
        self._socket = SocketCheck(settings.plugin_socket)

    def serve(
        self, stack: ExitStack, metrics: Callable[[], Mapping[str, Page]], live: Sequence[Check], ready: Sequence[Check]
    ) -> None:
        """Serve metrics and health at the addresses of the settings. Raises EnvironmentFault.

        ``live`` and ``ready`` are further checks; a failure of ``live`` is one that a new container repairs.
        """
        live = [Check("loops", self.watchdog.failure), Check("grpc", self._socket.failure), *live]
        ready = [Check("api", self.reach.failure), *ready]
        addresses = [
            ("--metrics-address", self._settings.metrics_address, metrics),
            ("--health-address", self._settings.health_address, lambda: health_pages(live, ready)),
        ]
        serve(stack, addresses)


STATE_REASONS = (EventReason.STATE_UNWRITABLE, EventReason.STATE_WRITABLE)
CDI_REASONS = (EventReason.CDI_UNWRITABLE, EventReason.CDI_WRITABLE)
"""Reasons of the Events about a directory: while it is not writable, and afterwards."""


class SocketCheck:
    """Whether any process listens on the plugin's socket; only this check detects a socket file deleted on the host."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._listening_at = clock()

    def failure(self) -> str | None:
        if is_listening(self._path):
            self._listening_at = self._clock()
            return None
        silent = self._clock() - self._listening_at
        return (
            f"no process has listened on {self._path} for {silent:.0f} s" if silent > SOCKET_TIMEOUT_SECONDS else None
        )


class HardwareCheck:
    """Whether scans end and any GPU responds. A single faulty GPU is no failure: the others can be used."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._ended_at = time.monotonic()
        self._responding = True

    def handle_scan(self, answering: Sequence[Gpu]) -> None:
        """Record that a scan has ended; the GPUs ``answering`` responded."""
        self._responding = bool(answering)
        self._ended_at = time.monotonic()

    def failure(self) -> str | None:
        late = time.monotonic() - self._ended_at
        if late > SCAN_TIMEOUT_SECONDS:
            return f"NVML hangs: the last scan of the GPUs ended {late:.0f} s ago"
        gpus = self._inventory.gpus
        if self._responding or not gpus:
            return None
        return f"no GPU responds: {self._inventory.fault(gpus[0]) or 'NVML finds none'}"


class DirectoryProbe:
    """Whether a directory that claims need is writable, by the result of the last write.

    ``write`` writes durably and raises StateError.
    A failure is reported again every REPORT_INTERVAL_SECONDS, so that its Event stays recent. The first success is
    reported, too, because an earlier process may have reported a failure. Each message contains the time of the change:
    an Event with a new message is written at once, so the newer of the two Events is always the state.
    """

    def __init__(
        self,
        directory: Path,
        write: Callable[[], None],
        reasons: tuple[EventReason, EventReason],
        events: NodeEventSink,
        clock: Clock,
    ) -> None:
        self._directory = directory
        self._write = write
        self._unwritable, self._writable = reasons
        self._events = events
        self._clock = clock
        self._since = ""
        self._report_at = 0.0
        self._began_at: float | None = None
        self._failure: str | None = f"no file has been written to {directory} yet"

    def probe(self) -> None:
        """Write a file and report the result."""
        before, self._began_at = self._failure, self._clock.monotonic()
        try:
            self._write()
        except StateError as error:
            self._failure = str(error)
        else:
            self._failure = None
        finally:
            self._began_at = None
        if self._failure != before:
            self._since = seconds_time(self._clock.now())
        elif self._failure is None or self._clock.monotonic() < self._report_at:
            return
        self._report_at = self._clock.monotonic() + REPORT_INTERVAL_SECONDS
        where = str(self._directory)
        if self._failure is None:
            log.info("directory is writable", extra={"path": where})
            self._events.node(self._writable, f"{where} is writable since {self._since}", False)
        else:
            log.error("directory is not writable", extra={"path": where, "error": self._failure})
            message = f"no claim can be prepared since {self._since}: {self._failure}"
            self._events.node(self._unwritable, message, True)

    def failure(self) -> str | None:
        """Why the directory is not writable, or None."""
        began = self._began_at
        late = 0.0 if began is None else self._clock.monotonic() - began
        if late > SCAN_TIMEOUT_SECONDS:
            return f"a write to {self._directory} has not returned for more than {SCAN_TIMEOUT_SECONDS:.0f} s"
        return self._failure


class DirectoryProbes:
    """Probes directories periodically."""

    def __init__(self, *probes: DirectoryProbe) -> None:
        self._probes = probes

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(DIRECTORY_PROBE_INTERVAL_SECONDS):
            self.probe()

    def probe(self) -> None:
        """Probe each directory now."""
        for probe in self._probes:
            probe.probe()
