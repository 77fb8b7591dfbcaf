"""allocationMode All, which with a controller gives only what is offered, is refused by the real API server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from driver.errors import ApiError
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import ANY_SIZE, install
from tests.support.control_plane import control_plane
from tests.support.plugin import DRIVER
from tests.support.workloads import CLAIMS, TEMPLATES, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

Object = dict[str, Any]

POLICY = "no-allocation-mode-all.gpu.tessera.dev"
POLICY_PATH = f"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/{POLICY}"
FULL, OWN = "gpu-training", "of-an-admin"
OTHER_DRIVER = "dra.net"
WAY_OUT = "ask for a number of devices instead, at most as many as one node has, such as count: 8"


def every(device_class: str, name: str = "gpu", **more: Any) -> Object:
    found = request(device_class, name)
    found["exactly"] |= {"allocationMode": "All", **more}
    return found


def alternatives(*modes: str, device_class: str = FULL) -> Object:
    named = [{"name": f"a{i}", "deviceClassName": device_class, "allocationMode": m} for i, m in enumerate(modes)]
    return {"name": "gpu", "firstAvailable": named}


def posted(cluster: Cluster, path: str, spec: Object) -> str:
    """What the API server says to such a claim or template; empty if it would take it."""
    try:
        cluster.api.request("POST", f"{path}?dryRun=All", {"metadata": {"name": "tried"}, "spec": spec})
    except ApiError as error:
        return str(error)
    return ""


def created(cluster: Cluster, *requests: Object) -> str:
    devices = {"devices": {"requests": list(requests)}}
    said = posted(cluster, CLAIMS, devices)
    assert bool(said) == bool(posted(cluster, TEMPLATES, {"spec": devices}))
    return said


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A namespace that may use administrative access, and a claim that existed before the policy."""
    with control_plane("allocation-mode") as running:
        label = {"labels": {"resource.kubernetes.io/admin-access": "true"}}
        running.api.patch("/api/v1/namespaces/default", {"metadata": label})
        for name, of in (("before", FULL), ("held", FULL)):
            running.api.post(CLAIMS, {"metadata": {"name": name}, "spec": {"devices": {"requests": [every(of)]}}})
        allocated(running, "held", "gpu")
        install(running, {"controller": {"enabled": True}, **ANY_SIZE})
        # For a claim alone: the answers for claim and template may differ in the moment in which it gets in force.
        everything = {"devices": {"requests": [every(FULL)]}}
        wait_for(lambda: POLICY in posted(running, CLAIMS, everything), 60, "the policy in force")
        yield running


def allocated(cluster: Cluster, name: str, *requests: str, driver: str = DRIVER) -> str:
    """What the API server says to the scheduler's allocation for these requests; empty if it takes it."""
    results = [{"request": r, "driver": driver, "pool": "n1", "device": f"gpu-{i}"} for i, r in enumerate(requests)]
    try:
        cluster.api.patch(f"{CLAIMS}/{name}/status", {"status": {"allocation": {"devices": {"results": results}}}})
    except ApiError as error:
        return str(error)
    return ""


@pytest.fixture
def claim(cluster: Cluster) -> Iterator[Any]:
    """Creates a claim that the test allocates."""
    names = []

    def create(*requests: Object) -> str:
        body = {"metadata": {"generateName": "tried-"}, "spec": {"devices": {"requests": list(requests)}}}
        names.append(cluster.api.post(CLAIMS, body)["metadata"]["name"])
        return str(names[-1])

    yield create
    for name in names:
        cluster.api.request("DELETE", f"{CLAIMS}/{name}")


@pytest.mark.parametrize(
    ("requests", "named"),
    [
        pytest.param([every(FULL)], "request gpu:", id="full GPUs"),
        pytest.param([request(FULL, "one"), every("gpu-inference", "rest")], "request rest:", id="one of two requests"),
        pytest.param([every("gpu-inference-1g-10gb", "a"), every(FULL, "b")], "request a, b:", id="both requests"),
        pytest.param([alternatives("ExactCount", "All")], "request gpu/a1:", id="an alternative"),
    ],
)
def test_a_claim_for_all_devices_is_refused_with_the_way_out(
    cluster: Cluster, requests: list[Object], named: str
) -> None:
    said = created(cluster, *requests)
    assert POLICY in said
    assert named in said
    assert WAY_OUT in said


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([request(FULL), request("gpu-inference", "b")], id="single devices"),
        pytest.param([alternatives("ExactCount", "ExactCount")], id="alternatives"),
        pytest.param([every(FULL, adminAccess=True)], id="administrative access"),
        pytest.param([every(OWN)], id="a class that the chart does not have"),
        pytest.param([], id="no request"),
    ],
)
def test_other_claims_are_let_through(cluster: Cluster, requests: list[Object]) -> None:
    assert created(cluster, *requests) == ""


def test_all_shares_are_refused(cluster: Cluster) -> None:
    assert "denied request" in created(cluster, every("gpu-dev"))


def test_an_allocation_of_all_devices_by_a_class_of_an_admin_is_refused(cluster: Cluster, claim: Any) -> None:
    said = allocated(cluster, claim(every(OWN), request(OWN, "nic")), "gpu", "gpu", "nic")
    assert POLICY in said
    assert "request gpu:" in said
    assert WAY_OUT in said
    assert "request gpu/a0:" in allocated(cluster, claim(alternatives("All", device_class=OWN)), "gpu/a0")


def test_allocations_of_other_requests_and_drivers_are_let_through(cluster: Cluster, claim: Any) -> None:
    assert allocated(cluster, claim(request(OWN)), "gpu") == ""
    assert allocated(cluster, claim(every(OWN)), "gpu", "gpu", driver=OTHER_DRIVER) == ""
    assert allocated(cluster, claim(alternatives("ExactCount", "All", device_class=OWN)), "gpu/a0") == ""
    assert allocated(cluster, claim(every(OWN, adminAccess=True)), "gpu") == ""


def test_a_claim_that_waits_since_before_the_policy_is_refused_and_one_that_is_allocated_stays(
    cluster: Cluster,
) -> None:
    assert WAY_OUT in allocated(cluster, "before", "gpu")
    report = {"driver": DRIVER, "pool": "n1", "device": "gpu-0", "conditions": []}
    for change in (
        {"reservedFor": [{"resource": "pods", "name": "pod", "uid": "uid-1"}]},
        {"devices": [report]},
        {"reservedFor": None, "devices": None, "allocation": None},
    ):
        cluster.api.patch(f"{CLAIMS}/held/status", {"status": change})


def test_the_largest_claim_that_the_api_takes_is_not_too_large_to_judge(cluster: Cluster, claim: Any) -> None:
    """32 requests with 8 alternatives each, and 32 results."""
    eight = [{"name": f"choice-{n}", "deviceClassName": OWN, "allocationMode": "All"} for n in range(8)]
    requests = [{"name": f"request-{number:02}", "firstAvailable": eight} for number in range(32)]
    assert created(cluster, *requests) == ""
    refused = allocated(cluster, claim(*requests), *[f"request-{number:02}/choice-7" for number in range(32)])
    assert POLICY in refused
    eight[7]["deviceClassName"] = FULL
    assert POLICY in created(cluster, *requests)


def test_the_policy_has_no_fault_that_the_api_server_could_find(cluster: Cluster) -> None:
    def checked() -> Object:
        status = cluster.api.get(POLICY_PATH).get("status", {})
        return {"found": status["typeChecking"]} if "typeChecking" in status else {}

    assert wait_for(checked, 60, "the expressions were checked") == {"found": {}}
