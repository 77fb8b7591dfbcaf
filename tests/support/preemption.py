"""Pods that run with devices, and one of a higher priority that waits for some."""

from __future__ import annotations

from datetime import datetime
from functools import reduce
from itertools import chain, combinations
from typing import Any

import msgspec

from controller.cluster.fleet import FleetGpu
from controller.demand.pending_claims import Queue
from controller.eviction.evictor import Job
from controller.eviction.gpu_policy import GpuPolicies, GpuPolicy
from controller.eviction.preemption import MONTH_SECONDS, PreemptionSearch, RunningPods
from controller.eviction.victim_search import EvictionCost, Preemption
from driver.kube.types import Node, Pod
from tests.support.clock import FakeClock
from tests.support.queues import DRIVER, FULL, Situation, request

OWNER = {"kind": "ReplicaSet", "name": "web", "uid": "owner", "controller": True, "apiVersion": "apps/v1"}
NOW = "2026-11-21T00:16:40Z"
"""Of the clock."""

WAITING, PRIORITY = "pod-of-claim", 10
SLICES = 8
"""Of an H100."""

YESTERDAY, SIX_HOURS_AGO = "2026-11-20T00:00:00Z", "2026-11-20T18:16:40Z"
IDLE_BY_DEFAULT_HOURS = 0.25

EVERYBODY: dict[str, Any] = {"preemption": {"enabled": True, "byNamespaces": ["default"]}}


def policy(name: str = "all", **spec: Any) -> GpuPolicy:
    manifest = {"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuPolicy", "metadata": {"name": name}, "spec": spec}
    return GpuPolicy.model_validate(manifest)


class Contest:
    """Pods that run with devices, and one of priority 10 that waits for some."""

    def __init__(self, gpus: list[FleetGpu], cpu: str = "64") -> None:
        self.there = Situation(gpus)
        self.jobs: list[Job] = []
        self.costs: dict[str, EvictionCost] = {}
        """Of the eviction of each pod that runs."""
        self._on_nodes: dict[str, list[str]] = {}
        self._cpu, self._uses = int(cpu), dict[str, int]()
        self.idle = dict[tuple[str, str], int]()
        for name in {entry.node for entry in gpus}:
            metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, "zone": "one"}}
            node = {"metadata": metadata, "status": {"allocatable": {"cpu": cpu, "pods": "110"}}}
            self.there.nodes[name] = msgspec.convert(node, Node)

    def runs(
        self,
        name: str,
        node: str,
        *devices: str,
        priority: int = 0,
        claim: dict[str, Any] | None = None,
        since: str = NOW,
        cpu: int = 0,
        **pod: Any,
    ) -> None:
        """A pod with a claim of its own, which has ``devices`` of its node; ``cpu``: what it requests."""
        pool = f"{node}-{DRIVER}"
        results = [{"request": "gpu", "driver": DRIVER, "pool": pool, "device": device} for device in devices]
        reserved = [{"resource": "pods", "name": name, "uid": name}]
        allocation = {"allocation": {"devices": {"results": results}}, "reservedFor": reserved, **(claim or {})}
        self.there.claim(name, request(), status=allocation)
        metadata = {"ownerReferences": [OWNER], **pod.pop("metadata", {})}
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": since}
        status = pod.pop("status", {"phase": "Running", "startTime": since, "conditions": [ready]})
        pod |= _requests(cpu)
        self.there.pod(name, name, nodeName=node, priority=priority, metadata=metadata, status=status, **pod)
        slices = sum(
            device.mask.bit_count()
            for entry in self.there.gpus
            for device in entry.devices
            if entry.node == node and device.name in devices
        )
        age = datetime.fromisoformat(NOW) - datetime.fromisoformat(since)
        gpu_hours = age.total_seconds() / 3600 * slices / SLICES
        self.costs[name] = EvictionCost(priority, busy=1, pods=1, gpu_hours=gpu_hours, slices=float(slices))
        self._on_nodes.setdefault(node, []).append(name)
        self._uses[name] = cpu

    def is_idle(self, name: str, hours: float, node: str = "a") -> None:
        """The node reports that the claim of the pod ``name``, which has run for longer, is not used for so long."""
        self.idle[node, f"default/{name}"] = int(FakeClock().now().timestamp() - hours * 3600)
        if hours >= IDLE_BY_DEFAULT_HOURS:
            self.costs[name] = self.costs[name]._replace(busy=0, recency=MONTH_SECONDS - int(hours * 3600))

    def search(
        self, *policies: GpuPolicy, selector: str = FULL, count: int = 1, cpu: int = 0, **pod: Any
    ) -> PreemptionSearch:
        pod |= _requests(cpu)
        self._uses[WAITING] = cpu
        self.there.wants(request(selector=selector, count=count), **{"priority": PRIORITY, **pod})
        queue = self.there.queue
        [waiting] = [item for item in queue.pods if item.metadata.name == WAITING]
        bound = [item for item in self.there.pods if item.metadata.name in self.costs]
        running = RunningPods(bound, self.there.claims, self.there.nodes.values(), self.jobs, self.idle)
        return PreemptionSearch(queue, waiting, running, GpuPolicies(policies or [policy(**EVERYBODY)]), FakeClock())

    def cheapest_of_all(self) -> EvictionCost | None:
        """The least cost of all sets of pods that are enough, each of which is tried, after ``search``; None: no set.

        A set has pods of one node: devices of other nodes are of no use. A node that only lacks CPU is the scheduler's.
        What a checkpoint saves, pods that can only go together and protected ones are not known here.
        """
        queue, best = self.there.queue, None
        [waiting] = [item for item in queue.pods if item.metadata.name == WAITING]
        for node, pods in self._on_nodes.items():
            if self._has_devices(queue, waiting, node, {f"default/{name}" for name in pods}):
                continue
            lower = [name for name in pods if self.costs[name].priority < PRIORITY]
            for gone in chain.from_iterable(combinations(lower, size) for size in range(1, len(lower) + 1)):
                cost = reduce(EvictionCost.plus, (self.costs[name] for name in gone), EvictionCost())
                staying = {f"default/{name}" for name in pods if name not in gone}
                if (best is None or cost < best) and self._is_enough(queue, waiting, node, staying):
                    best = cost
        return best

    def _is_enough(self, queue: Queue, waiting: Pod, node: str, staying: set[str]) -> bool:
        """Whether the waiting pod would fit on ``node`` with no other pods than these."""
        used, request = sum(self._uses[name.removeprefix("default/")] for name in staying), self._uses[WAITING]
        return (request == 0 or used + request <= self._cpu) and self._has_devices(queue, waiting, node, staying)

    def _has_devices(self, queue: Queue, waiting: Pod, node: str, staying: set[str]) -> bool:
        remaining = [
            entry.holding(device for device in entry.held if staying & set(queue.holders[node, device.name]))
            for entry in queue.feasibility.fleet.nodes[node]
        ]
        return any(queue.feasibility.fits_on(remaining, needed) for needed in queue.combinations(waiting))


def _requests(cpu: int) -> dict[str, Any]:
    return {"containers": [{"resources": {"requests": {"cpu": str(cpu)}}}]} if cpu else {}


def names(preemption: Preemption | None) -> list[str]:
    units = () if preemption is None else preemption.units
    return sorted(pod.removeprefix("default/") for unit in units for pod in unit.pods)
