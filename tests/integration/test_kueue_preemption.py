"""The real Kueue manager and GpuPolicies in one cluster: Kueue takes back quota, Tessera devices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from driver.errors import NOT_FOUND, accepted_status
from driver.kube.client import KubeClient, Object, load_configuration
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.integration.kueue import Queues, curated_nodes, kueue_manager, mapping
from tests.support.control_plane import control_plane
from tests.support.workloads import PODS

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

GPUS = 16
SOON_S = 60.0
POLICIES = "/apis/gpu.tessera.dev/v1alpha1/gpupolicies"
EVENTS = "/api/v1/namespaces/default/events"
REPLICA_SETS = "/apis/apps/v1/namespaces/default/replicasets"
POLICY = {
    "apiVersion": "gpu.tessera.dev/v1alpha1",
    "kind": "GpuPolicy",
    "metadata": {"name": "all"},
    "spec": {"mode": "Active", "preemption": {"enabled": True, "byNamespaces": ["default"]}},
}


@pytest.fixture(scope="module")
def cluster(kueue_program: Path, kueue_source: Path) -> Iterator[Cluster]:
    with (
        control_plane("kueue") as running,
        curated_nodes(running, GPUS // 8),
        kueue_manager(running, kueue_program, kueue_source, [mapping("gpus", "gpu-training")]),
    ):
        running.api.post("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "serving"}, "value": 10})
        yield running


@pytest.fixture
def queues(cluster: Cluster) -> Iterator[Queues]:
    client = KubeClient(load_configuration(cluster.kubeconfig), "test")
    queues = Queues(client)
    queues.template("one", "gpu-training")
    client.create(POLICIES, POLICY)
    yield queues
    queues.remove(f"{POLICIES}/all")
    with accepted_status(NOT_FOUND):
        queues.remove(f"{REPLICA_SETS}/notebook")
    queues.remove_all()
    for event in queues.items(EVENTS):  # that a policy of an earlier test has
        queues.remove(f"{EVENTS}/{event['metadata']['name']}")


def runs(queues: Queues, job: str, pods: int) -> None:
    wait_for(lambda: queues.running(job) == pods, SOON_S, f"{pods} pods of {job} run")


def pods(queues: Queues, app: str) -> list[Object]:
    """Those with a node that are not being deleted."""
    present = [pod for pod in queues.items(PODS) if pod["metadata"].get("labels", {}).get("app") == app]
    return [pod for pod in present if pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]]


def messages(queues: Queues, reason: str, about: str) -> list[str]:
    """Messages of the Events with this reason on objects with such a name."""
    events = queues.items(EVENTS)
    return [
        event["message"] for event in events if (event["reason"], event["involvedObject"]["name"]) == (reason, about)
    ]


def template(**spec: Any) -> Object:
    """A pod outside of any queue with a GPU of its own."""
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one"}]
    return {"terminationGracePeriodSeconds": 1, "containers": [container], "resourceClaims": claims, **spec}


def notebooks(queues: Queues, count: int) -> None:
    labels = {"app": "notebook"}
    content = {"metadata": {"labels": labels}, "spec": template()}
    spec = {"replicas": count, "selector": {"matchLabels": labels}, "template": content}
    queues.client.create(REPLICA_SETS, {"metadata": {"name": "notebook"}, "spec": spec})
    wait_for(lambda: len(pods(queues, "notebook")) == count, SOON_S, f"{count} notebooks run")


def test_kueue_takes_back_its_quota_and_no_policy_evicts_anyone(queues: Queues) -> None:
    queues.add("ordered", {"gpus": GPUS}, withinClusterQueue="LowerPriority")
    queues.priority("low", 1)
    queues.priority("high", 2)
    queues.job("batch", "ordered", "one", pods=GPUS, priority="low")
    runs(queues, "batch", GPUS)
    queues.job("urgent", "ordered", "one", priority="high", priorityClassName="serving")
    runs(queues, "urgent", 1)
    assert not queues.admitted("batch")
    assert not messages(queues, "Preempting", "all")


def test_a_job_that_kueue_has_admitted_gets_the_gpu_of_a_notebook_outside_of_its_queues(queues: Queues) -> None:
    notebooks(queues, GPUS)
    queues.add("serving", {"gpus": GPUS})
    queues.job("urgent", "serving", "one", priorityClassName="serving")
    wait_for(partial(queues.admitted, "urgent"), SOON_S, "Kueue admits the job, which it does not know to lack a GPU")
    runs(queues, "urgent", 1)
    assert len(pods(queues, "notebook")) == GPUS - 1
    assert len(messages(queues, "Preempting", "all")) == 1


def test_jobs_of_kueue_are_never_evicted_for_a_pod_outside_of_its_queues(queues: Queues) -> None:
    queues.add("batch", {"gpus": GPUS})
    queues.job("train", "batch", "one", pods=GPUS)
    runs(queues, "train", GPUS)
    pod = {"metadata": {"name": "serve"}, "spec": template(priorityClassName="serving", restartPolicy="Never")}
    queues.client.create(PODS, pod)
    wait_for(lambda: messages(queues, "PreemptionBlocked", "serve"), SOON_S, "an Event says that no pod is evicted")
    assert queues.running("train") == GPUS
    queues.remove(f"{PODS}/serve")
