"""Asks the real scheduler whether pending claims fit.

Each question of a wave has nodes of its own. A pod that is created after everything else shows that the scheduler has
seen it, before the pods that count are created.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from driver.kube.slice_types import DetailedSlice
from driver.kube.types import Claim, Pod, Result
from tests.conformance.allocator.judge import (
    CLASSES,
    GROUP,
    RULES,
    SLICES,
    WAVE_S,
    WRITERS,
    claiming_pod,
    wait_until_seen,
)
from tests.conformance.reasons.statements import NODES, held, published
from tests.harness.cluster import Cluster
from tests.harness.images import BUSYBOX_IMAGE, SLEEP_FOREVER
from tests.harness.manifests import ready_status
from tests.harness.waiting import wait_for
from tests.support.features import has
from tests.support.queues import Situation
from tests.support.workloads import wait_default_account

WAVE = 60
"""Questions at a time."""

MAX_RESULTS = 32
"""Most devices that the API allows in one claim."""

LABEL = "question"
LABELS = ("pool", "zone", "disk", "generation")
"""The labels that nodes of situations may have."""

RUNTIMES = "/apis/node.k8s.io/v1/runtimeclasses"


class RealScheduler:
    """The scheduler of ``cluster``, which has no kubelet."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._api = cluster, cluster.api
        self._wave = 0
        self._allocatable: dict[str, dict[str, str]] = {}
        """Of the nodes that have not what a node object has by default."""
        names = [_name(index, node) for index in range(WAVE) for node in NODES]
        with ThreadPoolExecutor(WRITERS) as writers:
            list(writers.map(cluster.add_node_object, [*names, "barrier"]))

    def reports(self, situations: Sequence[Situation]) -> Iterator[Pod]:
        """For each, its pending pod as the API server has it after the scheduler has tried it."""
        for start in range(0, len(situations), WAVE):
            yield from self._ask(situations[start : start + WAVE])

    def _ask(self, situations: Sequence[Situation]) -> list[Pod]:
        self._wave += 1
        namespace = f"wave-{self._wave}"
        self._api.post("/api/v1/namespaces", {"metadata": {"name": namespace}})
        wait_default_account(self._cluster, namespace)
        for each in {name: each for there in situations for name, each in there.classes.items()}.values():
            self._api.post(CLASSES, {"metadata": {"name": each.metadata.name}, "spec": msgspec.to_builtins(each.spec)})
        asked = list(enumerate(situations))
        # Not by the writers: msgspec can crash where several threads convert to a type for the first time.
        slices = [[*published(there), *there.slices] for there in situations]
        bodies = [_pod(namespace, index, there, f"overhead-{self._wave}-{index}") for index, there in asked]
        pods = f"/api/v1/namespaces/{namespace}/pods"
        with ThreadPoolExecutor(WRITERS) as writers:
            list(writers.map(lambda each: self._prepare(namespace, each[0], each[1], slices[each[0]]), asked))
            wait_until_seen(self._api, namespace, f"barrier-{self._wave}", "barrier")
            list(writers.map(lambda body: self._api.post(pods, body), bodies))
        answers = wait_for(lambda: self._collect(pods, len(asked)), WAVE_S, f"answers of wave {self._wave}", 0.3)
        rules = [RULES] if has(self._cluster, "device taint rules") else []
        for folder in (pods, f"{GROUP}/namespaces/{namespace}/resourceclaims", SLICES, *rules, CLASSES, RUNTIMES):
            self._api.request("DELETE", folder, {"gracePeriodSeconds": 0})
        return [answers[index] for index, _ in asked]

    def _prepare(self, namespace: str, index: int, there: Situation, slices: Sequence[DetailedSlice]) -> None:
        """Everything of a situation but the pod."""
        for node in NODES:
            found = there.nodes.get(node)
            labels = {LABEL: None if found is None else str(index), **dict.fromkeys(LABELS)}
            spec: Any = {"unschedulable": None, "taints": None}
            if found is not None:
                labels |= found.metadata.labels
                taints = msgspec.to_builtins(found.spec.taints)
                spec = {"unschedulable": found.spec.unschedulable or None, "taints": taints or None}
                self._set_allocatable(_name(index, node), found.status.allocatable)
            self._api.patch(f"/api/v1/nodes/{_name(index, node)}", {"metadata": {"labels": labels}, "spec": spec})
        for each in slices:
            spec = msgspec.to_builtins(each.spec)
            node = _name(index, str(spec["nodeName"]))
            pool, count = each.spec.pool, each.spec.pool.resource_slice_count
            named = {"name": _name(index, pool.name), "generation": pool.generation, "resourceSliceCount": count}
            spec |= {"nodeName": node, "pool": named}
            self._api.post(SLICES, {"metadata": {"name": f"{index}-{each.metadata.name}"}, "spec": spec})
        for number, rule in enumerate(_rules(index, there, slices)):
            self._api.post(RULES, {"metadata": {"name": f"rule-{index}-{number}"}, "spec": rule})
        claims = f"{GROUP}/namespaces/{namespace}/resourceclaims"
        results = [_result(index, number, each) for number, each in enumerate(held(there))]
        for first in range(0, len(results), MAX_RESULTS):
            self._hold(claims, f"held-{index}-{first}", results[first : first + MAX_RESULTS])
        for name, waiting in _pending(index, there).items():
            self._api.post(claims, {"metadata": {"name": name}, "spec": msgspec.to_builtins(waiting.spec)})
        for overhead in (pod.spec.overhead for pod in there.pods if pod.spec.overhead):
            metadata = {"name": f"overhead-{self._wave}-{index}"}
            self._api.post(RUNTIMES, {"metadata": metadata, "handler": "runc", "overhead": {"podFixed": overhead}})

    def _set_allocatable(self, node: str, allocatable: dict[str, str]) -> None:
        if self._allocatable.get(node, {}) != allocatable:
            self._api.patch(f"/api/v1/nodes/{node}/status", ready_status(allocatable))
            self._allocatable[node] = allocatable

    def _hold(self, claims: str, name: str, results: Sequence[Mapping[str, Any]]) -> None:
        requests = [{"name": each["request"], "exactly": {"deviceClassName": "any"}} for each in results]
        self._api.post(claims, {"metadata": {"name": name}, "spec": {"devices": {"requests": requests}}})
        allocation = {"devices": {"results": list(results)}}
        self._api.patch(f"{claims}/{name}/status", {"status": {"allocation": allocation}})

    def _collect(self, pods: str, count: int) -> dict[int, Pod]:
        """The pods by index, once there is an answer for all."""
        found = {}
        for raw in self._api.get(pods)["items"]:
            kind, _, index = raw["metadata"]["name"].partition("-")
            conditions = {each["type"]: each for each in raw.get("status", {}).get("conditions", ())}
            scheduled = conditions.get("PodScheduled")
            if kind == "pod" and scheduled is not None and not _is_internal(scheduled):
                found[int(index)] = msgspec.convert(raw, Pod)
        return found if len(found) == count else {}


