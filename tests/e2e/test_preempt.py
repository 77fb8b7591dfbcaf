"""Preemption in the mode DryRun on a real API server and scheduler: pods are named after whose end the waiting pod is
bound, and nobody is evicted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from driver.errors import ApiError
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.chart import ANY_SIZE, install
from tests.support.command import run_tessera
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.plugin import PluginFlags

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.needs("shared counters")]

SOON_S = 60.0
POLICIES = "/apis/gpu.tessera.dev/v1alpha1/gpupolicies"
CORE, APPS = "/api/v1/namespaces/default", "/apis/apps/v1/namespaces/default"
DRA = "/apis/resource.k8s.io/v1/namespaces/default"
FULL = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu-training"}}]}}
CLAIMS = [{"name": "gpu", "resourceClaimTemplateName": "full"}]
POLICY = """apiVersion: gpu.tessera.dev/v1alpha1
kind: GpuPolicy
metadata:
  name: notebooks
spec:
  deviceClasses: [gpu-training]
  preemption:
    enabled: true
    byNamespaces: [default]
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("preempt") as running:
        install(running, ANY_SIZE)
        yield running


@pytest.fixture
def waiting(cluster: Cluster) -> Iterator[Cluster]:
    """A notebook of a ReplicaSet has the only GPU; pod ``train`` of a higher priority waits for it."""
    api = cluster.api
    controller = ControllerProcess(cluster)
    with plugins(cluster, ["one"], PluginFlags(gpus="sim:h100-1")):
        controller.start()
        api.post("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "serving"}, "value": 10})
        api.post(f"{DRA}/resourceclaimtemplates", {"metadata": {"name": "full"}, "spec": {"spec": FULL}})
        api.post(f"{APPS}/replicasets", notebooks())
        wait_for(lambda: [pod for pod in pods(cluster, "notebook") if pod["spec"].get("nodeName")], SOON_S, "bound")
        api.post(f"{CORE}/pods", busybox_pod("train", resourceClaims=CLAIMS, priorityClassName="serving"))
        wait_for(lambda: is_refused(cluster), SOON_S, "the scheduler has refused the pod")
        yield cluster
        controller.stop()
        assert controller.refused() == []


def notebooks() -> dict[str, Any]:
    template = busybox_pod("notebook", resourceClaims=CLAIMS, restartPolicy="Always")
    labels = {"app": "notebook"}
    content = {"metadata": {"labels": labels}, "spec": template["spec"]}
    return {
        "metadata": {"name": "notebook"},
        "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": content},
    }


def pods(cluster: Cluster, app: str) -> list[dict[str, Any]]:
    return list(cluster.api.get(f"{CORE}/pods?labelSelector=app%3D{app}")["items"])


def is_refused(cluster: Cluster) -> bool:
    conditions = cluster.api.get(f"{CORE}/pods/train")["status"].get("conditions", [])
    return any(condition["reason"] == "Unschedulable" for condition in conditions)


def preempt(cluster: Cluster, *arguments: str) -> tuple[int, dict[str, Any]]:
    answer = run_tessera(cluster, "preempt", "pod/train", "-o", "json", *arguments)
    assert answer.stdout, answer.stderr
    return answer.exit_code, json.loads(answer.stdout)


def events_of(cluster: Cluster, policy: str) -> list[dict[str, Any]]:
    query = f"fieldSelector=involvedObject.kind%3DGpuPolicy,involvedObject.name%3D{policy}"
    return list(cluster.api.get(f"{CORE}/events?{query}")["items"])


@pytest.mark.parametrize(
    "spec", [{"mode": "Active"}, {"preemption": {"enabled": "yes"}}, {"priority": "high"}, {"namespaces": [""]}]
)
def test_the_api_server_refuses_a_policy_with_a_wrong_value(cluster: Cluster, spec: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="spec"):
        cluster.api.post(POLICIES, {"metadata": {"name": "wrong"}, "spec": spec})


def test_the_pod_is_bound_after_the_victims_that_are_named_have_ended(waiting: Cluster, tmp_path: Path) -> None:
    api = waiting.api
    [notebook] = pods(waiting, "notebook")
    name = notebook["metadata"]["name"]
    assert preempt(waiting)[0] == 1, "there is no policy"
    (tmp_path / "policy.yaml").write_text(POLICY)
    wait_for(lambda: preempt(waiting, "--policy", str(tmp_path))[0] == 0, SOON_S, "victims are found by a file")
    api.post(POLICIES, yaml.safe_load(POLICY))
    preview = preempt(waiting)[1]
    assert (preview["node"], preview["isCheapest"]) == ("one", True)
    assert [victim["pods"] for victim in preview["victims"]] == [[f"default/{name}"]]
    wait_for(lambda: events_of(waiting, "notebooks"), SOON_S, "the controller says whom it would evict")
    [event] = events_of(waiting, "notebooks")
    assert (event["reason"], f"default/{name}" in event["message"]) == ("WouldEvict", True)
    budget = {
        "metadata": {"name": "always-one"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "notebook"}}},
    }
    api.post("/apis/policy/v1/namespaces/default/poddisruptionbudgets", budget)
    wait_for(lambda: preempt(waiting)[0] == 1, SOON_S, "the budget protects the notebook")
    [spared] = preempt(waiting)[1]["spared"]
    assert spared["reason"] == "PodDisruptionBudget always-one forbids it"
    assert pods(waiting, "notebook")[0]["metadata"]["uid"] == notebook["metadata"]["uid"]
    api.patch(f"{APPS}/replicasets/notebook", {"spec": {"replicas": 0}})
    api.request("DELETE", f"{CORE}/pods/{name}", {"gracePeriodSeconds": 0})  # no kubelet ends it
    wait_for(lambda: api.get(f"{CORE}/pods/train")["spec"].get("nodeName"), SOON_S, "the waiting pod is bound")
