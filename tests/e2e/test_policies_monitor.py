"""Requests with adminAccess at the real API server: if it can change claims, they get the class of monitor devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from driver.errors import ApiError
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import ANY_SIZE, install
from tests.support.control_plane import control_plane
from tests.support.features import has
from tests.support.plugin import DRIVER
from tests.support.workloads import CLAIMS, PODS, TEMPLATES, request, wait_default_account

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

Object = dict[str, Any]

MISUSE = "fitting-class.gpu.tessera.dev"
FULL, MONITOR, NIC = "gpu-training", "gpu-monitor", "nic"
LABEL = {"resource.kubernetes.io/admin-access": "true"}
CHANGES = pytest.mark.needs("mutating policies")
DEVICE = f'device.attributes["{DRIVER}"]'
TOLERATION = {"key": "example.com/broken", "operator": "Exists", "effect": "NoSchedule"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """With a controller, so that allocationMode All needs adminAccess."""
    with control_plane("monitor-policies") as running:
        running.api.patch("/api/v1/namespaces/default", {"metadata": {"labels": LABEL}})
        install(running, {"controller": {"enabled": True}, **ANY_SIZE})
        wait_for(lambda: MISUSE in refusal(running, CLAIMS, request(MONITOR)), 60, "the refusing policy is in force")
        if has(running, "mutating policies"):
            wait_for(lambda: stored(running, CLAIMS, watching(FULL))[0] == watching(MONITOR), 60, "the other one is")
        yield running


def watching(device_class: str, name: str = "gpu", **more: Any) -> Object:
    found = request(device_class, name)
    found["exactly"] |= {"adminAccess": True, "allocationMode": "All", **more}
    return found


def posted(cluster: Cluster, path: str, *requests: Object, **more: Any) -> Object:
    """The devices of such a claim or template, as the API server would store them. Raises ApiError."""
    spec = {"devices": {"requests": list(requests), **more}}
    body = {"metadata": {"name": "tried"}, "spec": spec if path == CLAIMS else {"spec": spec}}
    found = cluster.api.request("POST", f"{path}?dryRun=All", body)["spec"]
    devices: Object = (found if path == CLAIMS else found["spec"])["devices"]
    return devices


def stored(cluster: Cluster, path: str, *requests: Object, **more: Any) -> list[Object]:
    found: list[Object] = posted(cluster, path, *requests, **more)["requests"]
    return found


def refusal(cluster: Cluster, path: str, *requests: Object, **more: Any) -> str:
    """What the API server says to such a claim or template; empty if it would take it."""
    try:
        posted(cluster, path, *requests, **more)
    except ApiError as error:
        return str(error)
    return ""


@CHANGES
class TestClaims:
    def test_for_monitoring_get_the_class_of_monitor_devices_and_keep_everything_else(self, cluster: Cluster) -> None:
        selectors = [{"cel": {"expression": f'{DEVICE}.architecture == "Hopper"'}}]
        count = {"allocationMode": "ExactCount", "count": 2, "selectors": selectors}
        more = {"tolerations": [TOLERATION]} if has(cluster, "device taints") else {}
        asked = [watching(FULL, "a"), watching(FULL, "b", **count, **more)]
        assert stored(cluster, CLAIMS, *asked) == [watching(MONITOR, "a"), watching(MONITOR, "b", **count, **more)]

    def test_keep_the_class_of_requests_that_are_not_for_monitoring(self, cluster: Cluster) -> None:
        kept: Object = {"deviceClassName": FULL, "allocationMode": "ExactCount", "count": 1}
        plain, off = {"name": "b", "exactly": kept}, {"name": "c", "exactly": {**kept, "adminAccess": False}}
        either = {"name": "d", "firstAvailable": [{"name": "x", **kept}, {"name": "y", **kept}]}
        others = [watching(NIC, "e"), watching("gpu-inference", "f"), watching("gpu.nvidia.com", "g")]
        asked = [watching(FULL, "a"), plain, off, either, *others, watching(FULL, "h")]
        wanted = [watching(MONITOR, "a"), plain, off, either, *others, watching(MONITOR, "h")]
        assert stored(cluster, CLAIMS, *asked) == wanted

    def test_of_as_many_requests_as_a_claim_can_have_are_changed_all(self, cluster: Cluster) -> None:
        names = [f"gpu-{number}" for number in range(32)]
        one = {"allocationMode": "ExactCount", "count": 1}
        found = stored(cluster, CLAIMS, *(watching(FULL, name, **one) for name in names))
        assert found == [watching(MONITOR, name, **one) for name in names]

    def test_with_parameters_for_full_gpus_are_taken_since_these_have_no_effect_on_monitors(
        self, cluster: Cluster
    ) -> None:
        opaque = {"driver": DRIVER, "parameters": {"apiVersion": f"{DRIVER}/v1alpha1", "kind": "GpuConfig"}}
        assert stored(cluster, CLAIMS, watching(FULL), config=[{"opaque": opaque}]) == [watching(MONITOR)]

    def test_with_a_selector_that_no_monitor_device_passes_are_refused_with_what_to_leave_out(
        self, cluster: Cluster
    ) -> None:
        selectors = [{"cel": {"expression": f'{DEVICE}.type == "gpu"'}}]
        told = refusal(cluster, CLAIMS, watching(FULL, selectors=selectors))
        assert (
            'gpu-monitor, which gives monitor devices, never what its selector asks for, type == "gpu": leave' in told
        )

    def test_that_exist_can_be_updated_whatever_their_class(self, cluster: Cluster) -> None:
        cluster.api.post(CLAIMS, {"metadata": {"name": "kept"}, "spec": {"devices": {"requests": [watching(FULL)]}}})
        changed = cluster.api.patch(f"{CLAIMS}/kept", {"metadata": {"labels": {"a": "b"}}})
        assert changed["spec"]["devices"]["requests"] == [watching(MONITOR)]
        cluster.api.request("DELETE", f"{CLAIMS}/kept")


def test_templates_stay_as_their_operator_applies_them(cluster: Cluster) -> None:
    for device_class in (FULL, MONITOR, NIC):
        assert stored(cluster, TEMPLATES, watching(device_class)) == [watching(device_class)]


@CHANGES
def test_a_claim_from_a_template_gets_the_class_of_monitor_devices(cluster: Cluster) -> None:
    """As for the GPU Operator's DaemonSets, whose templates name a class of full GPUs."""
    spec = {"devices": {"requests": [watching(FULL)]}}
    cluster.api.post(TEMPLATES, {"metadata": {"name": "watch"}, "spec": {"spec": spec}})
    claims = [{"name": "gpus", "resourceClaimTemplateName": "watch"}]
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "gpus"}]}}
    wait_default_account(cluster, "default")
    pod = {"containers": [container], "resourceClaims": claims}
    cluster.api.post(PODS, {"metadata": {"name": "watcher"}, "spec": pod})

    def made() -> list[Object]:
        found = cluster.api.get(CLAIMS)["items"]
        return [each for each in found if each["metadata"].get("generateName", "").startswith("watcher-gpus-")]

    [claim] = wait_for(made, 60, "the claim of the pod is made")
    assert claim["spec"]["devices"]["requests"] == [watching(MONITOR)]
    cluster.api.request("DELETE", f"{PODS}/watcher")


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(request(MONITOR), id="without adminAccess"),
        pytest.param({"name": "gpu", "exactly": {"deviceClassName": MONITOR, "adminAccess": False}}, id="with false"),
        pytest.param(
            {"name": "gpu", "firstAvailable": [{"name": "a", "deviceClassName": MONITOR}]}, id="as an alternative"
        ),
    ],
)
def test_monitor_devices_are_refused_to_requests_without_admin_access(cluster: Cluster, asked: Object) -> None:
    for path in (CLAIMS, TEMPLATES):
        told = refusal(cluster, path, asked)
        assert MISUSE in told
        assert "has class gpu-monitor, which gives monitor devices, only to requests with adminAccess: true" in told
        assert 'with the label resource.kubernetes.io/admin-access: "true", or take class gpu-training' in told


def test_requests_that_name_the_class_of_monitor_devices_are_taken_as_they_are(cluster: Cluster) -> None:
    one: Object = {"allocationMode": "ExactCount", "count": 1}
    for path in (CLAIMS, TEMPLATES):
        for asked in (watching(MONITOR), watching(MONITOR, **one)):
            assert stored(cluster, path, asked) == [asked]
