"""Classes and claims as people write them, and what lint finds in them."""

from __future__ import annotations

from typing import Any

from deviceclasses.chart_classes import chart_classes
from deviceclasses.lint.class_and_claim_rules import lint
from deviceclasses.lint.documents import Document
from deviceclasses.lint.findings import Finding

DRIVER = "gpu.tessera.dev"
SHARE = 'device.driver == "gpu.tessera.dev" && device.attributes["gpu.tessera.dev"].type == "share"'
OURS = 'device.driver == "gpu.tessera.dev"'
TYPE = 'device.attributes["gpu.tessera.dev"].type'
OF_ANY_TYPE = f'{OURS} && {TYPE} != "monitor"'
APART = {"distinctAttribute": "gpu.tessera.dev/parentUUID"}


def opaque(kind: str, driver: str = DRIVER, **more: Any) -> dict[str, Any]:
    return {"opaque": {"driver": driver, "parameters": {"apiVersion": f"{DRIVER}/v1alpha1", "kind": kind, **more}}}


def device_class(name: str, *selectors: str, config: Any = ()) -> dict[str, Any]:
    cel = [{"cel": {"expression": expression}} for expression in selectors]
    spec = {"selectors": cel, "config": list(config)}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": name}, "spec": spec}


def request(name: str = "gpu", device_class: str = "gpu-training", **more: Any) -> dict[str, Any]:
    return {"name": name, "exactly": {"deviceClassName": device_class, **more}}


def claim(*requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    devices = {"requests": list(requests), **more}
    metadata = {"name": "work", "namespace": "team"}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": metadata,
        "spec": {"devices": devices},
    }


def findings(*contents: object) -> list[Finding]:
    documents = [Document("file.yaml", number, content) for number, content in enumerate(contents, 1)]
    return [*lint(documents, CLASSES, DRIVER)]


def found(*contents: object) -> list[tuple[str, str, str]]:
    return [(finding.path, finding.value, finding.message) for finding in findings(*contents)]


CLASSES = [*chart_classes(), device_class("team-shares", SHARE, config=[opaque("ShareConfig")])]


def request_for(class_name: str, *selectors: str, **more: Any) -> dict[str, Any]:
    cel = [{"cel": {"expression": expression}} for expression in selectors]
    return request(device_class=class_name, selectors=cel, **more)
