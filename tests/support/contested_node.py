"""A node of H100 without a kubelet whose pods hold GPUs, others that wait for them, and what is seen of all.

Pods are those of ReplicaSets, so that they may be evicted. What a kubelet does is played: bound pods become Ready, and
a pod that is being deleted ends soon after.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from driver.errors import CONFLICT, NOT_FOUND, accepted_status
from driver.kube.client import KubeClient, load_configuration
from driver.kube.get_and_list import RESOURCE_GROUP
from driver.kube.types import Claim, Key, Pod
from driver.kube.watch_cache import Change, WatchCache
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import DeadlineError, wait_for
from tests.support.chart import ANY_SIZE, install
from tests.support.control_plane import control_plane
from tests.support.controller import plugins
from tests.support.faults import Circumstances, FaultyController
from tests.support.plugin import PluginFlags
from tests.support.scheduling import asked
from tests.support.workloads import wait_default_account

NODE = "contested"
TEAM, OTHERS = "team", "others"
"""Namespaces: of the pods that hold GPUs and of those for which they may be evicted; of those that may only wait."""

FULL, TWO, HALF = "full", "two", "half"
REQUESTS = {
    FULL: asked("gpu-training"),
    TWO: asked("gpu-training", count=2),
    HALF: asked("gpu-inference-3g-40gb"),
}
"""By the name of the ResourceClaimTemplate."""

SERVING = "serving"
POLICIES = "/apis/gpu.tessera.dev/v1alpha1/gpupolicies"
POLICY: dict[str, Any] = {
    "apiVersion": "gpu.tessera.dev/v1alpha1",
    "kind": "GpuPolicy",
    "metadata": {"name": "contested"},
    "spec": {
        "mode": "Active",
        "namespaces": [TEAM],
        "preemption": {"enabled": True, "byNamespaces": [TEAM]},
        "budget": {"podsPerHour": 10000},
    },
}

INTERVAL_S = 1.0
"""Between two looks for pods that wait, instead of 10 s: tests come to the eviction sooner."""

ENDING_S = 0.3
"""Longest time that a pod takes to end."""

REQUESTING_THREADS = 8
SOON_S, GONE_S = 60.0, 120.0


def pods_of(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def claims_of(namespace: str) -> str:
    return f"{RESOURCE_GROUP}/namespaces/{namespace}/resourceclaims"


@dataclass
class Seen:
    """What the watches reported, by UID of the pod: monotonic seconds."""

    bound: dict[str, float] = field(default_factory=dict)
    freed: dict[str, float] = field(default_factory=dict)
    """When the last device of a pod was deallocated."""
    ending: dict[str, float] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """The name of the ReplicaSet, else that of the pod."""


class ContestedNode:
    """Requests to the cluster, and what was ``seen`` of its pods and claims."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.api = cluster, cluster.api
        self.seen, self.stop = Seen(), threading.Event()
        self._changed = threading.Condition()
        self._requests = ThreadPoolExecutor(REQUESTING_THREADS)
        self._client = KubeClient(load_configuration(cluster.kubeconfig), "tessera-bench")
        self._random = random.Random(1)
        self._users: dict[Key, set[str]] = {}
        self.pods = WatchCache(self._client, "/api/v1/pods", Pod, lambda pod: pod, self._pods_changed)
        self.claims = WatchCache(
            self._client, f"{RESOURCE_GROUP}/resourceclaims", Claim, lambda claim: claim, self._claims_changed
        )

    def start(self) -> None:
        for cache in (self.pods, self.claims):
            threading.Thread(target=cache.run, args=(self.stop,), daemon=True).start()
        wait_for(lambda: self.pods.synced and self.claims.synced, SOON_S, "pods and claims are listed")

    def wait(self, predicate: Callable[[], object], deadline_s: float, what: str) -> None:
        """Until ``predicate`` holds of what was seen; looked at after each change."""
        if not self.happens(predicate, deadline_s):
            raise DeadlineError(f"{what}: not within {deadline_s:g} s")

    def happens(self, predicate: Callable[[], object], deadline_s: float) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(predicate, deadline_s))

    def present(self, namespace: str, name: str | None = None) -> list[Pod]:
        """The pods of a namespace; those of a ReplicaSet or the one of this ``name``, if it is given."""
        pods = [pod for key, pod in self.pods.snapshot().items() if key.namespace == namespace]
        return [pod for pod in pods if name is None or name in (pod.metadata.name, pod.metadata.labels.get("app"))]

    def bound(self, pods: Iterable[Pod]) -> list[Pod]:
        return [pod for pod in pods if pod.spec.node_name]

    # Requests

    def replica_set(self, name: str, template: str, replicas: int) -> None:
        """Whose pods each have a claim for ``template``."""
        content = {"metadata": {"labels": {"app": name}}, "spec": _spec(template, restartPolicy="Always")}
        spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": content}
        self.api.post(f"/apis/apps/v1/namespaces/{TEAM}/replicasets", {"metadata": {"name": name}, "spec": spec})

    def budget(self, name: str, min_available: int) -> None:
        """A PodDisruptionBudget of the ReplicaSet of this name."""
        spec = {"minAvailable": min_available, "selector": {"matchLabels": {"app": name}}}
        self.api.post(
            f"/apis/policy/v1/namespaces/{TEAM}/poddisruptionbudgets", {"metadata": {"name": name}, "spec": spec}
        )

    def allows(self, name: str) -> int:
        """How many evictions the budget of this name allows."""
        item = self.api.get(f"/apis/policy/v1/namespaces/{TEAM}/poddisruptionbudgets/{name}")
        return int(item.get("status", {}).get("disruptionsAllowed", -1))

    def pod(self, name: str, template: str, namespace: str = TEAM, **spec: Any) -> str:
        """A pod with a claim for ``template``. Returns its UID."""
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": _spec(template, **spec)}
        return str(self.api.post(pods_of(namespace), body)["metadata"]["uid"])

    def rivals(self, count: int) -> None:
        """Pods of the priority of the contenders that wait for full GPUs and for which no pod may be evicted."""

        def create(number: int) -> None:
            name = f"rival-{number}"
            devices = {"devices": {"requests": [REQUESTS[FULL]]}}
            self.api.post(claims_of(OTHERS), {"metadata": {"name": name}, "spec": devices})
            claims = [{"name": "gpu", "resourceClaimName": name}]
            body = busybox_pod(name, namespace=OTHERS, resourceClaims=claims, priorityClassName=SERVING)
            self.api.post(pods_of(OTHERS), body)

        list(self._requests.map(create, range(count)))
        self.wait(
            lambda: sum(pod.lacks_devices for pod in self.present(OTHERS)) == count, GONE_S, "all rivals were refused"
        )

    def end(self, namespace: str, name: str) -> None:
        with accepted_status(NOT_FOUND):
            self.api.request("DELETE", f"{pods_of(namespace)}/{name}", {"gracePeriodSeconds": 0})

    def clear(self) -> None:
        """End all pods and claims of both namespaces, the ReplicaSets and budgets, and wait until they are gone."""
        now = {"gracePeriodSeconds": 0}
        self.api.request("DELETE", f"/apis/apps/v1/namespaces/{TEAM}/replicasets")
        self.api.request("DELETE", f"/apis/policy/v1/namespaces/{TEAM}/poddisruptionbudgets")

        def is_empty() -> bool:
            for namespace in (OTHERS, TEAM):
                if self.present(namespace):
                    self.api.request("DELETE", pods_of(namespace), now)
            claims = {key.namespace for key in self.claims.snapshot()} & {TEAM, OTHERS}
            if OTHERS in claims:
                self.api.request("DELETE", claims_of(OTHERS))
            return not claims and not self.present(TEAM) and not self.present(OTHERS)

        wait_for(is_empty, GONE_S, "all pods and claims are gone", interval_s=0.2)
        self.seen = Seen()

    # What the watches tell

    def _pods_changed(self, changes: Sequence[Change[Pod]]) -> None:
        now = time.monotonic()
        with self._changed:
            for change in changes:
                pod = change.new or change.old
                assert pod is not None
                uid = pod.metadata.uid
                self.seen.names.setdefault(uid, pod.metadata.labels.get("app", pod.metadata.name))
                if pod.spec.node_name and uid not in self.seen.bound:
                    self.seen.bound[uid] = now
                    self._requests.submit(self._runs, pod)
                if pod.metadata.deletion_timestamp and uid not in self.seen.ending:
                    self.seen.ending[uid] = now
                    self._requests.submit(self._ends, pod)
            self._changed.notify_all()

    def _claims_changed(self, changes: Sequence[Change[Claim]]) -> None:
        now = time.monotonic()
        with self._changed:
            for change in changes:
                users = self._users.setdefault(change.key, set())
                if change.new is not None:
                    users |= {consumer.uid for consumer in change.new.pod_consumers}
                if change.old is not None and change.old.results and (change.new is None or not change.new.results):
                    self.seen.freed |= dict.fromkeys(users, now)
                    users.clear()
            self._changed.notify_all()

    def _runs(self, pod: Pod) -> None:
        status = {
            "phase": "Running",
            "startTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "conditions": [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}],
        }
        with accepted_status(NOT_FOUND), accepted_status(CONFLICT):
            body: Mapping[str, Any] = {"metadata": {"uid": pod.metadata.uid}, "status": status}
            self.api.patch(f"{pods_of(pod.metadata.namespace)}/{pod.metadata.name}/status", dict(body))

    def _ends(self, pod: Pod) -> None:
        time.sleep(self._random.uniform(0, ENDING_S))
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.metadata.uid}}
        with accepted_status(NOT_FOUND), accepted_status(CONFLICT):
            self.api.request("DELETE", f"{pods_of(pod.metadata.namespace)}/{pod.metadata.name}", options)