def is_scheduled(pod: Pod) -> bool:
    return any(each.type == "PodScheduled" and each.status == "True" for each in pod.status.conditions)


def _is_internal(scheduled: Mapping[str, Any]) -> bool:
    """Whether the scheduler could not even try, such as after a conflict; it tries again."""
    return scheduled["status"] == "False" and "nodes are available" not in scheduled.get("message", "")


def _name(index: int, name: str) -> str:
    """Of a node or pool of a situation, in the cluster that has several."""
    return f"q{index}-{name}"


def _rules(index: int, there: Situation, slices: Sequence[DetailedSlice]) -> Iterator[dict[str, Any]]:
    """The DeviceTaintRules, for the pools of this situation alone."""
    for rule in there.taint_rules:
        selector = rule.spec.device_selector
        assert selector is not None
        of_driver = (each.spec.pool.name for each in slices if each.spec.driver == selector.driver)
        for pool in [selector.pool] if selector.pool else dict.fromkeys(of_driver):
            device = {"device": selector.device} if selector.device else {}
            taint = msgspec.to_builtins(rule.spec.taint)
            yield {"deviceSelector": {"pool": _name(index, pool), **device}, "taint": taint}


def _result(index: int, number: int, result: Result) -> dict[str, str]:
    pool = _name(index, result.pool)
    return {"request": f"r-{number}", "driver": result.driver, "pool": pool, "device": result.device}


def _pod(namespace: str, index: int, there: Situation, runtime_class: str) -> dict[str, Any]:
    """The pending pod, which can run on the nodes of its situation only."""
    spec = msgspec.to_builtins(there.pods[0].spec)
    selector = {**spec.get("nodeSelector", {}), LABEL: str(index)}
    image = {"image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": SLEEP_FOREVER}
    more: dict[str, Any] = {name: spec[name] for name in ("affinity", "tolerations", "resources") if name in spec}
    for kind in ("containers", "initContainers"):
        if kind in spec:
            more[kind] = [{**container, **image} for container in spec[kind]]
    if "overhead" in spec:
        more["runtimeClassName"] = runtime_class
    return claiming_pod(f"pod-{index}", namespace, list(_pending(index, there)), nodeSelector=selector, **more)


def _pending(index: int, there: Situation) -> dict[str, Claim]:
    """The claims of the pending pod by their names in the cluster."""
    return {f"{each.claim.metadata.name}-{index}": each.claim for each in there.queue.pending}
