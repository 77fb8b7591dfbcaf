"""What lint says of pods, whatever object makes them, and of what people write for NVIDIA's DRA driver."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from deviceclasses.chart_classes import chart_classes
from deviceclasses.lint.class_and_claim_rules import lint
from deviceclasses.lint.documents import Document
from deviceclasses.lint.pod_rules import lint_pods
from tessera.cli import main

Object = dict[str, Any]
DRIVER = "gpu.tessera.dev"
TEMPLATE = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": {"name": "small"}}
CLAIM = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "shared"}}


def said(*objects: Object) -> list[tuple[str, str]]:
    """The path and message of each finding."""
    documents = [Document("f", number, content) for number, content in enumerate(objects, 1)]
    return [(finding.path, finding.message) for finding in lint_pods(documents)]


def pod(claims: list[Object], *used: str) -> Object:
    container = {"name": "main", "image": "i", "resources": {"claims": [{"name": name} for name in used]}}
    return {"spec": {"resourceClaims": claims, "containers": [container]}}


def of_template(name: str) -> Object:
    return {"name": "gpu", "resourceClaimTemplateName": name}


GOOD = pod([of_template("small")], "gpu")


@pytest.mark.parametrize(
    "content",
    [
        {"kind": "Pod", **GOOD},
        {"kind": "Deployment", "spec": {"replicas": 2, "template": GOOD}},
        {"kind": "CronJob", "spec": {"jobTemplate": {"spec": {"template": GOOD}}}},
        {"kind": "RayCluster", "spec": {"workerGroupSpecs": [{"groupName": "gpu", "template": GOOD}]}},
        {"kind": "Service", "spec": {"ports": [{"port": 80}]}},
        {"kind": "ClusterPolicy", "apiVersion": "kyverno.io/v1", "spec": {"rules": [pod([], "gpu")]}},
    ],
    ids=lambda content: content["kind"],
)
def test_pods_that_have_their_claims_are_fine_in_objects_of_any_kind(content: Object) -> None:
    assert said(TEMPLATE, content) == []


@pytest.mark.parametrize(
    ("template", "path", "message"),
    [
        (
            pod([of_template("smal")], "gpu"),
            "resourceClaims[0].resourceClaimTemplateName",
            "no such ResourceClaimTemplate in these files; did you mean small?",
        ),
        (
            pod([{"name": "gpu", "resourceClaimName": "small"}], "gpu"),
            "resourceClaims[0].resourceClaimName",
            "this is a ResourceClaimTemplate: write resourceClaimTemplateName",
        ),
        (
            pod([of_template("shared")], "gpu"),
            "resourceClaims[0].resourceClaimTemplateName",
            "this is a ResourceClaim: write resourceClaimName",
        ),
        (
            pod([{**of_template("small"), "resourceClaimName": "shared"}], "gpu"),
            "resourceClaims[0]",
            "must have one of resourceClaimName and resourceClaimTemplateName, not both",
        ),
        (
            pod([of_template("small")]),
            "resourceClaims[0].name",
            "no container has it under resources.claims: its devices are allocated, and nobody can use them",
        ),
        (
            pod([], "gpu"),
            "containers[0].resources.claims[0].name",
            "the pod has no such claim; spec.template.spec.resourceClaims has none",
        ),
    ],
)
def test_what_keeps_a_pod_from_its_devices_is_named_with_its_place(template: Object, path: str, message: str) -> None:
    job = {"kind": "Job", "spec": {"template": template}}
    assert said(TEMPLATE, CLAIM, job) == [(f"spec.template.spec.{path}", message)]


def test_a_container_that_uses_another_name_is_told_which_there_are() -> None:
    (path, message), unused = said(TEMPLATE, {"kind": "Pod", **pod([of_template("small")], "gpus")})
    assert path == "spec.containers[0].resources.claims[0].name"
    assert message == "the pod has no such claim; accepted: gpu; did you mean gpu?"
    assert unused[0] == "spec.resourceClaims[0].name"


def test_a_number_of_pods_that_no_controller_accepts_is_named() -> None:
    deployment = {"kind": "Deployment", "spec": {"replicas": "2", "template": GOOD}}
    assert said(TEMPLATE, deployment) == [("spec.replicas", "must be a whole number of at least 0")]


def run(*objects: Object) -> Result:
    return CliRunner().invoke(main, ["lint", "-"], input=yaml.safe_dump_all(objects))


def test_the_command_says_how_many_objects_it_checked_and_what_it_skipped() -> None:
    claims = {"spec": {"spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu-dev"}}]}}}}
    others = [{"kind": "Service"}, {"kind": "ConfigMap"}, {"kind": "Service"}]
    ran = run({**TEMPLATE, **claims}, {"kind": "Pod", "apiVersion": "v1", **GOOD}, *others)
    assert (ran.exit_code, ran.output) == (0, "2 objects checked, 3 skipped (2 Service, ConfigMap), nothing found\n")


def of_claim(device_class: str, expression: str = "", **devices: Any) -> list[tuple[str, str]]:
    selectors = [{"cel": {"expression": expression}}] if expression else []
    exactly = {"deviceClassName": device_class, "selectors": selectors}
    spec = {"devices": {"requests": [{"name": "r", "exactly": exactly}], **devices}}
    findings = lint([Document("f", 1, {**CLAIM, "spec": spec})], chart_classes(DRIVER), DRIVER)
    return [(finding.path.removeprefix("spec.devices."), finding.message) for finding in findings]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gpu.nvidia.com", "it is a class of NVIDIA's DRA driver: write gpu-training, a full GPU"),
        ("mig.nvidia.com", "write gpu-inference, any partition"),
        ("vfio.gpu.nvidia.com", "for devices that Tessera does not have"),
    ],
)
def test_a_class_of_nvidias_driver_is_translated(name: str, part: str) -> None:
    [(path, message)] = of_claim(name)
    assert path == "requests[0].exactly.deviceClassName"
    assert part in message


def test_the_domain_of_nvidias_driver_is_translated_wherever_it_stands() -> None:
    issues = of_claim(
        "gpu-training",
        'device.attributes["gpu.nvidia.com"].productName.startsWith("NVIDIA H100")',
        constraints=[{"matchAttribute": "gpu.nvidia.com/parentUUID"}],
        config=[{"opaque": {"driver": "gpu.nvidia.com", "parameters": {}}}],
    )
    by_path = dict(issues)
    for path in ("requests[0].exactly.selectors[0].cel.expression", "constraints[0].matchAttribute"):
        assert "write gpu.tessera.dev; type, productName" in by_path[path]
    assert "its driver is gpu.tessera.dev" in by_path["config[0].opaque.driver"]


@pytest.mark.parametrize(
    ("resource", "device_class"),
    [
        ("nvidia.com/gpu", "gpu-training"),
        ("nvidia.com/mig-1g.10gb", "gpu-inference-1g-10gb"),
        ("nvidia.com/gpu.shared", "gpu-dev"),
    ],
)
def test_a_resource_of_the_device_plugin_is_translated_unless_a_class_provides_it(
    resource: str, device_class: str
) -> None:
    content = {"kind": "Pod", "spec": {"containers": [{"resources": {"limits": {resource: 1}}}]}}
    [(path, message)] = said(content)
    assert path == "spec.containers[0].resources.limits"
    assert f"write a claim of class {device_class}, or give a class that name" in message
    assert said({"kind": "DeviceClass", "spec": {"extendedResourceName": resource}}, content) == []


@pytest.mark.long
def test_an_object_that_contains_itself_or_multiplies_is_looked_at_for_a_bounded_time() -> None:
    cyclic = yaml.safe_load("{kind: Job, spec: &a {x: *a, y: *a}}")
    levels = "".join(f"l{i}: &l{i} [*l{i - 1}, *l{i - 1}]\n" for i in range(1, 40))
    bomb = {"kind": "Job", "spec": yaml.safe_load(f"l0: &l0 [x]\n{levels}")}
    assert said(cyclic, bomb) == []
