"""The chart's admission policies: on generated objects lint and simulate get what the real API server says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from deviceclasses.lint.admission_policies import chart_policies, refusals
from driver.errors import ApiError
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.plugin import DRIVER
from tests.support.workloads import CLAIMS, PODS, TEMPLATES, request, wait_default_account

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

Object = dict[str, Any]

CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
EVERY_EXAMPLE = settings(max_examples=300, derandomize=True, suppress_health_check=list(HealthCheck))
CLASS_NAMES = (
    "gpu-training",
    "gpu-training-nvlink",
    "gpu-inference",
    "gpu-inference-1g-10gb",
    "gpu-dev",
    "gpu-shared",
    "gpu-monitor",
    "of-my-own",
)
DEVICE = f'device.attributes["{DRIVER}"]'
SELECTORS = (
    f'{DEVICE}.type == "mig"',
    f'device.driver == "{DRIVER}" && {DEVICE}.profile == "1g.10gb"',
    f'{DEVICE}.type ==\n"gpu" && {DEVICE}.profile == "none"',
    f'{DEVICE}.profile == "3g.40gb" || {DEVICE}.ecc',
)


def some(**fields: SearchStrategy[Any]) -> SearchStrategy[Object]:
    """Objects that have each of these fields, or not."""
    return st.fixed_dictionaries({}, optional=fields)


SETTINGS = some(
    count=st.sampled_from([1, 1, 2, 5, 8, 9, 17, 2**63 - 1]),
    adminAccess=st.booleans(),
    capacity=st.sampled_from(["memory", f"{DRIVER}/memory"]).map(lambda name: {"requests": {name: "6Gi"}}),
    selectors=st.sampled_from(SELECTORS).map(lambda text: [{"cel": {"expression": text}}]),
) | st.just({"allocationMode": "All"})
DEVICES = st.builds(lambda name, rest: {"deviceClassName": name, **rest}, st.sampled_from(CLASS_NAMES), SETTINGS)
ALTERNATIVES = st.lists(DEVICES, min_size=1, max_size=3).map(
    lambda devices: {
        "firstAvailable": [
            {"name": name, **{field: value for field, value in device.items() if field != "adminAccess"}}
            for name, device in zip("xyz", devices, strict=False)
        ]
    }
)
REQUESTS = st.lists(DEVICES.map(lambda device: {"exactly": device}) | ALTERNATIVES, max_size=3).map(
    lambda requests: [{"name": name, **content} for name, content in zip("abc", requests, strict=False)]
)
NAMES = st.lists(st.sampled_from(["a", "b", "c", "a/x", "a/y"]), max_size=2, unique=True)
SHARING = some(
    strategy=st.sampled_from(["TimeSlicing", "MPS", 7]), timeSlicing=some(interval=st.sampled_from(["Long", "long"]))
)
PARAMETERS = st.builds(
    lambda version, kind, rest: {"apiVersion": version, "kind": kind, **rest},
    st.sampled_from(["gpu.tessera.dev/v1alpha1", "gpu.tessera.dev/v1alpha1", "resource.nvidia.com/v1beta1", "v1", 1]),
    st.sampled_from(["GpuConfig", "MigDeviceConfig", "ShareConfig", "SharedConfig", "VfioDeviceConfig", "Other"]),
    st.just({}) | SHARING | some(sharing=SHARING | st.none() | st.just("x"), other=st.just([1])),
)
OPAQUE = PARAMETERS.map(lambda parameters: {"driver": DRIVER, "parameters": parameters})
CONFIG = st.lists(st.fixed_dictionaries({"opaque": OPAQUE}, optional={"requests": NAMES}), max_size=2)
ATTRIBUTES = st.sampled_from([f"{DRIVER}/parentUUID", f"{DRIVER}/nvlinkClique", f"{DRIVER}/uuid", f"{DRIVER}/profile"])
CONSTRAINTS = st.lists(
    st.builds(
        lambda field, attribute, names: {field: attribute, "requests": names},
        st.sampled_from(["matchAttribute", "distinctAttribute"]), ATTRIBUTES, NAMES,
    ),
    max_size=2,
)  # fmt: skip
CLAIM_SPECS = st.fixed_dictionaries({"devices": some(requests=REQUESTS, config=CONFIG, constraints=CONSTRAINTS)})
IMPLICIT = "deviceclass.resource.kubernetes.io/"
LIMITS = st.dictionaries(
    st.sampled_from([IMPLICIT + "gpu-training", IMPLICIT + "gpu-inference-1g-10gb", "cpu", "example.org/other"]),
    st.sampled_from([1, "4", 5, 8, "9", 17]),
    max_size=2,
)
PATHS = {"ResourceClaim": CLAIMS, "ResourceClaimTemplate": TEMPLATES, "DeviceClass": CLASSES, "Pod": PODS}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("policies-of-lint") as running:
        wait_default_account(running, "default")
        labels = {"resource.kubernetes.io/admin-access": "true"}
        running.api.patch("/api/v1/namespaces/default", {"metadata": {"labels": labels}})
        # Without it the API server would change the class of a request before the other policies see it.
        install(running, {"controller": {"enabled": True}, "admission": {"monitoredClasses": []}})
        # No policy limits claims of a namespace without the label (test_policies_shared.py).
        for policy in (policy for policy in chart_policies() if not policy.name.startswith("largest-shared-claim")):
            wait_for(partial(said_by, running, policy.name), 60, f"{policy.name} is in force")
        yield running


def training(**fields: Any) -> Object:
    return {"name": "a", "exactly": {"deviceClassName": "gpu-training", **fields}}


def said_by(cluster: Cluster, policy: str) -> bool:
    """Whether the policy refuses an object that no other one refuses."""
    parameters = {"driver": DRIVER, "parameters": {"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "Other"}}
    refused: dict[str, Object] = {
        "no-allocation-mode-all": {"requests": [training(allocationMode="All")]},
        "fitting-class": {"requests": [request("gpu-training", selector=SELECTORS[0])]},
        "valid-parameters": {"config": [{"opaque": parameters}]},
        "claim-size": {"requests": [training(count=17)]},
        "stated-memory": {"requests": [request("gpu-shared")]},
        "one-share-of-a-gpu": {"requests": [request("gpu-dev"), request("gpu-dev", "other")]},
    }
    pod = busybox_pod("tried", container={"resources": {"limits": {IMPLICIT + "gpu-training": 17}}})
    devices = refused.get(policy.partition(".")[0])
    answer = said(cluster, "ResourceClaim", {"spec": {"devices": devices}}) if devices else said(cluster, "Pod", pod)
    return answer is not None and answer[0] == policy


def said(cluster: Cluster, kind: str, content: Object) -> tuple[str, str] | None:
    """The policy by which the API server refuses an object, and its message; None if it takes the object.

    Without a policy if it refuses the object for another reason.
    """
    try:
        cluster.api.request("POST", f"{PATHS[kind]}?dryRun=All", {**content, "metadata": {"name": "tried"}})
    except ApiError as error:
        policy, denied, message = str(error).partition(" denied request: ")
        return (policy.rpartition("ValidatingAdmissionPolicy '")[2].partition("'")[0], message) if denied else ("", "")
    return None


def compare(cluster: Cluster, kind: str, content: Object) -> None:
    answer = said(cluster, kind, content)
    assume(answer is None or answer[0])
    ours = dict(refusals(chart_policies(), kind, content))
    event("accepted" if answer is None else answer[0])
    if answer is None:
        assert ours == {}
    else:
        assert parts(ours.get(answer[0], "")) == parts(answer[1])


def parts(message: str) -> list[str]:
    """The faults in a message. Those of several parameters come in any order, like the keys of a map in Go."""
    return sorted(message.removeprefix("opaque parameters are not valid: ").split("; "))


@pytest.mark.needs("consumable capacity")
@EVERY_EXAMPLE
@given(CLAIM_SPECS)
def test_claims_and_templates(cluster: Cluster, spec: Object) -> None:
    compare(cluster, "ResourceClaim", {"spec": spec})
    compare(cluster, "ResourceClaimTemplate", {"spec": {"spec": spec}})


@EVERY_EXAMPLE
@given(st.fixed_dictionaries({"config": st.lists(st.fixed_dictionaries({"opaque": OPAQUE}), max_size=2)}))
def test_classes(cluster: Cluster, spec: Object) -> None:
    compare(cluster, "DeviceClass", {"spec": spec})


@EVERY_EXAMPLE
@given(st.lists(LIMITS, min_size=1, max_size=3), st.lists(LIMITS, max_size=2))
def test_pods(cluster: Cluster, limits: list[Object], initial: list[Object]) -> None:
    pod = busybox_pod("tried")
    [plain] = pod["spec"]["containers"]
    for field, all_limits in (("containers", limits), ("initContainers", initial)):
        pod["spec"][field] = [
            {**plain, "name": f"{field.lower()}-{number}", "resources": {"limits": each}}
            for number, each in enumerate(all_limits)
        ]
    compare(cluster, "Pod", pod)
