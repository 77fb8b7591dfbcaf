"""Pods that run with devices, and one of a higher priority that waits for some."""

from __future__ import annotations

from typing import Any

import msgspec

from controller.cluster.fleet import FleetGpu
from controller.eviction.evictor import Job
from controller.eviction.gpu_policy import GpuPolicies, GpuPolicy
from controller.eviction.preemption import Preemption, PreemptionSearch, RunningPods
from driver.kube.types import Node
from tests.support.clock import FakeClock
from tests.support.queues import DRIVER, FULL, Situation, request

OWNER = {"kind": "ReplicaSet", "name": "web", "uid": "owner", "controller": True, "apiVersion": "apps/v1"}
NOW = "2026-11-21T00:16:40Z"
"""Of the clock."""

EVERYBODY: dict[str, Any] = {"preemption": {"enabled": True, "byNamespaces": ["default"]}}


def policy(name: str = "all", **spec: Any) -> GpuPolicy:
    manifest = {"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuPolicy", "metadata": {"name": name}, "spec": spec}
    return GpuPolicy.model_validate(manifest)


class Contest:
    """Pods that run with devices, and one of priority 10 that waits for some."""

    def __init__(self, gpus: list[FleetGpu], cpu: str = "64") -> None:
        self.there = Situation(gpus)
        self._running: list[str] = []
        self.jobs: list[Job] = []
        for name in {entry.node for entry in gpus}:
            node = {"metadata": {"name": name}, "status": {"allocatable": {"cpu": cpu, "pods": "110"}}}
            self.there.nodes[name] = msgspec.convert(node, Node)

    def runs(
        self,
        name: str,
        node: str,
        *devices: str,
        priority: int = 0,
        claim: dict[str, Any] | None = None,
        since: str = NOW,
        **pod: Any,
    ) -> None:
        """A pod with a claim of its own, which has ``devices`` of its node."""
        pool = f"{node}-{DRIVER}"
        results = [{"request": "gpu", "driver": DRIVER, "pool": pool, "device": device} for device in devices]
        reserved = [{"resource": "pods", "name": name, "uid": name}]
        status = {"allocation": {"devices": {"results": results}}, "reservedFor": reserved, **(claim or {})}
        self.there.claim(name, request(), status=status)
        metadata = {"ownerReferences": [OWNER], **pod.pop("metadata", {})}
        running = {"phase": "Running", "startTime": since, "conditions": [{"type": "Ready", "status": "True"}]}
        self.there.pod(name, name, nodeName=node, priority=priority, metadata=metadata, status=running, **pod)
        self._running.append(name)

    def search(self, *policies: GpuPolicy, selector: str = FULL, count: int = 1, **pod: Any) -> PreemptionSearch:
        self.there.wants(request(selector=selector, count=count), **{"priority": 10, **pod})
        queue = self.there.queue
        [waiting] = [item for item in queue.pods if item.metadata.name == "pod-of-claim"]
        bound = [item for item in self.there.pods if item.metadata.name in self._running]
        running = RunningPods(bound, self.there.claims, self.there.nodes.values(), self.jobs)
        return PreemptionSearch(queue, waiting, running, GpuPolicies(policies or [policy(**EVERYBODY)]), FakeClock())


def names(preemption: Preemption | None) -> list[str]:
    units = () if preemption is None else preemption.victims.units
    return sorted(pod.removeprefix("default/") for unit in units for pod in unit.pods)
