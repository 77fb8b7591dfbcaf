"""The real scheduler's answers for scenarios, and those of Tessera's allocator, in one form.

Each scenario of a wave has a node of its own. A pod whose claim, class, slice and node label are written after all
others shows that the scheduler has seen everything, before the pods that count are created.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec

from driver.kube.slice_types import DetailedSlice
from driver.kube.types import Allocation, Claim, DeviceClass, DeviceTaintRule, Node, Result
from tessera.simulate.allocatable_devices import AllocationError, FailureKind, number
from tessera.simulate.allocator import allocate
from tessera.simulate.capacity import HeldDevices
from tessera.simulate.imagined_cluster import tainted
from tessera.simulate.pools import SliceIndex
from tests.conformance.allocator.devices import Object, device_class
from tests.conformance.allocator.scenarios import Scenario, is_for_all_nodes, scenario
from tests.harness.api import Api
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.control_plane import control_plane
from tests.support.workloads import wait_default_account

GROUP = "/apis/resource.k8s.io/v1"
SLICES, CLASSES = f"{GROUP}/resourceslices", f"{GROUP}/deviceclasses"
RULES = f"{GROUP}/devicetaintrules"
WAVE = 100
"""Scenarios at a time."""

WAVE_S = 120.0
WRITERS = 8
NO_LIMIT = ["--kube-api-qps=2000", "--kube-api-burst=2000"]

MESSAGES = {
    "cannot allocate all claims": "none",
    "CEL runtime error": FailureKind.SELECTOR,
    "exceeds the claim limit": FailureKind.TOO_MANY_DEVICES,
    "is currently being updated": FailureKind.INCOMPLETE_POOL,
    "is currently invalid": FailureKind.INVALID_POOL,
    "invalid resource pools were encountered": FailureKind.INVALID_POOLS,
    "constraint would not be satisfied": FailureKind.CONSTRAINT,
    "checking capacity for device": FailureKind.CAPACITY,
    "unsupported ResourceSlice.NodeSelector": FailureKind.NODE_SELECTOR,
    "timed out trying to allocate devices": FailureKind.TOO_LONG,
}
"""What a part of the scheduler's message means."""

Answer = str
"""The allocations, one line a device, or why there are none."""


@contextmanager
def judging(name: str) -> Iterator[Judge]:
    """A cluster without a kubelet; ends with the block."""
    with control_plane(name, {"kube-scheduler": NO_LIMIT}) as cluster:
        yield Judge(cluster)


