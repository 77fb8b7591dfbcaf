"""Claims and pods that ask for more devices together than the chart's values allow, at the real API server."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from driver.errors import ApiError
from driver.kube.client import KubeClient, load_configuration
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.rights import may
from tests.support.workloads import CLAIMS, PODS, TEMPLATES, request, wait_default_account

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

Object = dict[str, Any]

CLAIM_SIZE, RESOURCE_SIZE = "claim-size.gpu.tessera.dev", "extended-resource-size.gpu.tessera.dev"
FULL, SMALL, OWN = "gpu-training", "gpu-inference-1g-10gb", "of-an-admin"
LISTED, COUNTED = "partitions-of-an-admin", "gpus-of-an-admin"
LISTS = {"partitionClasses": [LISTED], "countedClasses": [COUNTED]}
LARGEST = 2**63 - 1
IMPLICIT = "deviceclass.resource.kubernetes.io/"
EXTENDED = {"annotations": {"resource.kubernetes.io/extended-resource-claim": "true"}}


TENANT: dict[str, Object] = {
    "Role": {"rules": [{"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["create"]}]},
    "RoleBinding": {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "tenant"},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": "default"}],
    },
}
"""Somebody who may create claims, and nothing else."""


def some(count: int, device_class: str = SMALL, name: str = "gpu", **more: Any) -> Object:
    found = request(device_class, name)
    found["exactly"] |= {"count": count, **more}
    return found


def either(*counts: int, device_class: str = SMALL, name: str = "gpu") -> Object:
    named = [{"name": f"a{n}", "deviceClassName": device_class, "count": count} for n, count in enumerate(counts)]
    return {"name": name, "firstAvailable": named}


def refusal(cluster: Cluster, path: str, spec: Object, **metadata: Any) -> str:
    """What the API server says to such an object; empty if it would take it."""
    try:
        cluster.api.request("POST", f"{path}?dryRun=All", {"metadata": {"name": "tried", **metadata}, "spec": spec})
    except ApiError as error:
        return str(error)
    return ""


def of_claim(cluster: Cluster, *requests: Object) -> str:
    """What it says to a claim, and in the same way to a template."""
    devices = {"devices": {"requests": list(requests)}}
    said = refusal(cluster, CLAIMS, devices)
    assert bool(said) == bool(refusal(cluster, TEMPLATES, {"spec": devices}))
    return said


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("size") as running:
        wait_default_account(running, "default")
        running.api.patch(
            "/api/v1/namespaces/default", {"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}}
        )
        install(running, {"extendedResourceNames": [FULL, SMALL], "admission": LISTS})
        for kind, more in TENANT.items():
            running.apply(
                {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind,
                 "metadata": {"name": "tenant", "namespace": "default"}, **more}
            )  # fmt: skip
        able = partial(
            may, running, "default:default", "create", "resourceclaims", group="resource.k8s.io", namespace="default"
        )
        wait_for(able, 60, "the API server knows what the tenant may do")
        # For a claim alone: the answers for claim and template may differ in the moment in which it gets in force.
        many = {"devices": {"requests": [some(9)]}}
        wait_for(lambda: CLAIM_SIZE in refusal(running, CLAIMS, many), 60, "the policy for claims is in force")
        wait_for(lambda: RESOURCE_SIZE in of_pod(running, {IMPLICIT + SMALL: 9}), 60, "the policy for pods is in force")
        yield running


@pytest.mark.parametrize(
    ("requests", "found"),
    [
        pytest.param([some(9)], "9 partitions together; 8 are allowed", id="partitions of one request"),
        pytest.param([some(5), some(4, "gpu-inference", "b")], "9 partitions together; 8", id="of several requests"),
        pytest.param(
            [some(5), either(1, 4, name="b")], "9 partitions together; 8", id="the largest alternative counts"
        ),
        pytest.param([some(9, LISTED)], "9 partitions together; 8", id="a class that the values list"),
        pytest.param([some(17, COUNTED)], "17 devices together; 16 are allowed", id="an admin's own full GPUs"),
        pytest.param([some(17, FULL)], "17 devices together; 16 are allowed", id="full GPUs"),
        pytest.param([some(8), some(9, FULL, "b")], "17 devices together; 16", id="together with partitions"),
        pytest.param([some(8), some(9, OWN, "b")], "17 devices together; 16", id="together with other devices"),
        pytest.param([some(LARGEST), some(LARGEST, name="b")], "2000 partitions together; 8", id="the largest numbers"),
    ],
)
def test_a_claim_for_more_devices_than_allowed_is_refused_with_both_numbers(
    cluster: Cluster, requests: list[Object], found: str
) -> None:
    said = of_claim(cluster, *requests)
    assert CLAIM_SIZE in said
    assert found in said


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([some(8)], id="as many partitions as allowed"),
        pytest.param([some(4), either(1, 4, name="b")], id="with the largest alternative"),
        pytest.param([some(16, FULL)], id="as many devices as allowed"),
        pytest.param([some(32, OWN)], id="only classes that are not known"),
        pytest.param([some(32, FULL, adminAccess=True)], id="administrative access"),
        pytest.param([], id="no request"),
    ],
)
def test_other_claims_are_let_through(cluster: Cluster, requests: list[Object]) -> None:
    assert of_claim(cluster, *requests) == ""


def test_the_largest_claim_that_the_api_takes_is_not_too_large_to_judge(cluster: Cluster) -> None:
    """32 requests with 8 alternatives each."""
    requests = [either(*[1] * 8, device_class=OWN, name=f"request-{number:02}") for number in range(32)]
    assert of_claim(cluster, *requests) == ""
    requests[31] = either(*[1] * 8, name="request-31")
    assert "32 devices together" in of_claim(cluster, *requests)


def test_the_claim_that_the_scheduler_makes_for_extended_resources_is_exempt_for_nobody_else(cluster: Cluster) -> None:
    devices = {"devices": {"requests": [some(9)]}}
    assert refusal(cluster, CLAIMS, devices, **EXTENDED) == "", "an administrator may allocate claims, as the scheduler"
    tenant = KubeClient(load_configuration(cluster.service_account_kubeconfig("default", "default")), "test")
    with pytest.raises(ApiError, match=CLAIM_SIZE):
        tenant.create(CLAIMS, {"metadata": {"name": "tried", **EXTENDED}, "spec": devices}, {"dryRun": "All"})


def of_pod(cluster: Cluster, *containers: dict[str, Any], initial: dict[str, Any] | None = None) -> str:
    """What the API server says to a pod with such limits."""
    pod = busybox_pod("tried")
    plain = pod["spec"]["containers"][0]

    def with_limits(number: int, limits: dict[str, Any]) -> Object:
        return {**plain, "name": f"c{number}", "resources": {"limits": limits}}

    spec = {**pod["spec"], "containers": [with_limits(*each) for each in enumerate(containers)]}
    if initial is not None:
        spec["initContainers"] = [with_limits(9, initial)]
    return refusal(cluster, PODS, spec)


@pytest.mark.parametrize(
    ("containers", "found"),
    [
        ([{IMPLICIT + SMALL: 9}], "9 partitions together; 8 are allowed"),
        ([{"nvidia.com/mig-1g.10gb": "9"}], "9 partitions together; 8"),
        ([{IMPLICIT + SMALL: 5}, {"nvidia.com/mig-1g.10gb": 4}], "9 partitions together; 8"),
        ([{"nvidia.com/gpu": 17}], "17 devices together; 16 are allowed"),
        ([{"nvidia.com/gpu": LARGEST}], "1000 devices together; 16"),
    ],
)
def test_a_pod_with_more_extended_resources_than_allowed_is_refused(
    cluster: Cluster, containers: list[dict[str, Any]], found: str
) -> None:
    said = of_pod(cluster, *containers)
    assert RESOURCE_SIZE in said
    assert found in said


def test_an_init_container_with_more_than_allowed_is_refused_and_runs_before_the_others(cluster: Cluster) -> None:
    assert "9 partitions" in of_pod(cluster, {}, initial={IMPLICIT + SMALL: 9})
    assert of_pod(cluster, {IMPLICIT + SMALL: 8}, initial={IMPLICIT + SMALL: 8}) == ""


@pytest.mark.parametrize("limits", [{}, {"cpu": "64"}, {"nvidia.com/gpu": 16}, {"example.org/other": 99}])
def test_other_pods_are_let_through(cluster: Cluster, limits: dict[str, Any]) -> None:
    assert of_pod(cluster, limits) == ""
