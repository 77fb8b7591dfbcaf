"""What ServiceAccounts may do, as the API server knows it: some time after a role or a binding was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for

REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
KNOWN_S = 60.0

Object = Mapping[str, Any]


def may(cluster: Cluster, account: str, verb: str, resource: str, **where: str) -> bool:
    """Whether the ServiceAccount ``namespace:name`` may do that.

    ``resource`` is a plural, with its subresource after a slash; ``where`` may have group, namespace and name.
    """
    plural, _, subresource = resource.partition("/")
    attributes = {"verb": verb, "resource": plural, "subresource": subresource, **where}
    body = {"spec": {"user": f"system:serviceaccount:{account}", "resourceAttributes": attributes}}
    return bool(cluster.api.post(REVIEWS, body)["status"].get("allowed"))


def wait_granted(cluster: Cluster, objects: Iterable[Object]) -> None:
    """Wait until the API server knows the new roles among ``objects`` that their bindings give to ServiceAccounts."""
    found = list(objects)
    roles = {(each["kind"], each["metadata"]["name"]): each for each in found if each["kind"].endswith("Role")}
    for binding in (each for each in found if each["kind"].endswith("RoleBinding")):
        rule = roles[binding["roleRef"]["kind"], binding["roleRef"]["name"]]["rules"][-1]  # it learns all at once
        verb, resource = rule["verbs"][0], rule["resources"][0]
        where = {"group": rule["apiGroups"][0], "namespace": binding["metadata"].get("namespace", "")}
        where["name"] = rule.get("resourceNames", [""])[0]
        for subject in binding["subjects"]:
            account = f"{subject['namespace']}:{subject['name']}"
            known = partial(may, cluster, account, verb, resource, **where)
            wait_for(known, KNOWN_S, f"the API server lets {account} {verb} {resource}")
