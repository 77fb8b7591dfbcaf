"""PodGroups of an API server that does not serve them, or not to this account."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from controller.cluster.pod_groups import PodGroups
from driver.errors import FORBIDDEN, NOT_FOUND, ApiError
from driver.kube.client import KubeClient

SOON_S = 10.0


class Refusing(KubeClient):
    def __init__(self, status: int) -> None:
        self.status = status

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        raise ApiError("no", self.status)


@pytest.mark.parametrize("status", [NOT_FOUND, FORBIDDEN])
def test_whoever_waits_for_the_caches_is_told_when_pod_groups_turn_out_not_to_be_readable(status: int) -> None:
    stop, told = threading.Event(), threading.Event()
    groups = PodGroups(Refusing(status), lambda: told.set() if groups.synced else None)
    threading.Thread(target=groups.run, args=(stop,), daemon=True).start()
    assert told.wait(SOON_S)
    assert groups.snapshot() == {}
    stop.set()