class Judge:
    """Asks the scheduler of ``cluster``."""

    def __init__(self, cluster: Cluster) -> None:
        self._api = cluster.api
        self._wave = 0
        self._nodes: list[str] = []
        self._cluster = cluster
        self.release = cluster.release.kubernetes

    def answers(self, numbers: Sequence[int], told: Callable[[int], object] = lambda _: None) -> dict[int, Answer]:
        """The scheduler's answers for the scenarios of these numbers; ``told`` is called with how many there are."""
        found: dict[int, Answer] = {}
        for start in range(0, len(numbers), WAVE):
            found |= self._ask(numbers[start : start + WAVE])
            told(len(found))
        return found

    def _ask(self, numbers: Sequence[int]) -> dict[int, Answer]:
        self._wave += 1
        namespace = f"wave-{self._wave}"
        pods = f"/api/v1/namespaces/{namespace}/pods"
        labels = {"resource.kubernetes.io/admin-access": "true"}
        self._api.post("/api/v1/namespaces", {"metadata": {"name": namespace, "labels": labels}})
        wait_default_account(self._cluster, namespace)
        while len(self._nodes) <= WAVE:
            name = f"node-{len(self._nodes)}"
            self._cluster.add_node_object(name)
            self._nodes.append(name)
        asked = {each.number: each for each in wave_of(numbers)}
        with ThreadPoolExecutor(WRITERS) as writers:
            for rule in (rule for each in asked.values() for rule in each.rules):
                self._api.post(RULES, dict(rule))
            list(writers.map(lambda each: self._prepare(each, namespace), asked.values()))
            wait_until_seen(self._api, namespace, f"barrier-{self._wave}", self._nodes[WAVE])
            list(writers.map(lambda each: self._api.post(pods, pod_of(each, namespace)), asked.values()))
        answers = wait_for(lambda: self._collect(namespace, asked), WAVE_S, f"answers of wave {self._wave}", 0.5)
        for folder in (pods, f"{GROUP}/namespaces/{namespace}/resourceclaims", SLICES, CLASSES, RULES):
            self._api.request("DELETE", folder, {"gracePeriodSeconds": 0})
        return answers

    def _prepare(self, given: Scenario, namespace: str) -> None:
        """Everything of a scenario but the pod."""
        self._api.patch(f"/api/v1/nodes/{given.node}", {"metadata": {"labels": given.labels}})
        for each in given.slices:
            self._api.post(SLICES, dict(each))
        for each in given.classes:
            self._api.post(CLASSES, dict(each))
        claims = f"{GROUP}/namespaces/{namespace}/resourceclaims"
        if given.held:
            name = f"held-{given.number}"
            self._api.post(claims, {"metadata": {"name": name}, "spec": _holding(given)})
            allocation = {"devices": {"results": list(given.held)}}
            self._api.patch(f"{claims}/{name}/status", {"status": {"allocation": allocation}})
        for index, spec in enumerate(given.claims):
            self._api.post(claims, {"metadata": {"name": f"c{index}-{given.number}"}, "spec": spec})

    def _collect(self, namespace: str, asked: Mapping[int, Scenario]) -> dict[int, Answer]:
        """The answers, once there are all."""
        items = self._api.get(f"{GROUP}/namespaces/{namespace}/resourceclaims")["items"]
        claims = {each["metadata"]["name"]: msgspec.convert(each, Claim) for each in items}
        pods = {
            each["metadata"]["name"]: each for each in self._api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
        }
        found = {
            given.number: answer
            for given in asked.values()
            if (answer := _answer(given, claims, pods[f"pod-{given.number}"])) is not None
        }
        return found if len(found) == len(asked) else {}


def wait_until_seen(api: Api, namespace: str, name: str, node: str) -> None:
    """Wait until the scheduler has seen what was created before. ``name`` is of objects that did not exist yet."""
    driver = f"{name}.example.com"
    label = {driver: "yes"}
    api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": label}})
    spec = {"driver": driver, "nodeName": node, "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1}}
    api.post(SLICES, {"metadata": {"name": name}, "spec": {**spec, "devices": [{"name": "d"}]}})
    api.post(CLASSES, device_class(name, f'device.driver == "{driver}"'))
    request = {"name": "r", "exactly": {"deviceClassName": name}}
    claims = f"{GROUP}/namespaces/{namespace}/resourceclaims"
    api.post(claims, {"metadata": {"name": f"c0-{name}"}, "spec": {"devices": {"requests": [request]}}})
    body = claiming_pod(name, namespace, [f"c0-{name}"], nodeSelector=label)
    api.post(f"/api/v1/namespaces/{namespace}/pods", body)
    pod = f"/api/v1/namespaces/{namespace}/pods/{name}"
    wait_for(lambda: api.get(pod)["spec"].get("nodeName"), WAVE_S, "the scheduler has seen everything", 0.1)


def wave_of(numbers: Iterable[int]) -> list[Scenario]:
    """The scenarios of one wave, each on a node of its own."""
    return [scenario(each, f"node-{index}") for index, each in enumerate(numbers)]


def our_answers(numbers: Sequence[int], chosen: Container[int], limit_s: float = 60.0) -> Iterator[tuple[int, Answer]]:
    """What Tessera's allocator says of the ``chosen`` scenarios of a wave; ``limit_s``: for each, in seconds.

    The real scheduler has 10 s, and is about a hundred times as fast.
    """
    wanted = [(number, f"node-{index}") for index, number in enumerate(numbers)]
    shared = [scenario(*each) for each in wanted if is_for_all_nodes(each[0])]
    for each in (scenario(*each) for each in wanted if each[0] in chosen):
        ends = time.monotonic() + limit_s
        yield each.number, _our_answer(each, [other for other in shared if other.number != each.number], ends)


def _holding(given: Scenario) -> Object:
    """The spec of a claim that has the held devices."""
    requests = []
    for each in given.held:
        admin = {"adminAccess": True} if each.get("adminAccess") else {}
        requests.append({"name": each["request"], "exactly": {"deviceClassName": "held", **admin}})
    return {"devices": {"requests": requests}}


def pod_of(given: Scenario, namespace: str) -> Object:
    """The pod of a scenario."""
    names = [f"c{index}-{given.number}" for index in range(len(given.claims))]
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [given.node]}]}
    node = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return claiming_pod(f"pod-{given.number}", namespace, names, affinity={"nodeAffinity": node})


