"""The examples for queues on the real API server and scheduler: a gang runs, and each pod of the others is valid."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from deviceclasses.lint.pod_templates import pod_templates
from driver.kube.client import KubeClient, load_configuration
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.gangs import GANGS, SERVED
from tests.support.plugin import PluginFlags
from tests.support.queue_examples import FOLDER, STRICT, apply, collection, example
from tests.support.workloads import PODS, TEMPLATES, wait_default_account

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not SERVED, reason="PodGroups of v1beta1 are served from Kubernetes 1.37 on"),
]

BOUND_S = 90.0
KUBERNETES_GROUPS = ("batch/", "resource.k8s.io/", "scheduling.k8s.io/")
TRIED_IN = "kube-public"
"""Not where the gang of another test runs, whose objects have the same names."""
FILES = sorted(each.stem for each in FOLDER.glob("*.yaml"))


@pytest.fixture(scope="module")
def client() -> Iterator[KubeClient]:
    with control_plane("queue-examples", GANGS) as running:
        install(running)
        wait_default_account(running, TRIED_IN)
        yield from _with_node(running)


def _with_node(cluster: Cluster) -> Iterator[KubeClient]:
    controller = ControllerProcess(cluster)
    controller.start()
    with plugins(cluster, ["n1"], PluginFlags(gpus="sim:dgx-h100")):
        yield KubeClient(load_configuration(cluster.kubeconfig), "test")
    controller.stop()


@pytest.mark.parametrize("name", FILES)
def test_the_api_server_accepts_each_object_and_each_pod_of_an_example(client: KubeClient, name: str) -> None:
    trial = {**STRICT, "dryRun": "All"}
    for content in example(name):
        if content["apiVersion"].startswith(KUBERNETES_GROUPS):
            client.create(collection(content, TRIED_IN), content, trial)
        for template in pod_templates(content):
            tried = {"metadata": {"name": "tried"}, "spec": dict(template.spec)}
            client.create(f"/api/v1/namespaces/{TRIED_IN}/pods", tried, trial)


def test_the_pods_of_the_gang_are_bound_with_two_gpus_each(client: KubeClient) -> None:
    apply(client, "podgroup")

    def bound() -> bool:
        pods = json.loads(client.get(PODS, {"labelSelector": "job-name=gang"}))["items"]
        return len([pod for pod in pods if pod["spec"].get("nodeName") == "n1"]) == 2

    wait_for(bound, BOUND_S, "both pods are bound")
    claims = client.get_object(TEMPLATES.replace("resourceclaimtemplates", "resourceclaims"))["items"]
    assert [len(each["status"]["allocation"]["devices"]["results"]) for each in claims] == [2, 2]
