"""Opaque parameters at the real API server: refused where the node plugin would refuse them, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driver.config.opaque_parameters import InvalidParameters, parse_parameters
from driver.errors import ApiError
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import ANY_SIZE, install
from tests.support.control_plane import control_plane
from tests.support.plugin import DRIVER
from tests.support.workloads import CLAIMS, TEMPLATES, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

Object = dict[str, Any]

CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
POLICY = "valid-parameters.gpu.tessera.dev"
VERSIONS = ("gpu.tessera.dev/v1alpha1", "resource.nvidia.com/v1beta1")
KINDS = ("GpuConfig", "MigDeviceConfig", "ShareConfig", "SharedConfig")
SLICINGS = ("timeSlicing", "timeSlicingConfig")

ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    1.5,
    "",
    "x" * 200,
    'a "quoted"\nline',
    [],
    ["TimeSlicing"],
    {},
    {"interval": {}},
)
SHARINGS: tuple[Any, ...] = (
    *ODD,
    *({"strategy": each} for each in (*ODD, "TimeSlicing", "MPS", "timeslicing")),
    *({slicing: each} for slicing, each in product(SLICINGS, ODD)),
    *(
        {slicing: {"interval": each}}
        for slicing, each in product(SLICINGS, (*ODD, "Default", "Short", "Medium", "Long", "short"))
    ),
    {"strategy": "TimeSlicing", "timeSlicing": {"interval": "Short"}},
    {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Short"}},
    {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 50}},
    *({"mpsConfig": {"defaultActiveThreadPercentage": each}} for each in (*ODD, 1, 100, 101, -5, 10**20)),
    {"mpsConfig": {"multiUser": True}},
    {"mps": {}},
    {"timeSlicing": {"intervall": "Short"}},
    {"timeSlicing": {"interval": "Short", "extra": None}},
    {"timeSlicing.interval": "Short"},
    {"": {}},
)
DOCUMENTS: list[Object] = [
    {},
    *({"apiVersion": version} for version in (*ODD, *VERSIONS)),
    *({"kind": kind} for kind in KINDS),
    *({"apiVersion": version, "kind": kind} for version, kind in product((*ODD, *VERSIONS, "v1"), KINDS)),
    *(
        {"apiVersion": version, "kind": kind}
        for version, kind in product(VERSIONS, (*ODD, "GpuConfg", "gpuconfig", "VfioDeviceConfig"))
    ),
    *(
        {"apiVersion": version, "kind": "GpuConfig", "sharing": sharing}
        for version, sharing in product(VERSIONS, SHARINGS)
    ),
    *(
        {"apiVersion": version, "kind": kind, "sharing": sharing}
        for version, kind, sharing in product(VERSIONS, KINDS[1:], (None, {}, {"strategy": "TimeSlicing"}, "x"))
    ),
    *({"apiVersion": VERSIONS[0], "kind": "SharedConfig", "strategy": each} for each in (*ODD, "MPS", "TimeSlicing")),
    *({"apiVersion": VERSIONS[0], "kind": "SharedConfig", "mps": each} for each in ODD),
    *(
        {"apiVersion": VERSIONS[0], "kind": "SharedConfig", "mps": {"activeThreadPercentage": each}}
        for each in (*ODD, 1, 100, 101)
    ),
    *(
        {"apiVersion": VERSIONS[0], "kind": kind, name: {}}
        for kind in KINDS
        for name in ("extra", "Sharing", "a b", "")
    ),
    {"apiVersion": VERSIONS[0], "kind": "GpuConfig", "sharing.strategy": "TimeSlicing"},
]

NAMES = [
    "sharing",
    "strategy",
    "timeSlicing",
    "timeSlicingConfig",
    "interval",
    "mps",
    "mpsConfig",
    "apiVersion",
    "kind",
]
NAMES += ["activeThreadPercentage", "defaultActiveThreadPercentage"]
SCALARS = (
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5) | st.sampled_from(["TimeSlicing", "Short"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
NEARLY = st.fixed_dictionaries(
    {"apiVersion": st.sampled_from(VERSIONS), "kind": st.sampled_from(KINDS)},
    optional={
        "sharing": st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3),
        "mps": st.dictionaries(st.sampled_from(NAMES), JSON, max_size=2),
        "extra": JSON,
    },
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("parameters") as running:
        install(running, ANY_SIZE)
        wait_for(lambda: refusal(running, [{}]), 60, "the policy is in force")
        yield running


def config(documents: list[Object], driver: str = DRIVER) -> list[Object]:
    return [{"opaque": {"driver": driver, "parameters": each}} for each in documents]


def refusal(cluster: Cluster, documents: list[Object], driver: str = DRIVER) -> str:
    """What the API server says to a claim with these parameters; empty: it would take it."""
    # A class that Tessera doesn't know, so that nothing but the parameters themselves can be wrong.
    devices = {"requests": [request("somebodys")], "config": config(documents, driver)}
    return told(cluster, CLAIMS, {"metadata": {"name": "tried"}, "spec": {"devices": devices}})


def told(cluster: Cluster, path: str, body: Object, method: str = "POST") -> str:
    """The same for any object."""
    try:
        cluster.api.request(method, f"{path}?dryRun=All", body)
    except ApiError as error:
        assert error.status == 422, error  # noqa: PT017 - nothing else may refuse it
        assert POLICY in str(error), error  # noqa: PT017
        return str(error).partition("denied request: ")[2]
    return ""


def faults(document: Object) -> list[str]:
    """What the node plugin would say."""
    try:
        parse_parameters(document, "here")
    except InvalidParameters as error:
        return [fault.path for fault in error.faults]
    return []


def test_the_api_server_refuses_what_the_node_plugin_refuses_and_nothing_else(cluster: Cluster) -> None:
    good = [each for each in DOCUMENTS if not faults(each)]
    bad = [each for each in DOCUMENTS if faults(each)]
    assert len(good) > 30
    for start in range(0, len(good), 30):
        assert refusal(cluster, good[start : start + 30]) == ""
    let_through = [each for each in bad if not refusal(cluster, [each]).startswith("opaque parameters are not valid: ")]
    assert let_through == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(NEARLY)
def test_they_agree_on_whatever_json_stands_there(cluster: Cluster, document: Object) -> None:
    assert bool(refusal(cluster, [document])) == bool(faults(document)), document


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, ["apiVersion: is missing; accepted: gpu.tessera.dev/v1alpha1, resource.nvidia.com/v1beta1"]),
        (
            {"apiVersion": VERSIONS[0]},
            ["kind: is missing; accepted: GpuConfig, MigDeviceConfig, ShareConfig, SharedConfig"],
        ),
        ({"apiVersion": "v1", "kind": "GpuConfig"}, ['apiVersion "v1": is not known; accepted: gpu.tessera.dev/']),
        (
            {"apiVersion": VERSIONS[1], "kind": "VfioDeviceConfig"},
            ['kind "VfioDeviceConfig": passing a GPU through to a virtual machine is not supported; accepted: GpuC'],
        ),
        (
            {"apiVersion": VERSIONS[0], "kind": "MigDeviceConfig", "sharing": {"strategy": "TimeSlicing"}},
            ["sharing {...}: time-slicing settings have no effect on a MIG partition; this kind has no settings"],
        ),
        (
            {
                "apiVersion": VERSIONS[0],
                "kind": "ShareConfig",
                "sharing": {"strategy": "MPS", "timeSlicing": {"interval": 3, "intervall": "Short"}},
                "share": ["x"],
            },
            [
                (
                    'sharing.strategy "MPS": MPS is for shared devices (kind SharedConfig), which several claims hold '
                    "at once; accepted: TimeSlicing"
                ),
                "sharing.timeSlicing.interval 3: must be a string; accepted: Default, Short, Medium, Long",
                'sharing.timeSlicing.intervall "Short": no such field; accepted: interval',
                "share [...]: no such field; accepted: sharing",
            ],
        ),
        (
            {"apiVersion": VERSIONS[0], "kind": "SharedConfig", "mps": {"activeThreadPercentage": 101}},
            ["mps.activeThreadPercentage 101: must be a whole number from 1 to 100"],
        ),
        (
            {"apiVersion": VERSIONS[0], "kind": "GpuConfig", "sharing": "x" * 200},
            [f'sharing "{"x" * 60}...": must be an object with fields strategy, timeSlicing, or left out'],
        ),
    ],
)
def test_everything_wrong_is_told_with_path_value_and_what_is_accepted(
    cluster: Cluster, document: Object, expected: list[str]
) -> None:
    said = refusal(cluster, [{"apiVersion": VERSIONS[0], "kind": "GpuConfig"}, document])
    for each in expected:
        assert f"spec.devices.config[1].opaque.parameters.{each}" in said
    assert said.count("opaque.parameters.") == len(expected)


WRONG = config([{"apiVersion": VERSIONS[0], "kind": "GpuConfg"}])


def test_templates_and_classes_are_held_to_it_too(cluster: Cluster) -> None:
    devices = {"requests": [request("somebodys")], "config": WRONG}
    template = {"metadata": {"name": "tried"}, "spec": {"spec": {"devices": devices}}}
    assert 'spec.spec.devices.config[0].opaque.parameters.kind "GpuConfg"' in told(cluster, TEMPLATES, template)
    device_class = {"metadata": {"name": "tried"}, "spec": {"config": WRONG}}
    assert 'spec.config[0].opaque.parameters.kind "GpuConfg"' in told(cluster, CLASSES, device_class)


def test_a_class_is_held_to_it_when_it_changes(cluster: Cluster) -> None:
    stored = cluster.api.get(f"{CLASSES}/gpu-dev")
    stored["spec"]["config"] = WRONG
    assert "GpuConfg" in told(cluster, f"{CLASSES}/gpu-dev", stored, "PUT")


def test_what_is_for_another_driver_is_none_of_its_business(cluster: Cluster) -> None:
    assert refusal(cluster, [{"anything": "goes"}], driver="gpu.example.com") == ""


def test_the_policy_has_no_fault_that_the_api_server_could_find(cluster: Cluster) -> None:
    def checked() -> Object:
        status = cluster.api.get(f"{POLICIES}/{POLICY}").get("status", {})
        return {"found": status["typeChecking"]} if "typeChecking" in status else {}

    assert wait_for(checked, 60, "the expressions were checked") == {"found": {}}
