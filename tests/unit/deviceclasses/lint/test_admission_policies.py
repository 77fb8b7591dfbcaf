"""The chart's admission policies in lint. tests/e2e/test_policies_of_lint.py compares with the real API server."""

from __future__ import annotations

from typing import Any

import pytest

from deviceclasses.lint.admission_policies import chart_policies, refusals
from deviceclasses.lint.documents import Document
from deviceclasses.lint.pod_rules import lint_pods
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