def _spec(template: str, **more: Any) -> dict[str, Any]:
    claims = [{"name": "gpu", "resourceClaimTemplateName": template}]
    spec: dict[str, Any] = busybox_pod("pod", resourceClaims=claims, **more)["spec"]
    return spec


@contextmanager
def contested_node(name: str, gpus: str) -> Iterator[ContestedNode]:
    """In a cluster with classes, templates and namespaces, but without a policy and a controller."""
    with control_plane(name) as cluster:
        install(cluster, ANY_SIZE)
        api = cluster.api
        api.post("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": SERVING}, "value": 1000})
        for namespace in (TEAM, OTHERS):
            api.post("/api/v1/namespaces", {"metadata": {"name": namespace}})
            wait_default_account(cluster, namespace)
        for template, request in REQUESTS.items():
            spec = {"spec": {"devices": {"requests": [request]}}}
            path = f"{RESOURCE_GROUP}/namespaces/{TEAM}/resourceclaimtemplates"
            api.post(path, {"metadata": {"name": template}, "spec": spec})
        with plugins(cluster, [NODE], PluginFlags(gpus=gpus, log_level="info")):
            node = ContestedNode(cluster)
            node.start()
            try:
                yield node
            finally:
                node.stop.set()


@contextmanager
def hurried_controller(cluster: Cluster) -> Iterator[FaultyController]:
    """The leader, which looks every second instead of every 10 s for pods that wait."""
    controller = FaultyController(cluster, "hurried", Circumstances(lease_s=15, interval_s=INTERVAL_S))
    controller.start()
    try:
        wait_for(controller.leads, SOON_S, "the controller leads")
        yield controller
    finally:
        controller.stop()
