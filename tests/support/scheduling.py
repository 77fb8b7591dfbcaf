"""Claims and pods for the real scheduler alone: what is allocated, without a kubelet that would run anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.workloads import CLAIMS, PODS, is_gone

SCHEDULED_S = 20.0


@dataclass(frozen=True)
class Given:
    """One device the scheduler gave to a request."""

    request: str
    driver: str
    pool: str
    device: str


def asked(device_class: str, *selectors: str, name: str = "gpu", count: int = 1) -> dict[str, Any]:
    """One request of a claim; ``selectors`` are CEL and must all be true."""
    cel = [{"cel": {"expression": selector}} for selector in selectors]
    return {"name": name, "exactly": {"deviceClassName": device_class, "count": count, "selectors": cel}}


def matching(attribute: str) -> dict[str, str]:
    """The constraint that all devices of a claim have the same value of ``attribute``."""
    return {"matchAttribute": attribute}


@dataclass
class Scheduling:
    """One claim and one pod at a time, so that no test takes a device from another."""

    cluster: Cluster
    name: str = "wanted"
    _paths: list[str] = field(default_factory=list)

    def ask(
        self, *requests: dict[str, Any], constraints: Sequence[dict[str, str]] = (), node: str | None = None
    ) -> None:
        """A claim, and a pod that needs it, on ``node`` or on any."""
        devices = {"requests": list(requests), "constraints": list(constraints)}
        pod = busybox_pod(
            self.name,
            node=node,
            container={"resources": {"claims": [{"name": "devices"}]}},
            resourceClaims=[{"name": "devices", "resourceClaimName": self.name}],
        )
        self._create(CLAIMS, {"metadata": {"name": self.name}, "spec": {"devices": devices}})
        self._create(PODS, pod)

    def given(self) -> list[Given]:
        """What the scheduler gave, once it has."""
        return wait_for(self._results, SCHEDULED_S, "an allocation")

    def refused(self) -> str:
        """Why the scheduler gave nothing, once it says so."""
        return wait_for(self._reason, SCHEDULED_S, "the scheduler's refusal")

    def forget(self) -> None:
        """Delete pod and claim, and wait until the devices are free again."""
        for path in reversed(self._paths):
            self.cluster.api.request("DELETE", path, {"gracePeriodSeconds": 0})
        for path in self._paths:
            wait_for(partial(is_gone, self.cluster, path), SCHEDULED_S, f"{path} gone")
        self._paths.clear()

    def _create(self, folder: str, body: dict[str, Any]) -> None:
        self.cluster.api.post(folder, body)
        self._paths.append(f"{folder}/{self.name}")

    def _results(self) -> list[Given]:
        status = self.cluster.api.get(f"{CLAIMS}/{self.name}").get("status", {})
        results = status.get("allocation", {}).get("devices", {}).get("results", [])
        return [Given(each["request"], each["driver"], each["pool"], each["device"]) for each in results]

    def _reason(self) -> str:
        assert self._results() == []
        for condition in self.cluster.api.get(f"{PODS}/{self.name}")["status"].get("conditions", ()):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return str(condition["message"])
        return ""
