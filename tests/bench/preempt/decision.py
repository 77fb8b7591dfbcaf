"""What preemption costs the controller at 1,000 recorded nodes: a decision without a policy, and a turn with one.

Without a policy, blocks of decisions with the loop of preemptions and without it alternate in one process. With a
policy, a turn looks for the victims of five pods; it runs in a process of its own, for its memory.
"""

from __future__ import annotations

import gc
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from controller.eviction.preemption_preview import BOUND
from controller.eviction.preemptions import Preemptions
from driver.kube.client import Object
from tests.bench.fleet.recorded import CLAIMS, DRIVER, LISTED_AT, NODES, PODS
from tests.bench.fleet.replaying import folder_of
from tests.bench.preempt.report import Measured, Results
from tests.bench.usage import memory_mb
from tests.harness.progress import Progress
from tests.support.contested_node import POLICIES, POLICY
from tests.trace.decision import SettledCluster, without_offers

NONE_OF = {"poddisruptionbudgets", "jobs"}
"""What the cluster has no objects of."""

DECISIONS = 1000
"""Of a block. A block with the loop has one turn of it, which in a controller comes every 10 s."""

WAITING: Mapping[str, int] = {"whole-node-0": 8, "whole-node-1": 8, "two": 2, "one-0": 1, "one-1": 1}
"""GPUs that pods of priority 1000 wait for."""

HAS = {"allocatable": {"cpu": "192", "memory": "2Ti", "pods": "250"}}
OWNER = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "set", "controller": True}
LACKS = {"type": "PodScheduled", "status": "False", "message": "0/1000 nodes are available: cannot allocate all claims"}


class ClusterWithPolicies(SettledCluster):
    """A recorded cluster whose claims are used by running pods of ReplicaSets."""

    def __init__(self, directory: Path, nodes: int, policies: Sequence[Object], kind: Callable[[int], str]) -> None:
        self._policies, self._folder, self._served = policies, directory, dict[str, bytes]()
        self.policy_reads = 0
        super().__init__(directory, nodes, kind)
        self.preemptions = self._controller._preemptions
        # A recorded watch is silent, so that the caches would soon count as out of date.
        self.preemptions._failure = lambda: None

    def decide(self) -> None:
        self._controller._turn()

    def get(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        if path == POLICIES:
            self.policy_reads += 1
            return _listed(self._policies)
        if path.rpartition("/")[2] in NONE_OF:
            return _listed([])
        if path == PODS and query is not None and query.get("fieldSelector") == BOUND["fieldSelector"]:
            return self._listed_once(path, lambda: map(_user_of, self._recorded(CLAIMS)))
        if path == NODES:
            return self._listed_once(path, lambda: ({**node, "status": HAS} for node in self._recorded(NODES)))
        return super().get(path, query)

    def _listed_once(self, path: str, items: Callable[[], Iterable[Object]]) -> bytes:
        if path not in self._served:
            self._served[path] = _listed(list(items()))
        return self._served[path]

    def _recorded(self, path: str) -> Iterator[Object]:
        for page in sorted((self._folder / folder_of(path)).iterdir()):
            yield from msgspec.json.decode(page.read_bytes())["items"]


def _listed(items: Sequence[Object]) -> bytes:
    return msgspec.json.encode({"metadata": {"resourceVersion": str(LISTED_AT)}, "items": items})


def _user_of(claim: Object) -> Object:
    """The pod that a held claim is reserved for."""
    name, results = claim["metadata"]["name"], claim["status"]["allocation"]["devices"]["results"]
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "ownerReferences": [{**OWNER, "uid": name}]}
    node = results[0]["pool"].removesuffix(f"-{DRIVER}")
    claims = [{"name": "gpu", "resourceClaimName": name}]
    spec = {"nodeName": node, "resourceClaims": claims, "containers": [{"name": "main"}]}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Running", "startTime": "2026-11-28T00:00:00Z"}}


