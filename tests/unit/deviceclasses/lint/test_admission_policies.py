"""The chart's admission policies in lint. tests/e2e/test_policies_of_lint.py compares with the real API server."""

from __future__ import annotations

from typing import Any

import pytest

from deviceclasses.lint.admission_policies import chart_policies, refusals
from deviceclasses.lint.documents import Document
from deviceclasses.lint.pod_rules import lint_pods
from tests.support.linting import opaque
from tests.support.workloads import request

Object = dict[str, Any]


def claim(*requests: Object, **more: Any) -> Object:
    return {"spec": {"devices": {"requests": list(requests), **more}}}


def policies_that_refuse(content: Object, driver: str = "gpu.tessera.dev") -> list[str]:
    return [policy.partition(".")[0] for policy, _ in refusals(chart_policies(driver), "ResourceClaim", content)]


def test_a_claim_is_refused_by_each_policy_that_it_violates() -> None:
    shares = {"name": "shares", "exactly": {"deviceClassName": "gpu-dev", "count": 17}}
    every = {"name": "all", "exactly": {"deviceClassName": "gpu-training", "allocationMode": "All"}}
    assert policies_that_refuse(claim(shares, every)) == ["no-allocation-mode-all", "claim-size", "one-share-of-a-gpu"]
    assert policies_that_refuse(claim(request("gpu-inference"))) == []


@pytest.mark.parametrize("driver", ["gpu.tessera.dev", "gpu.nvidia.com"])
def test_policies_are_about_the_driver_of_that_name(driver: str) -> None:
    selector = 'device.attributes["gpu.nvidia.com"].type == "mig"'
    refusing = policies_that_refuse(claim(request("gpu-training", selector=selector)), driver)
    assert refusing == (["fitting-class"] if driver == "gpu.nvidia.com" else [])


def part(name: str = "gpu", device_class: str = "gpu-shared", **more: Any) -> Object:
    capacity = {"requests": {"memory": "6Gi"}}
    return {"name": name, "exactly": {"deviceClassName": device_class, "capacity": capacity, **more}}


def nvidias(**sharing: Any) -> Object:
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing}
    return {"opaque": {"driver": "gpu.tessera.dev", "parameters": parameters}}


BY_MPS, IN_TURNS = opaque("SharedConfig", strategy="MPS"), opaque("SharedConfig", strategy="TimeSlicing")
TWO, SEVERAL = [part("a"), part("b")], [part(count=2)]
FIRST_OF_TWO = {
    "name": "gpu",
    "firstAvailable": [
        {"name": "a", **part()["exactly"], "count": 2},
        {"name": "b", "deviceClassName": "gpu-training", "count": 2},
    ],
}
OF_ONE_GPU = [{"matchAttribute": "gpu.tessera.dev/parentUUID"}]


@pytest.mark.parametrize(
    ("requests", "config", "names"),
    [
        (SEVERAL, [BY_MPS], "request gpu asks"),
        (SEVERAL, [opaque("SharedConfig", mps={"activeThreadPercentage": 30})], "request gpu asks"),
        (SEVERAL, [nvidias(strategy="MPS")], "request gpu asks"),
        (SEVERAL, [nvidias(mpsConfig={"defaultActiveThreadPercentage": 30})], "request gpu asks"),
        ([FIRST_OF_TWO], [{**BY_MPS, "requests": ["gpu/a"]}], "request gpu/a asks"),
        (TWO, [BY_MPS], "requests a, b ask"),
        (TWO, [IN_TURNS, BY_MPS], "requests a, b ask"),
        ([part("a"), FIRST_OF_TWO], [{**BY_MPS, "requests": ["a", "gpu/a"]}], "requests a, gpu/a ask"),
    ],
)
def test_a_claim_for_several_gpus_by_mps_is_refused_with_what_to_write_instead(
    requests: list[Object], config: list[Object], names: str
) -> None:
    [(policy, message)] = refusals(chart_policies(), "ResourceClaim", claim(*requests, config=config))
    assert policy.startswith("fitting-class")
    assert message.startswith(f"{names} for several GPUs by MPS, and a program can use one: ")
    assert "make it one request without count, with the sum of the memory, or take class gpu-training" in message


@pytest.mark.parametrize(
    ("requests", "config", "constraints"),
    [
        ([part()], [BY_MPS], []),
        ([part(), part("whole", "gpu-training")], [BY_MPS], []),
        (SEVERAL, [], []),
        (SEVERAL, [IN_TURNS], []),
        (SEVERAL, [nvidias(strategy="TimeSlicing")], []),
        (TWO, [{**BY_MPS, "requests": ["a"]}], []),
        (TWO, [BY_MPS, {**IN_TURNS, "requests": ["b"]}], []),
        (TWO, [BY_MPS], OF_ONE_GPU),
        ([{"name": "one", "firstAvailable": [{"name": n, **part()["exactly"]} for n in "ab"]}], [BY_MPS], []),
    ],
)
def test_a_claim_that_may_get_one_gpu_by_mps_is_let_through(
    requests: list[Object], config: list[Object], constraints: list[Object]
) -> None:
    assert policies_that_refuse(claim(*requests, config=config, constraints=constraints)) == []


def test_an_object_that_is_much_larger_than_its_text_ends_the_evaluation() -> None:
    huge: list[Any] = []
    for _ in range(64):
        huge = [huge, huge]
    endless: Object = {}
    endless["endless"] = endless
    assert policies_that_refuse(claim(config=huge)) == policies_that_refuse(claim(config=[endless])) == []


def test_a_pod_template_with_too_many_extended_resources_is_a_finding() -> None:
    limits = {"deviceclass.resource.kubernetes.io/gpu-training": 17}
    template = {"spec": {"containers": [{"name": "a", "resources": {"limits": limits}}]}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": {"template": template}}
    [finding] = lint_pods([Document("job.yaml", 1, job)])
    assert finding.path == "spec.template.spec"
    assert "extended-resource-size" in finding.message
    assert "ask for 17 devices together; 16 are allowed" in finding.message
