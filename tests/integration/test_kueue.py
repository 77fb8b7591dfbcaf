"""The real Kueue manager on curated nodes: what it admits, and how soon it takes GPUs back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from driver.kube.client import KubeClient, load_configuration
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.integration.kueue import Queues, curated_nodes, kueue_manager, mapping, published, waits
from tests.support.control_plane import control_plane

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

NODES, GPUS = 3, 24
SOON_S = 30.0
ADMITTED_S = 2.0
CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
TYPE = 'device.attributes["gpu.tessera.dev"].type'
PROFILE = 'device.attributes["gpu.tessera.dev"].profile'
MAPPINGS = (
    mapping("gpus", "gpu-training"),
    mapping("capacity-memory", "capacity-full", "capacity-1g-10gb", capacity={"name": "memory"}),
    mapping("counter-memory", "counter-full", "counter-1g-10gb", counter={"name": "memory"}),
)
COPIES = {
    f"{source}-{suffix}": original
    for source in ("capacity", "counter")
    for suffix, original in {"full": "gpu-training", "1g-10gb": "gpu-inference-1g-10gb"}.items()
}
"""Classes with the selectors of others: a class can be part of one mapping only."""


@pytest.fixture(scope="module")
def cluster(kueue_program: Path, kueue_source: Path) -> Iterator[Cluster]:
    with (
        control_plane("kueue") as running,
        curated_nodes(running, NODES),
        kueue_manager(running, kueue_program, kueue_source, MAPPINGS),
    ):
        for name, original in COPIES.items():
            spec = running.api.get(f"{CLASSES}/{original}")["spec"]
            running.api.post(CLASSES, {"metadata": {"name": name}, "spec": spec})
        yield running


@pytest.fixture
def queues(cluster: Cluster) -> Iterator[Queues]:
    found = Queues(KubeClient(load_configuration(cluster.kubeconfig), "test"))
    yield found
    found.remove_all()


def runs(queues: Queues, job: str, pods: int, deadline_s: float = SOON_S) -> None:
    wait_for(lambda: queues.running(job) == pods, deadline_s, f"{pods} pods of {job} run")


def seconds(report: Callable[[str, object], None], what: str, begin: float) -> float:
    """Time since ``begin``, also for the report of the run."""
    taken = time.monotonic() - begin
    report(what, f"{taken:.2f}")
    print(f"{what}: {taken:.2f} s")
    return taken


def test_jobs_run_as_far_as_the_quota_goes(queues: Queues) -> None:
    queues.add("limited", {"gpus": 16})
    queues.template("one", "gpu-training")
    for name in ("first", "second", "third"):
        queues.job(name, "limited", "one", pods=8)
        if name != "third":
            runs(queues, name, 8)
    waits(queues, "third")
    queues.finish(queues.pods("first"))
    runs(queues, "third", 8)


def test_a_queue_borrows_and_gives_back(queues: Queues, record_property: Callable[[str, object], None]) -> None:
    queues.add("owner", {"gpus": GPUS}, cohort="all", reclaimWithinCohort="Any")
    queues.add("guest", {"gpus": 0}, cohort="all")
    queues.template("one", "gpu-training")
    queues.job("borrows", "guest", "one", pods=GPUS)
    runs(queues, "borrows", GPUS)
    begin = time.monotonic()
    queues.job("reclaims", "owner", "one", pods=GPUS)
    runs(queues, "reclaims", GPUS)
    seconds(record_property, "reclaimed 24 GPUs", begin)
    assert not queues.admitted("borrows")


def test_an_important_job_preempts_another(queues: Queues, record_property: Callable[[str, object], None]) -> None:
    queues.add("ordered", {"gpus": GPUS}, withinClusterQueue="LowerPriority")
    queues.priority("low", 1)
    queues.priority("high", 2)
    queues.template("one", "gpu-training")
    queues.job("batch", "ordered", "one", pods=GPUS, priority="low")
    runs(queues, "batch", GPUS)
    begin = time.monotonic()
    queues.job("urgent", "ordered", "one", pods=1, priority="high")
    runs(queues, "urgent", 1)
    seconds(record_property, "preempted", begin)
    assert not queues.admitted("batch")


@pytest.mark.parametrize(
    ("resource", "device_class", "selector"),
    [
        ("gpus", "gpu-training", f'{TYPE} == "gpu"'),
        ("capacity-memory", "capacity-full", ""),
        ("counter-memory", "counter-full", ""),
    ],
    ids=["selector", "capacity source", "counter source"],
)
def test_eight_gpus_are_admitted_at_once_on_idle_nodes(
    queues: Queues, record_property: Callable[[str, object], None], resource: str, device_class: str, selector: str
) -> None:
    queues.add("idle", {resource: "10Ti"})
    queues.template("eight", device_class, count=8, selector=selector)
    begin = time.monotonic()
    queues.job("large", "idle", "eight")
    wait_for(lambda: queues.admitted("large"), SOON_S, "the job is admitted")
    assert seconds(record_property, f"admitted by {resource}", begin) < ADMITTED_S
    runs(queues, "large", 1)


@pytest.mark.parametrize("source", ["capacity", "counter"])
def test_a_partition_preempts_where_all_gpus_are_held(
    queues: Queues, record_property: Callable[[str, object], None], source: str
) -> None:
    [full, *_] = published(queues.client, type="gpu")
    memory = int(full["capacity"]["memory"]["value"].removesuffix("Mi"))
    queues.add("memory", {f"{source}-memory": f"{GPUS * memory}Mi"}, withinClusterQueue="LowerPriority")
    queues.priority("low", 1)
    queues.priority("high", 2)
    queues.template("full", f"{source}-full")
    queues.template("small", f"{source}-1g-10gb")
    for number in range(3):
        queues.job(f"batch-{number}", "memory", "full", pods=8, priority="low")
    for number in range(3):
        runs(queues, f"batch-{number}", 8)
    begin = time.monotonic()
    queues.job("partition", "memory", "small", priority="high")
    runs(queues, "partition", 1)
    seconds(record_property, f"partition by {source}", begin)
    assert [queues.admitted(f"batch-{number}") for number in range(3)].count(False) == 1
