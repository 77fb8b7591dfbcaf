"""Gangs: a PodGroup of scheduling.k8s.io, its pods, and a claim for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.harness.images import BUSYBOX_IMAGE
from tests.harness.versions import REFERENCE, default_release
from tests.support.workloads import NAMESPACE

POD_GROUPS = f"/apis/scheduling.k8s.io/v1beta1/namespaces/{NAMESPACE}/podgroups"

SERVED = default_release() is REFERENCE
"""Whether the release of the cluster tests serves PodGroups of v1beta1: those before 1.37 do not."""

GATE = "--feature-gates=GenericWorkload=true,DRAWorkloadResourceClaims=true"
GANGS: Mapping[str, list[str]] = {
    "kube-apiserver": [GATE, "--runtime-config=scheduling.k8s.io/v1beta1=true"],
    "kube-scheduler": [GATE],
    "kube-controller-manager": [GATE],
}
"""Flags with which Kubernetes 1.37 serves PodGroups, schedules them all or none, and gives them claims."""

Body = dict[str, Any]


def members(gang: str, pods: int) -> list[str]:
    """The names of a gang's pods, and of their claims."""
    return [f"{gang}-{number}" for number in range(pods)]


def gang_of(
    gang: str, pods: int, gpus_per_pod: int = 1, min_count: int | None = None
) -> tuple[Body, list[Body], list[Body]]:
    """A PodGroup, the claims of its pods, and the pods. ``min_count``: by default all pods."""
    policy = {"gang": {"minCount": pods if min_count is None else min_count}}
    group = {"metadata": {"name": gang}, "spec": {"schedulingPolicy": policy}}
    names = members(gang, pods)
    return group, [_claim(name, gpus_per_pod) for name in names], [_pod(name, gang) for name in names]


def gang_with_one_claim(gang: str, pods: int, gpus: int) -> tuple[Body, Body, list[Body]]:
    """A PodGroup, the template of its only claim, which all of its pods share, and the pods."""
    shared = {"name": "gpu", "resourceClaimTemplateName": gang}
    spec = {"schedulingPolicy": {"gang": {"minCount": pods}}, "resourceClaims": [shared]}
    bodies = [_pod(name, gang) for name in members(gang, pods)]
    for body in bodies:
        body["spec"]["resourceClaims"] = [shared]
    template = {"metadata": {"name": gang}, "spec": {"spec": _claim(gang, gpus)["spec"]}}
    return {"metadata": {"name": gang}, "spec": spec}, template, bodies


def _claim(name: str, gpus: int) -> Body:
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu-training", "count": gpus}}
    return {"metadata": {"name": name}, "spec": {"devices": {"requests": [request]}}}


def _pod(name: str, gang: str) -> Body:
    spec = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "schedulingGroup": {"podGroupName": gang},
        "containers": [{"name": "main", "image": BUSYBOX_IMAGE, "resources": {"claims": [{"name": "gpu"}]}}],
        "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
    }
    return {"metadata": {"name": name}, "spec": spec}
