"""Resources that an API server does not serve, or not to this account."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from controller.cluster.optional_resources import device_taint_rules, pod_groups
from driver.errors import FORBIDDEN, NOT_FOUND, ApiError
from driver.kube.client import KubeClient
from driver.kube.types import VOLCANO_GROUP_VERSION

SOON_S = 10.0


class Refusing(KubeClient):
    def __init__(self, status: int) -> None:
        self.status = status

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        raise ApiError("no", self.status)


@pytest.mark.parametrize("status", [NOT_FOUND, FORBIDDEN])
@pytest.mark.parametrize("optional", [partial(pod_groups, version=VOLCANO_GROUP_VERSION), device_taint_rules])
def test_whoever_waits_for_the_caches_is_told_when_a_resource_turns_out_not_to_be_readable(
    optional: Any, status: int
) -> None:
    stop, told = threading.Event(), threading.Event()
    found: Any = optional(Refusing(status), lambda: told.set() if found.synced else None)
    threading.Thread(target=found.run, args=(stop,), daemon=True).start()
    assert told.wait(SOON_S)
    assert found.snapshot() == {}
    stop.set()
