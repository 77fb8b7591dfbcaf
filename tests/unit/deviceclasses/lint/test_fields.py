"""``tessera lint``: findings about API versions that are not served and about unknown fields."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.linting import OF_ANY_TYPE, OURS, claim, device_class, found, opaque, request

SERVED = "Kubernetes serves resource.k8s.io/v1; other versions only if an administrator enables them"
FULL = {"deviceClassName": "gpu-training"}


def template(made: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**made, "kind": "ResourceClaimTemplate", "spec": {"spec": made["spec"], **more}}


@pytest.mark.parametrize("version", ["resource.k8s.io/v1beta1", "resource.k8s.io/v1beta2", "resource.k8s.io/v2"])
def test_a_version_that_is_not_served_is_found(version: str) -> None:
    for made in (claim(request()), template(claim(request())), device_class("x", OF_ANY_TYPE)):
        assert found({**made, "apiVersion": version}) == [("apiVersion", f'"{version}"', SERVED)]


@pytest.mark.parametrize("version", ["v1", "resource.k8.io/v1", "", None])
def test_a_version_of_another_group_is_found_by_the_kind(version: str | None) -> None:
    [(path, _, message)] = found({**claim(request()), "apiVersion": version})
    assert path == "apiVersion"
    assert "resource.k8s.io/v1" in message


def test_kinds_of_other_peoples_groups_are_passed_over() -> None:
    assert found({**claim(request(cuont=1)), "apiVersion": "example.com/v1"}) == []


def test_what_the_first_versions_had_in_the_request_itself_is_told_with_its_place() -> None:
    made = claim({"name": "gpu", **FULL, "count": 2})
    there = "no such field here; it belongs under exactly or firstAvailable"
    assert found({**made, "apiVersion": "resource.k8s.io/v1beta1"}) == [
        ("apiVersion", '"resource.k8s.io/v1beta1"', SERVED),
        ("spec.devices.requests[0].deviceClassName", '"gpu-training"', there),
        ("spec.devices.requests[0].count", "2", there),
    ]


def test_a_field_beside_exactly_is_told_with_its_place() -> None:
    both = {**request(), **FULL}
    [(path, _, message)] = found(template(claim(both)))
    assert path == "spec.spec.devices.requests[0].deviceClassName"
    assert message == "no such field here; it belongs under exactly or firstAvailable"


@pytest.mark.parametrize(
    ("made", "path", "message"),
    [
        (claim(request(cuont=2)), "spec.devices.requests[0].exactly.cuont", "no such field; did you mean count?"),
        (
            claim({"name": "gpu", "firstAvailable": [{"name": "a", **FULL, "selector": []}]}),
            "spec.devices.requests[0].firstAvailable[0].selector",
            "no such field; did you mean selectors?",
        ),
        (
            claim({"name": "gpu", "firstAvailable": [{"name": "a", **FULL, "adminAcces": True}]}),
            "spec.devices.requests[0].firstAvailable[0].adminAcces",
            "no such field; accepted: name, deviceClassName, allocationMode, count, ",
        ),
        (claim(request(), constraint=[]), "spec.devices.constraint", "no such field; did you mean constraints?"),
        (
            claim(request(), constraints=[{"matchAtribute": "resource.kubernetes.io/pcieRoot"}]),
            "spec.devices.constraints[0].matchAtribute",
            "no such field; did you mean matchAttribute?",
        ),
        (
            {**claim(), "spec": {"requests": []}},
            "spec.requests",
            "no such field here; it belongs under devices",
        ),
        (
            {**device_class("x"), "spec": {"selectors": [{"expression": OURS}]}},
            "spec.selectors[0].expression",
            "no such field here; it belongs under cel",
        ),
        (
            device_class("x", config=[{**opaque("GpuConfig"), "requests": ["gpu"]}]),
            "spec.config[0].requests",
            "no such field; accepted: opaque",
        ),
        ({**device_class("x"), "metadata": {"nmae": "x"}}, "metadata.nmae", "no such field; did you mean name?"),
        ({**device_class("x"), "selectors": []}, "selectors", "no such field here; it belongs under spec"),
    ],
)
def test_a_field_that_there_is_not_is_found_with_the_nearest(made: dict[str, Any], path: str, message: str) -> None:
    [(there, _, said)] = found(made)
    assert there == path
    assert said.startswith(message)


def test_every_field_that_there_is_may_be_used() -> None:
    asked = {
        **FULL,
        "selectors": [{"cel": {"expression": OURS}}],
        "allocationMode": "ExactCount",
        "count": 2,
        "tolerations": [{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 3}],
        "capacity": {"requests": {"memory": "1Gi"}},
        "derivedAttributes": [{"name": "derived/numa", "expression": "1"}],
    }
    either = {"name": "either", "firstAvailable": [{"name": "a", **asked}]}
    made = claim({"name": "gpu", "exactly": {**asked, "adminAccess": False}}, either)
    made["metadata"] |= {"labels": {"any": "thing"}, "annotations": {}, "managedFields": [{"fieldsV1": {"f:spec": {}}}]}
    assert found({**made, "status": {"allocation": {"whatever": 1}}}) == []
    assert found(template(made, metadata={"labels": {"any": "thing"}})) == []
    named = device_class("x", OF_ANY_TYPE)
    named["spec"]["extendedResourceName"] = "nvidia.com/gpu"
    assert found(named) == []
