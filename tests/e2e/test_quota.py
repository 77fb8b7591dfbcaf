"""Pods over the quota of their namespace, on a real API server: one Event each, with the quota and who uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from driver.errors import ApiError
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.chart import ANY_SIZE, Values, install
from tests.support.command import run_tessera
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess
from tests.support.plugin import PluginFlags, PluginProcess, bare_node
from tests.support.scheduling import asked
from tests.support.workloads import CLAIMS, PODS, TEMPLATES

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SOON_S = 90.0
SMALL = "gpu-inference-1g-10gb"
OF_CLASS = "deviceclass.resource.k8s.io/devices"
RETRIES = 4
NAMES: Values = {"extendedResourceNames": ["gpu-training"]}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """With one node, a quota of one small partition and no full GPU, and a pod that has the partition."""
    with control_plane("quota") as running:
        install(running, {**NAMES, **ANY_SIZE})
        plugin = PluginProcess(running, bare_node(running, "n1"), PluginFlags())
        controller = ControllerProcess(running)
        controller.start()
        plugin.spawn()
        plugin.wait_published()
        hard = {f"{SMALL}.{OF_CLASS}": "1", f"gpu-training.{OF_CLASS}": "0"}
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}, "spec": {"hard": hard}}
        running.apply(quota)
        counted = "/api/v1/namespaces/default/resourcequotas/gpus"
        wait_for(lambda: running.api.get(counted).get("status", {}).get("used"), SOON_S, "the quota counts")
        template = {"metadata": {"name": "slice"}, "spec": {"spec": {"devices": {"requests": [asked(SMALL)]}}}}
        running.api.post(TEMPLATES, template)
        ask(running, "first")
        wait_for(lambda: running.api.get(f"{PODS}/first")["spec"].get("nodeName"), SOON_S, "the first pod is placed")
        yield running
        controller.stop()
        plugin.stop()


def ask(cluster: Cluster, name: str, template: str = "slice") -> None:
    claims = [{"name": "gpu", "resourceClaimTemplateName": template}]
    container = {"resources": {"claims": [{"name": "gpu"}]}}
    cluster.api.post(PODS, busybox_pod(name, container=container, resourceClaims=claims))


def events(cluster: Cluster, name: str, reason: str) -> list[dict[str, Any]]:
    found = cluster.api.get("/api/v1/namespaces/default/events")["items"]
    return [each for each in found if (each["involvedObject"].get("name"), each.get("reason")) == (name, reason)]


def over_quota(cluster: Cluster, name: str, part: str) -> int:
    """The count of the one Event about the quota, which has ``part``."""
    [event] = wait_for(lambda: events(cluster, name, "OverQuota"), SOON_S, f"an Event OverQuota on {name}")
    assert part in event["message"]
    return int(event["count"])


def test_a_pod_of_a_template_is_told_the_quota_once_however_often_it_is_tried_again(cluster: Cluster) -> None:
    ask(cluster, "second")
    holder = cluster.api.get(f"{PODS}/first")["status"]["resourceClaimStatuses"][0]["resourceClaimName"]
    part = f"the ResourceQuota gpus: 1 of 1 {SMALL}.{OF_CLASS} used, by claim {holder}"
    first = over_quota(cluster, "second", part)
    failed = "FailedResourceClaimCreation"
    wait_for(lambda: len(events(cluster, "second", failed)) >= RETRIES, SOON_S, "it was tried again")
    assert over_quota(cluster, "second", part) == first
    answer = run_tessera(cluster, "why", "pod/second").output
    assert "OverQuota" in answer
    assert part in answer


def test_a_pod_with_alternatives_is_told_which_of_them_is_over_quota(cluster: Cluster) -> None:
    alternatives = [{"name": "slice", "deviceClassName": SMALL}, {"name": "whole", "deviceClassName": "gpu-training"}]
    requests = [{"name": "gpu", "firstAvailable": alternatives}]
    template = {"metadata": {"name": "slice-or-gpu"}, "spec": {"spec": {"devices": {"requests": requests}}}}
    cluster.api.post(TEMPLATES, template)
    ask(cluster, "either", "slice-or-gpu")
    over_quota(cluster, "either", f"0 of 0 gpu-training.{OF_CLASS} used")


def test_a_pod_that_requests_a_resource_without_a_class_is_told_which_class_can_have_it(cluster: Cluster) -> None:
    container = {"resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}
    cluster.api.post(PODS, busybox_pod("old-style", container=container))
    reason = "ResourceNotMapped"
    [event] = wait_for(lambda: events(cluster, "old-style", reason), SOON_S, "an Event")
    part = f"--set 'extendedResourceNames={{{SMALL}}}'"
    assert part in event["message"]
    answer = run_tessera(cluster, "why", "pod/old-style").output
    assert reason in answer
    assert part in answer


def test_a_pod_that_requests_an_extended_resource_is_told_the_quota(cluster: Cluster) -> None:
    container = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    cluster.api.post(PODS, busybox_pod("by-resource", container=container))
    part = f"the ResourceQuota gpus: 0 of 0 gpu-training.{OF_CLASS} used"
    first = over_quota(cluster, "by-resource", part)
    failed = "FailedScheduling"
    wait_for(lambda: len(events(cluster, "by-resource", failed)) >= RETRIES, SOON_S, "it was tried again")
    assert over_quota(cluster, "by-resource", part) == first


def test_the_pod_of_a_template_that_is_older_than_the_limit_is_told_the_refusal(cluster: Cluster) -> None:
    request = asked("gpu-inference")
    request["exactly"]["count"] = 9
    spec = {"devices": {"requests": [request]}}
    cluster.api.post(TEMPLATES, {"metadata": {"name": "old"}, "spec": {"spec": spec}})
    install(cluster, NAMES)
    policy, claim = "claim-size.gpu.tessera.dev", {"metadata": {"name": "tried"}, "spec": spec}

    def refusal() -> str:
        try:
            cluster.api.request("POST", f"{CLAIMS}?dryRun=All", claim)
        except ApiError as error:
            return str(error)
        return ""

    wait_for(lambda: policy in refusal(), SOON_S, "the policy is in force")
    ask(cluster, "of-old", "old")
    part = "9 partitions together; 8 are allowed"

    def is_told() -> bool:
        return any(part in event["message"] for event in events(cluster, "of-old", "NoSuchClaim"))

    wait_for(is_told, SOON_S, "an Event with the refusal")
    assert part in run_tessera(cluster, "why", "pod/of-old").output