def claiming_pod(name: str, namespace: str, claims: Sequence[str], **spec: Any) -> Object:
    entries = [{"name": f"claim-{index}", "resourceClaimName": each} for index, each in enumerate(claims)]
    return busybox_pod(name, namespace=namespace, resourceClaims=entries, **spec)


def _answer(given: Scenario, claims: Mapping[str, Claim], pod: Object) -> Answer | None:
    """The scheduler's answer, if it has one."""
    own = [claims[f"c{index}-{given.number}"].status.allocation for index in range(len(given.claims))]
    allocations = [each for each in own if each is not None]
    if len(allocations) == len(own):
        return described(allocations)
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            message = condition.get("message", "")
            found = next((str(meaning) for part, meaning in MESSAGES.items() if part in message), None)
            if found is None and "resourceclaim" not in message:
                return f"unknown: {message}"
            return found
    return None


def described(allocations: Iterable[Allocation]) -> Answer:
    """Allocations in one form for both sides; share IDs are random."""
    lines = []
    for claim, allocation in enumerate(allocations):
        for each in allocation.devices.results:
            words = [f"{claim}: {each.request} {each.driver}/{each.pool}/{each.device}"]
            words += ["admin"] if each.admin_access else []
            words += ["share"] if each.share_id is not None else []
            amounts = {name: number(amount) for name, amount in (each.consumed_capacity or {}).items()}
            words += [f"{name}={amount}" for name, amount in sorted(amounts.items())]
            lines.append(" ".join(words))
        where = allocation.node_selector
        lines.append(f"{claim}: on {json.dumps(msgspec.to_builtins(where), sort_keys=True) if where else 'all nodes'}")
    return "\n".join(lines)


def _our_answer(given: Scenario, others: Iterable[Scenario], ends: float) -> Answer:
    """What Tessera's allocator says of a scenario, with the slices of ``others`` in the same cluster."""
    slices = [_read(each, DetailedSlice) for other in (given, *others) for each in other.slices]
    rules = [_read(rule, DeviceTaintRule) for other in (given, *others) for rule in other.rules]
    classes = {each["metadata"]["name"]: _read(each, DeviceClass) for each in given.classes}
    claims = [
        _read({"metadata": {"name": f"c{index}"}, "spec": spec}, Claim) for index, spec in enumerate(given.claims)
    ]
    node = _read({"metadata": {"name": given.node, "labels": given.labels}}, Node)
    held = HeldDevices.of(msgspec.convert(given.held, list[Result]))
    try:
        found = allocate(
            claims,
            node,
            SliceIndex(tainted(each, rules) for each in slices),
            classes,
            held,
            lambda: time.monotonic() > ends,
        )
    except AllocationError as error:
        return str(error.failure)
    return "none" if found is None else described(found)


def _read(found: Mapping[str, Any], kind: type[Any]) -> Any:
    return msgspec.convert({**found, "metadata": {**found["metadata"], "resourceVersion": "1"}}, kind)
