"""Kueue's Configuration, queues, and what waits in them, written short."""

from __future__ import annotations

from typing import Any

from tests.support.linting import DRIVER, OURS

Body = dict[str, Any]
API = "kueue.x-k8s.io/v1beta2"
CAPACITY_GATE = {"KueueDRAIntegrationConsumableCapacity": True}


def source(kind: str, name: str, selector: str = OURS, driver: str = DRIVER) -> Body:
    return {kind: {"name": name, "driver": driver, "deviceSelector": {"cel": {"expression": selector}}}}


def mapping(name: str, *classes: str, **more: Any) -> Body:
    return {"name": name, "deviceClassNames": list(classes), **more}


def configuration(*mappings: Body, gates: dict[str, bool] | None = None) -> Body:
    more = {"featureGates": gates} if gates is not None else {}
    content = {"apiVersion": f"config.{API}", "kind": "Configuration", **more}
    return {**content, "resources": {"deviceClassMappings": list(mappings)}}


def cluster_queue(name: str, flavor: str = "nodes", **quota: int) -> Body:
    resources = [{"name": each, "nominalQuota": most} for each, most in quota.items()]
    group = {"coveredResources": list(quota), "flavors": [{"name": flavor, "resources": resources}]}
    return {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": {"resourceGroups": [group]}}


def local_queue(name: str, queue: str) -> Body:
    return {"apiVersion": API, "kind": "LocalQueue", "metadata": {"name": name}, "spec": {"clusterQueue": queue}}


def template(name: str, *requests: Body) -> Body:
    spec = {"spec": {"devices": {"requests": list(requests)}}}
    kind = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate"}
    return {**kind, "metadata": {"name": name}, "spec": spec}


def job(template: str | None, queue: str = "", **container: Any) -> Body:
    """A Job whose pods have a claim by ``template``."""
    claims = [{"name": "gpu", "resourceClaimTemplateName": template}] if template else []
    pod = {"containers": [{"name": "main", **container}], "resourceClaims": claims}
    labels = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    metadata = {"name": "work", "labels": labels}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"template": {"spec": pod}}}
