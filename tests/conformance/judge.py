"""What the real API server and the real scheduler say of an expression.

Valid or not: a dry run of creating a DeviceClass. Matching or not: a claim for exactly one device, with the expression
as its second selector, and a pod that needs the claim. Administrative access, so that no claim takes a device from
another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from driver.errors import ApiError
from tests.conformance.devices import DEVICES, entry
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.control_plane import control_plane
from tests.support.workloads import wait_default_account

Verdict = bool | Literal["error"]
Pair = tuple[str, str]
"""An expression and the name of a device."""

NAMESPACE = "conformance"
NODE = "conformance"
CLASS = "anything"
GROUP = "/apis/resource.k8s.io/v1"
CLASSES = f"{GROUP}/deviceclasses"
CLAIMS = f"{GROUP}/namespaces/{NAMESPACE}/resourceclaims"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
WAVE = 250
"""Pods at a time: as many as a node object has room for, and few enough that their list is read quickly."""
WAVE_S = 120.0
WRITERS = 8
NO_LIMIT = ["--kube-api-qps=2000", "--kube-api-burst=2000"]
"""For the scheduler: about four requests a pod, and its usual 50 a second would take minutes."""


@contextmanager
def judging(name: str) -> Iterator[Judge]:
    """A cluster without a kubelet that has the devices; ends with the block."""
    with control_plane(name, {"kube-scheduler": NO_LIMIT}) as cluster:
        publish(cluster)
        yield Judge(cluster)


def publish(cluster: Cluster) -> None:
    """One node with all devices, a namespace whose claims may have administrative access, a class for anything."""
    cluster.add_node_object(NODE)
    labels = {"resource.kubernetes.io/admin-access": "true"}
    cluster.api.post("/api/v1/namespaces", {"metadata": {"name": NAMESPACE, "labels": labels}})
    cluster.api.post(CLASSES, {"metadata": {"name": CLASS}, "spec": {}})
    for driver in {driver for driver, _ in DEVICES.values()}:
        names = [name for name, (own, _) in DEVICES.items() if own == driver]
        spec = {
            "driver": driver,
            "nodeName": NODE,
            "pool": {"name": f"{NODE}-{driver}", "generation": 1, "resourceSliceCount": 1},
            "devices": [entry(name) for name in names],
        }
        stored = cluster.api.post(f"{GROUP}/resourceslices", {"metadata": {"name": f"{NODE}-{driver}"}, "spec": spec})
        assert [set(device) for device in stored["spec"]["devices"]] == [set(device) for device in spec["devices"]]
    wait_default_account(cluster, NAMESPACE)


@dataclass(frozen=True)
class Judge:
    """Asks the cluster that ``judging`` made."""

    cluster: Cluster

    def problem(self, expression: str) -> str | None:
        """Why the API server refuses a selector; None where it takes it."""
        body = {
            "metadata": {"name": "tried"},
            "spec": {"selectors": [{"cel": {"expression": expression}}]},
        }
        try:
            self.cluster.api.post(f"{CLASSES}?dryRun=All", body)
        except ApiError as error:
            if error.status != 422:
                raise
            return str(error)
        return None

    def verdicts(self, pairs: Iterable[Pair]) -> dict[Pair, Verdict]:
        """Whether each expression selects each device; all expressions have to be valid."""
        given = list(pairs)
        found: dict[Pair, Verdict] = {}
        for start in range(0, len(given), WAVE):
            found.update(self._wave(given[start : start + WAVE]))
        return found

    def _wave(self, pairs: Sequence[Pair]) -> dict[Pair, Verdict]:
        with ThreadPoolExecutor(WRITERS) as writers:
            list(writers.map(self._ask, range(len(pairs)), pairs))
        # Each becomes final once: a pod that is placed stays placed, and what kept the others is told again and again.
        answers = wait_for(lambda: self._answers(len(pairs)), WAVE_S, f"{len(pairs)} verdicts", 0.3)
        for folder in (PODS, CLAIMS):
            self.cluster.api.request("DELETE", folder, {"gracePeriodSeconds": 0})
        wait_for(lambda: not self._items(PODS) and not self._items(CLAIMS), WAVE_S, "pods and claims gone", 0.3)
        return {pair: answers[_name(index)] for index, pair in enumerate(pairs)}

    def _ask(self, index: int, pair: Pair) -> None:
        expression, device = pair
        name = _name(index)
        mine = f'device.attributes["conformance.tessera.dev"].id == "{device}"'
        selectors = [{"cel": {"expression": each}} for each in (mine, expression)]
        request = {"deviceClassName": CLASS, "adminAccess": True, "selectors": selectors}
        devices = {"requests": [{"name": "one", "exactly": request}]}
        self.cluster.api.post(CLAIMS, {"metadata": {"name": name}, "spec": {"devices": devices}})
        pod = busybox_pod(
            name,
            namespace=NAMESPACE,
            container={"resources": {"claims": [{"name": "one"}]}},
            resourceClaims=[{"name": "one", "resourceClaimName": name}],
        )
        pod["metadata"]["annotations"] = {"expression": expression[:1000]}
        self.cluster.api.post(PODS, pod)

    def _answers(self, count: int) -> dict[str, Verdict]:
        """Of every pod, once all have one."""
        found = {
            pod["metadata"]["name"]: verdict for pod in self._items(PODS) if (verdict := _verdict(pod)) is not None
        }
        return found if len(found) == count else {}

    def _items(self, folder: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.cluster.api.get(folder)["items"]
        return items


def _name(index: int) -> str:
    return f"pair-{index}"


def _verdict(pod: dict[str, Any]) -> Verdict | None:
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] != "PodScheduled":
            continue
        if condition["status"] == "True":
            return True
        message = condition.get("message", "")
        if "CEL runtime error" in message:
            return "error"
        if "cannot allocate all claims" in message:
            return False
        selector = pod["metadata"]["annotations"]["expression"]
        raise AssertionError(f"the scheduler said neither yes nor no of {selector}: {message}")
    return None