def _in_use(index: int) -> str:
    """Four of five nodes are held whole, the others in small partitions."""
    return "cut" if index % 5 == 0 else "whole"


@dataclass(frozen=True)
class Turn:
    """One with a policy. ``victims``: of all pods that wait. MB of memory of the process, before and at most."""

    cpu_s: float
    seconds: float
    victims: int
    before_mb: float
    most_mb: float


def turn(nodes: int) -> Turn:
    """The first one with a policy, which evicts no pod."""
    policy = {**POLICY, "metadata": {"name": "bench", "uid": "bench"}, "spec": {**POLICY["spec"], "mode": "DryRun"}}
    policy["spec"] |= {"namespaces": [], "preemption": {"enabled": True, "byNamespaces": ["default"]}}
    with tempfile.TemporaryDirectory() as directory:
        cluster = ClusterWithPolicies(Path(directory) / "lists", nodes, [policy], _in_use)
        for name, count in WAITING.items():
            cluster.add(name, "gpu-training", count, priority=1000, conditions=[LACKS])
        cluster.decide()
        for path in (NODES, PODS):
            cluster.get(path, BOUND)
        gc.collect()
        before, cpu, began = memory_mb("self"), time.process_time(), time.perf_counter()
        cluster.preemptions.turn()
        cpu_s, seconds = time.process_time() - cpu, time.perf_counter() - began
        victims = sum(map(len, cluster.preemptions._counted.values()))
    return Turn(cpu_s, seconds, victims, before, memory_mb("self", "VmHWM"))


def pairs(nodes: int, count: int) -> tuple[list[float], list[float]]:
    """CPU milliseconds of a decision without the loop and with it, in ``count`` blocks each."""
    without, with_loop = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as directory:
        cluster = ClusterWithPolicies(Path(directory) / "lists", nodes, [], without_offers)
        _block(cluster, None)
        for _ in range(count):
            without.append(_block(cluster, None))
            with_loop.append(_block(cluster, cluster.preemptions))
        assert cluster.policy_reads == count
    return without, with_loop


def _block(cluster: ClusterWithPolicies, preemptions: Preemptions | None) -> float:
    began = time.process_time()
    if preemptions is not None:
        preemptions.turn()
    for number in range(DECISIONS):
        cluster.add(f"new-{number}", "gpu-inference-1g-10gb", 1)
        cluster.decide()
        cluster.remove(f"new-{number}")
    return (time.process_time() - began) * 1000 / DECISIONS


def measure(nodes: int, count: int, results: Results) -> None:
    progress = Progress()
    with progress.part(f"a turn with a policy at {nodes} nodes", 60):
        command = [sys.executable, "-m", "tests.bench.preempt.decision", str(nodes)]
        cost = Turn(**json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    with progress.part(f"decisions without a policy at {nodes} nodes", 120):
        without, with_loop = pairs(nodes, count)
    baseline = statistics.median(without)
    low, _, high = statistics.quantiles(without, n=4)
    more = statistics.median(value / before - 1 for before, value in zip(without, with_loop, strict=True))
    figures = [
        Measured("CPU of a decision without a policy, p50", statistics.median(with_loop), "ms", None, baseline),
        Measured("... half of the blocks without the loop are within", 100 * (high - low) / baseline, "%", None, None),
        Measured(
            "... more with the loop, p50 of the pairs", 100 * more, "%", max(2.0, 100 * (high - low) / baseline), None
        ),
        Measured(f"CPU of a turn with a policy, {len(WAITING)} pods wait", cost.cpu_s, "s", None, None),
        Measured("... its victims", cost.victims, "pods", None, None),
        Measured("... memory that it adds at most", cost.most_mb - cost.before_mb, "MB", None, cost.before_mb),
    ]
    details = {"without_ms": without, "with_ms": with_loop, "turn": asdict(cost)}
    results.add("decision", figures, details)


if __name__ == "__main__":
    logging.basicConfig(level=logging.CRITICAL)
    print(json.dumps(asdict(turn(int(sys.argv[1])))))
