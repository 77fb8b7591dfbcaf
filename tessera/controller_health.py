"""What a controller's ``/livez`` and ``/readyz`` tell.

Alive: its election goes on, whether the API server answers or not, and a decision that was begun ends. Ready: a
leader decides, which it does only when all it has to know was listed; a candidate reaches the API server.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from controller.steps import Observer, Step
from driver.checks import Check
from driver.config.controller_settings import ControllerSettings
from driver.kube.reach import ApiReach
from driver.watchdog import Watchdog
from tessera.endpoints import health_pages, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from driver.web import Page

ELECTION_S = 60.0
"""A candidate asks for the Lease every few seconds, a leader renews it more often; a request takes 10 s at most."""


class ControllerHealth:
    """``reach`` is to be told of every request, ``observer`` of the leader's steps."""

    def __init__(self, settings: ControllerSettings, stop: threading.Event) -> None:
        self.reach = ApiReach()
        self._settings = settings
        self._watchdog = Watchdog(stop)
        self._deciding = self._watchdog.watch("deciding what to offer")
        self._decides: Callable[[], bool] | None = None

    def observer(self, observer: Observer) -> Observer:
        """``observer``, and this."""
        return self._watchdog.steps(observer, Step.DECIDE, self._deciding)

    def leads(self, decides: Callable[[], bool] | None) -> None:
        """It leads from now on, and ``decides`` says whether it does its work; None: another does."""
        self._decides = decides

    def serve(self, stack: ExitStack, metrics: Callable[[], Mapping[str, Page]]) -> None:
        """Answer over HTTP at the addresses that settings name. Raises EnvironmentFault."""
        live = [Check("election", self._election), Check("loops", self._watchdog.look)]
        ready = [Check("api", self.reach.failure), Check("decisions", self._decisions)]
        wanted = [
            ("--metrics-address", self._settings.metrics_address, metrics),
            ("--health-address", self._settings.health_address, lambda: health_pages(live, ready)),
        ]
        serve(stack, wanted)

    def _election(self) -> str | None:
        if self.reach.asked_within(ELECTION_S):
            return None
        return f"the API server was not asked for {ELECTION_S:.0f} s: the election's loop does not turn"

    def _decisions(self) -> str | None:
        decides = self._decides
        if decides is None or decides():
            return None
        return "it leads, and has not decided of late: what it has to know is not listed, or plans can't be written"
