"""Hearing NVML's events in a thread of its own, whatever hangs elsewhere."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from driver.hardware.host import Host
from driver.model.health import GpuEvent

log = logging.getLogger(__name__)

WAIT_S = 5.0
"""Longest wait in NVML: GPUs that came meanwhile are heard from then on, and ``stop`` is looked at."""


class Listener:
    """Gives every event to each of ``hear``, in order; they must return quickly."""

    def __init__(self, host: Host, *hear: Callable[[GpuEvent], None]) -> None:
        self._host = host
        self._hear = hear

    def run(self, stop: threading.Event) -> None:
        """Listen until ``stop`` is set."""
        while not stop.is_set():
            try:
                event = self._host.wait_for_event(WAIT_S)
            except Exception:
                if stop.is_set():  # whatever it waited for may be gone by then
                    return
                log.exception("defect while waiting for events of the hardware")
                stop.wait(WAIT_S)
                continue
            if event is not None:
                self._give(event)

    def _give(self, event: GpuEvent) -> None:
        for hear in self._hear:
            try:
                hear(event)
            except Exception:
                # One that can't take an event must not keep it from the others, nor end the thread.
                log.exception("defect while hearing an event", extra={"gpu": event.gpu_uuid, "kind": event.kind.value})
