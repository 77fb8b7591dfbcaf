"""Features of Kubernetes that some tests need: whether the API server of a cluster keeps or serves them."""

from __future__ import annotations

from functools import cache, reduce
from operator import getitem
from typing import Any, NamedTuple

from driver.errors import ApiError
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.support.plugin import SLICES
from tests.support.workloads import PODS

GROUP = "/apis/resource.k8s.io/v1"
ABSENT, INVALID = 404, 422
Object = dict[str, Any]


class Probe(NamedTuple):
    """An object of a dry run, and the path in it to what the API server must keep."""

    resource: str
    spec: Object
    kept: tuple[str | int, ...]


def _slice(device: Object, **spec: Any) -> Object:
    pool = {"name": "probe", "generation": 1, "resourceSliceCount": 1}
    nodes = spec or {"allNodes": True}
    return {"driver": "example.com", "pool": pool, "devices": [{"name": "probe", **device}], **nodes}


_COUNTERS = {"consumesCounters": [{"counterSet": "set", "counters": {"memory": {"value": "1"}}}]}
_TAINT = {"key": "example.com/probe", "effect": "NoSchedule"}
_RULE = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
_MUTATING = {
    "matchConstraints": {"resourceRules": [_RULE]},
    "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": "[JSONPatch{op: 'remove', path: '/probe'}]"}}],
    "reinvocationPolicy": "Never",
}
_BY_DEVICE = {"perDeviceNodeSelection": True}

PROBES = {
    "shared counters": Probe(SLICES, _slice(_COUNTERS), ("devices", 0, "consumesCounters")),
    "nodes by device": Probe(SLICES, _slice({"allNodes": True}, **_BY_DEVICE), tuple(_BY_DEVICE)),
    "device taints": Probe(SLICES, _slice({"taints": [_TAINT]}), ("devices", 0, "taints")),
    "device taint rules": Probe(f"{GROUP}/devicetaintrules", {"taint": _TAINT}, ("taint",)),
    "consumable capacity": Probe(
        SLICES, _slice({"allowMultipleAllocations": True}), ("devices", 0, "allowMultipleAllocations")
    ),
    "extended resources": Probe(
        f"{GROUP}/deviceclasses", {"extendedResourceName": "example.com/probe"}, ("extendedResourceName",)
    ),
    "mutating policies": Probe(
        "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies", _MUTATING, ("reinvocationPolicy",)
    ),
}
"""By the name that a test has in its mark ``needs``.

consumable capacity: also the constraint ``distinctAttribute``, which the API server of 1.35 drops without it, and which
that of 1.34 keeps though its scheduler ignores it.
"""

RESOURCE_HEALTH = "resource health"
FEATURES = (*PROBES, RESOURCE_HEALTH)


@cache
def has(cluster: Cluster, feature: str) -> bool:
    """Whether the API server of a cluster has a feature of ``FEATURES``."""
    if feature == RESOURCE_HEALTH:
        return _keeps_health(cluster)
    resource, spec, kept = PROBES[feature]
    try:
        stored = cluster.api.post(f"{resource}?dryRun=All", {"metadata": {"name": "probe"}, "spec": spec})["spec"]
    except ApiError as error:
        if error.status in (ABSENT, INVALID):  # what is left without the field may be invalid
            return False
        raise
    try:
        reduce(getitem, kept, stored)
    except KeyError:
        return False
    return True


def _keeps_health(cluster: Cluster) -> bool:
    """Whether it keeps the health of devices in the status of a pod; the pod of the probe is never scheduled."""
    claims = [{"name": "gpu", "resourceClaimName": "probe"}]
    container = {"resources": {"claims": [{"name": "gpu"}]}}
    pod = busybox_pod("probe", container=container, resourceClaims=claims, schedulingGates=[{"name": "example.com/no"}])
    cluster.api.post(PODS, pod)
    try:
        [main] = pod["spec"]["containers"]
        health = [{"name": "claim:gpu", "resources": [{"resourceID": "example.com/gpu", "health": "Healthy"}]}]
        status = {"name": main["name"], "image": "", "imageID": "", "ready": False, "restartCount": 0}
        changed = {"status": {"containerStatuses": [{**status, "allocatedResourcesStatus": health}]}}
        stored = cluster.api.patch(f"{PODS}/probe/status?dryRun=All", changed)
        return "allocatedResourcesStatus" in stored["status"]["containerStatuses"][0]
    finally:
        cluster.api.request("DELETE", f"{PODS}/probe", {"gracePeriodSeconds": 0})
