"""The real Kueue manager and GPUs that claims share: a quota in memory, charged by what claims request."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from driver.errors import RecoverableError
from driver.kube.client import KubeClient, load_configuration
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.integration.kueue import CLUSTER_QUEUES, Queues, kueue_manager, mapping, waits
from tests.support.chart import ANY_SIZE, install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.plugin import PluginFlags
from tests.support.workloads import CLAIMS

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

SOON_S = 60.0
QUOTA = "shared-gpu-memory"
CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
OTHER_CLASS = "our-shared"
"""A class of somebody's own: the policy that makes claims state their memory does not know it."""


@pytest.fixture(scope="module")
def cluster(kueue_program: Path, kueue_source: Path) -> Iterator[Cluster]:
    """A node of four H100 that claims share, a controller, and Kueue with the mapping of docs/queues.md."""
    flags = PluginFlags(gpus="sim:h100-pcie-4", shared="all=time-slicing")
    mappings = [mapping(QUOTA, "gpu-shared", OTHER_CLASS, capacity={"name": "memory"})]
    with control_plane("kueue-shared") as running:
        install(running, ANY_SIZE)
        spec = running.api.get(f"{CLASSES}/gpu-shared")["spec"]
        running.api.post(CLASSES, {"metadata": {"name": OTHER_CLASS}, "spec": spec})
        controller = ControllerProcess(running)
        controller.start()
        with plugins(running, ["n1"], flags), kueue_manager(running, kueue_program, kueue_source, mappings):
            yield running
        controller.stop()


@pytest.fixture
def queues(cluster: Cluster) -> Iterator[Queues]:
    found = Queues(KubeClient(load_configuration(cluster.kubeconfig), "test"))
    yield found
    for job in found.items("/apis/batch/v1/namespaces/default/jobs"):
        found.finish(found.pods(job["metadata"]["name"]))  # no kubelet ends them
    found.remove_all()


def charges(queues: Queues, queue: str, memory: str) -> None:
    """Kueue charges so much for all admitted Workloads, once its status follows."""

    def reached() -> bool:
        [flavor] = queues.client.get_object(f"{CLUSTER_QUEUES}/{queue}")["status"]["flavorsUsage"]
        total = flavor["resources"][0]["total"]
        if total != memory:
            raise RecoverableError(f"it charges {total}")
        return True

    wait_for(reached, SOON_S, f"queue {queue} charges {memory}")


def starts(queues: Queues, queue: str, job: str, template: str, pods: int = 1) -> None:
    """Kueue admits the job, and the scheduler places all its pods."""
    queues.job(job, queue, template, pods=pods)
    wait_for(partial(queues.admitted, job), SOON_S, f"{job} is admitted")
    placed = partial(_placed, queues, job)
    wait_for(lambda: placed() == pods, SOON_S, f"{pods} pods of {job} have a node")


def _placed(queues: Queues, job: str) -> int:
    return sum(bool(pod["spec"].get("nodeName")) for pod in queues.pods(job))


def test_claims_are_admitted_up_to_the_memory_of_the_quota_and_not_beyond(queues: Queues) -> None:
    queues.add("limited", {QUOTA: "160Gi"})
    for memory in ("6Gi", "1500Mi", "70Gi", "11Gi", "10Gi"):
        queues.template(memory.lower(), "gpu-shared", memory=memory)
    starts(queues, "limited", "notebooks", "6gi", pods=10)
    starts(queues, "limited", "odd", "1500mi", pods=10)
    starts(queues, "limited", "large", "70gi")
    charges(queues, "limited", "150Gi")  # 60, and 10 times 2, since 1500Mi are rounded up, and 70
    queues.job("beyond", "limited", "11gi")
    waits(queues, "beyond")
    starts(queues, "limited", "fits", "10gi")
    charges(queues, "limited", "160Gi")
    consumed = [
        result["consumedCapacity"]["memory"]
        for claim in queues.items(CLAIMS)
        for result in claim["status"]["allocation"]["devices"]["results"]
    ]
    assert sum(int(memory.removesuffix("Gi")) for memory in consumed) == 160, "Kueue and the scheduler count alike"
    queues.finish(queues.pods("fits"))
    queues.finish(queues.pods("odd"))
    wait_for(partial(queues.admitted, "beyond"), SOON_S, "what waited is admitted once memory is free")


def test_several_parts_are_charged_each_and_a_claim_that_states_no_memory_for_a_whole_gpu(queues: Queues) -> None:
    queues.add("parts", {QUOTA: "200Gi"})
    queues.template("two", "gpu-shared", count=2, memory="20Gi")
    queues.template("whole", OTHER_CLASS)
    starts(queues, "parts", "pair", "two")
    charges(queues, "parts", "40Gi")
    starts(queues, "parts", "whole", "whole")
    charges(queues, "parts", "119Gi")
    queues.job("another-whole", "parts", "whole", pods=2)
    waits(queues, "another-whole")
