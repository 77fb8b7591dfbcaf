"""Receiving and logging NVML events, apart from scans: a GPU that hangs during a scan delays no event."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from driver.hardware.node_gpus import Host
from driver.model.gpu_health import EventKind, GpuEvent
from driver.model.xid import meaning_of

log = logging.getLogger(__name__)

EVENT_TIMEOUT_SECONDS = 5.0
"""Longest wait in NVML. Afterwards GPUs that were added meanwhile are included, and ``stop`` is checked."""


class NvmlEventFollower(Protocol):
    """A part that acts on NVML events."""

    def handle_event(self, event: GpuEvent) -> None:
        """Handle one event; must return quickly."""


class NvmlEventListener:
    """Passes every NVML event to each of ``followers``, in a thread of its own."""

    def __init__(self, host: Host, *followers: NvmlEventFollower) -> None:
        self._host = host
        self._followers = followers

    def run(self, stop: threading.Event) -> None:
        """Receive events until ``stop`` is set."""
        while not stop.is_set():
            try:
                event = self._host.wait_for_event(EVENT_TIMEOUT_SECONDS)
            except Exception:
                if stop.is_set():  # the hardware may be closed by then
                    return
                log.exception("internal error while waiting for NVML events")
                stop.wait(EVENT_TIMEOUT_SECONDS)
                continue
            if event is not None:
                _log_xid(event)
                self._dispatch(event)

    def _dispatch(self, event: GpuEvent) -> None:
        for follower in self._followers:
            try:
                follower.handle_event(event)
            except Exception:
                # A defect in one follower must not keep the event from the others, nor end the thread.
                log.exception(
                    "internal error while handling an NVML event",
                    extra={"gpu": event.gpu_uuid, "kind": event.kind.value},
                )


def _log_xid(event: GpuEvent) -> None:
    """Log an XID, also of a GPU that settings exclude."""
    if event.kind is EventKind.XID and event.xid is not None:
        extra = {"gpu": event.gpu_uuid, "xid": event.xid, "meaning": meaning_of(event.xid).text}
        log.warning("GPU reported an XID", extra={**extra, "gpuInstance": event.gpu_instance_id})
