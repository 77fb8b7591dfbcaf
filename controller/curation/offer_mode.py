"""The offer mode of the cluster: whether offers of one GPU are kept apart by counters, or must be disjoint."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from typing import NamedTuple

from controller.cluster.node_views import NodeView
from driver.errors import ApiError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import minor_version
from driver.model.plan import COUNTERS_FIELD, OfferMode

log = logging.getLogger(__name__)

VERSION_INTERVAL_SECONDS = 30.0
"""Time after which the version of the API server is read again: control planes are upgraded while this runs."""

FIRST_FAST_MINOR_VERSION = 37
"""The scheduler of Kubernetes 1.36 takes about a second for a pod at 1,000 nodes with counters (docs/scale.md)."""


class DecidedMode(NamedTuple):
    """The offer mode of the cluster, and why."""

    mode: OfferMode
    reason: str


def decide_offer_mode(setting: str, minor_version: int | None, views: Iterable[NodeView]) -> DecidedMode:
    """``setting``: auto, counters or disjoint; ``minor_version``: that of the API server, None if it is unknown.

    Where an API server does not keep counters, offers must be disjoint whatever the setting.
    """
    if any(COUNTERS_FIELD in view.status.dropped for view in views):
        return DecidedMode(OfferMode.DISJOINT, f"the API server does not keep {COUNTERS_FIELD} of devices")
    if setting != "auto":
        return DecidedMode(OfferMode(setting.capitalize()), f"--offer-mode {setting}")
    if minor_version is not None and minor_version < FIRST_FAST_MINOR_VERSION:
        return DecidedMode(OfferMode.DISJOINT, f"Kubernetes 1.{minor_version}: its scheduler is slow with counters")
    return DecidedMode(OfferMode.COUNTERS, "the scheduler subtracts counters")


class ClusterMode:
    """The version of the API server, read again now and then, and the offer mode that follows from it.

    ``setting``: the value of ``--offer-mode``. ``minor_version``: such as 36 for "36+"; None if it is unknown.
    ``mode`` holds until a node changes, or until ``due_at`` by the monotonic clock.
    """

    def __init__(self, client: KubeClient, setting: str) -> None:
        self.mode = OfferMode.COUNTERS
        self.minor_version: int | None = None
        self.due_at = -math.inf
        self._client = client
        self._setting = setting
        self._decided: DecidedMode | None = None

    def update(self, views: Iterable[NodeView]) -> None:
        """Decide ``mode`` anew. Raises ApiError if the version is not known yet and nobody answers."""
        if time.monotonic() >= self.due_at:
            self.minor_version = self._read_minor_version()
            self.due_at = time.monotonic() + VERSION_INTERVAL_SECONDS
        decided = decide_offer_mode(self._setting, self.minor_version, views)
        if decided != self._decided:
            log.info("offer mode", extra={"mode": decided.mode.value, "reason": decided.reason})
            self._decided, self.mode = decided, decided.mode

    def _read_minor_version(self) -> int | None:
        try:
            return minor_version(self._client.get_object("/version"))
        except ApiError as error:
            if error.status is None and self._decided is None:
                raise
            return self.minor_version
