"""The measurements of the node plugin, as an interface that does nothing.

``metrics.metrics`` implements it for Prometheus and is loaded only if metrics are asked for. Components are wrapped
where the process is composed, so that the rules contain no measurements, and measuring costs nothing when it is off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from driver.kube.client import RequestObserver
from driver.model.device import Device
from kubelet_plugin.checkpoint.locks import KeyedLocks
from kubelet_plugin.claims.context import PluginContext
from kubelet_plugin.claims.steps import Observer
from kubelet_plugin.dra.service import ClaimService
from kubelet_plugin.status.events import RecordEvent

if TYPE_CHECKING:
    from driver.http import Page


@dataclass(frozen=True, slots=True)
class GaugeSources:
    """The values that gauges read at each scrape, in the thread of the scrape. None of them may wait for hardware.

    ``published``: names of the devices in the slices. ``unhealthy_reason``: why a device is not healthy, or None.
    ``faults``: the number of faults of each kind.
    """

    node: PluginContext
    published: Callable[[], set[str]]
    unhealthy_reason: Callable[[Device], str | None]
    faults: Callable[[], Mapping[str, int]]


class Instrumentation:
    """Wraps nothing and counts nothing."""

    requests: RequestObserver | None = None
    """For the KubeClient."""

    def register_gauges(self, sources: GaugeSources) -> None:
        """Register the gauges; to be called once, before the pages are served."""

    def measure_steps(self, observer: Observer) -> Observer:
        """``observer``, with a measurement of the duration of each step."""
        return observer

    def locks(self) -> KeyedLocks:
        """The locks of claims and GPUs."""
        return KeyedLocks()

    def measure_work(self, work: ClaimService) -> ClaimService:
        """``work``, with a measurement of each call."""
        return work

    def slices_written(self, slices: int, seconds: float) -> None:
        """Count ``slices`` that were written or deleted in ``seconds``."""

    def count_events(self, record: RecordEvent) -> RecordEvent:
        """``record``, with a count of the repairs and failures that Events report."""
        return record

    def count_orphan(self, kind: str) -> None:
        """Count an orphan that was handled: ``claim``, ``cdi-spec`` or ``record``."""

    def pages(self) -> Mapping[str, Page]:
        """The HTTP pages to serve, by path."""
        return {}
