"""Random jobs of several teams through the real Kueue: every job runs as a whole, and none waits for ever."""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from driver.kube.client import KubeClient, Object, load_configuration
from tests.harness.cluster import Cluster
from tests.integration.kueue import JOBS, Queues, curated_nodes, kueue_manager, mapping, published
from tests.support.control_plane import control_plane
from tests.support.workloads import PODS

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(7200)]

NODES, GPUS_OF_NODE = 3, 8
WANTED_JOBS = int(os.environ.get("INTEGRATION_JOBS", "1000"))
OPEN_JOBS = 24
"""Jobs that are created and not finished, several times what the GPUs hold."""

PARTIAL_S = 30.0
"""A job of which only a part runs for so long is a partial gang."""

STUCK_S = 120.0
"""No job has finished for so long: they wait for each other."""

QUOTA = 0.75
"""Part of all memory: quotas know no placement, so they must leave room for devices that fit nowhere else."""

RESOURCE = "gpu-memory"
SIZES = {"gpu-training": 8, "gpu-inference-3g-40gb": 12, "gpu-inference-1g-10gb": 20}
"""The most pods of one job, by class."""

TEAMS = ("red", "blue")
PRIORITIES = ("low", "high")


@dataclass
class Mixes:
    """``wanted``: pods of each open job. ``partial_since``: since when only a part of a job runs."""

    queues: Queues
    rng: random.Random
    wanted: dict[str, int] = field(default_factory=dict)
    partial_since: dict[str, float] = field(default_factory=dict)
    longest_partial_s: float = 0.0
    names: Iterator[int] = field(default_factory=count)

    def create(self) -> None:
        """A random job."""
        device_class = self.rng.choice([*SIZES])
        name = f"mix-{next(self.names)}"
        self.wanted[name] = self.rng.randint(1, SIZES[device_class])
        self.queues.job(
            name, self.rng.choice(TEAMS), device_class, self.wanted[name], priority=self.rng.choice(PRIORITIES)
        )

    def step(self) -> int:
        """End jobs that run as a whole; returns how many are done and removed. Fails for partial gangs."""
        jobs = {job["metadata"]["name"]: job for job in self.queues.items(JOBS)}
        pods: dict[str, list[Object]] = defaultdict(list)
        for pod in self.queues.items(PODS):
            if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") == "Running":
                pods[pod["metadata"]["labels"]["job-name"]].append(pod)
        done = [name for name in self.wanted if jobs[name].get("status", {}).get("succeeded", 0) == self.wanted[name]]
        for name in done:
            self.queues.remove(f"{JOBS}/{name}")
            del self.wanted[name]
        for name, wanted in self.wanted.items():
            # A job that was preempted while its pods succeeded one after the other goes on with the others.
            if pods[name] and len(pods[name]) == wanted - jobs[name].get("status", {}).get("succeeded", 0):
                self.queues.finish(pods[name])
        self._check_partial(jobs, pods)
        return len(done)

    def _check_partial(self, jobs: dict[str, Object], pods: dict[str, list[Object]]) -> None:
        now = time.monotonic()
        partial = {
            name
            for name, wanted in self.wanted.items()
            if 0 < len(pods[name]) < wanted
            and not jobs[name]["spec"].get("suspend")
            and not jobs[name].get("status", {}).get("succeeded")
        }
        self.partial_since = {name: self.partial_since.get(name, now) for name in partial}
        for name, since in self.partial_since.items():
            self.longest_partial_s = max(self.longest_partial_s, now - since)
            assert now - since < PARTIAL_S, f"{len(pods[name])} of {self.wanted[name]} pods of {name} run"


@pytest.fixture
def cluster(kueue_program: Path, kueue_source: Path) -> Iterator[Cluster]:
    mappings = [mapping(RESOURCE, *SIZES, counter={"name": "memory"})]
    with (
        control_plane("kueue-mixes") as running,
        curated_nodes(running, NODES),
        kueue_manager(running, kueue_program, kueue_source, mappings),
    ):
        yield running


def test_random_jobs_run_as_a_whole_and_all_of_them_finish(cluster: Cluster) -> None:
    queues = Queues(KubeClient(load_configuration(cluster.kubeconfig), "test"))
    seed = random.randrange(10**6)
    mixes = Mixes(queues, random.Random(seed))
    [full, *_] = published(queues.client, type="gpu")
    memory = int(full["capacity"]["memory"]["value"].removesuffix("Mi")) * NODES * GPUS_OF_NODE
    for name in SIZES:
        queues.template(name, name)
    for name in TEAMS:
        quota = {RESOURCE: f"{int(memory * QUOTA / len(TEAMS))}Mi"}
        queues.add(name, quota, "all", withinClusterQueue="LowerPriority", reclaimWithinCohort="Any")
    for value, name in enumerate(PRIORITIES):
        queues.priority(name, value)
    finished, last = 0, time.monotonic()
    begin = last
    while finished < WANTED_JOBS:
        while len(mixes.wanted) < min(OPEN_JOBS, WANTED_JOBS - finished):
            mixes.create()
        done = mixes.step()
        finished += done
        if done and finished % 10 < done:
            print(f"{finished} jobs finished after {time.monotonic() - begin:.0f} s", flush=True)
        last = time.monotonic() if done else last
        waiting = {name: queues.conditions(name) for name in mixes.wanted} if time.monotonic() > last + STUCK_S else {}
        assert not waiting, f"seed {seed}, {finished} jobs finished, nothing ends any more: {waiting}"
        time.sleep(0.2)
    seconds = time.monotonic() - begin
    print(
        f"seed {seed}: {finished} jobs in {seconds:.0f} s, a part ran alone for {mixes.longest_partial_s:.1f} s at most"
    )
