"""What the node plugin tells of itself while it works. Here nobody listens: see ``metrics`` for who does.

Parts are measured by being wrapped where they are put together, so that the rules know nothing of it, and so that
measuring costs nothing where nobody asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from driver.kube.transport import RequestObserver
from driver.model.device import Device
from kubelet_plugin.locks import KeyedLocks
from kubelet_plugin.node import Node
from kubelet_plugin.service import ClaimWork
from kubelet_plugin.steps import Observer
from kubelet_plugin.telling import Record

if TYPE_CHECKING:
    from driver.web import Page


@dataclass(frozen=True, slots=True)
class Sources:
    """What the gauges are read from, at each scrape and by its thread. Nothing in it may wait for hardware.

    ``published``: names of the devices in the slices. ``trouble``: why a device is not healthy, or None. ``faults``:
    how many there are of each kind.
    """

    node: Node
    published: Callable[[], set[str]]
    trouble: Callable[[Device], str | None]
    faults: Callable[[], Mapping[str, int]]


class Meter:
    """Wraps nothing and forgets what it is told."""

    requests: RequestObserver | None = None
    """For the KubeClient."""

    def read_from(self, sources: Sources) -> None:
        """To be called once, before ``serve``."""

    def observer(self, observer: Observer) -> Observer:
        """``observer``, and a measurement of each step's duration."""
        return observer

    def locks(self) -> KeyedLocks:
        """The locks of claims and GPUs."""
        return KeyedLocks()

    def work(self, work: ClaimWork) -> ClaimWork:
        """``work``, each call measured."""
        return work

    def written(self, slices: int, seconds: float) -> None:
        """So many slices were written or deleted, in so much time."""

    def told(self, record: Record) -> Record:
        """``record``, and a count of the repairs and faults that people are told of by Events."""
        return record

    def orphan(self, kind: str) -> None:
        """Something that no claim has any more was dealt with: ``claim``, ``cdi-spec`` or ``record``."""

    def fault(self, kind: str) -> None:
        """Something failed; ``kind`` is one of a few words."""

    def pages(self) -> Mapping[str, Page]:
        """What to serve over HTTP, by path."""
        return {}
