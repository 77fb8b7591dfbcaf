"""Pods and claims on a real cluster, written short."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from driver.errors import ApiError
from tests.harness.cluster import Cluster
from tests.harness.images import BUSYBOX_IMAGE
from tests.harness.waiting import wait_for

PROJECT = Path(__file__).parents[2]
NAMESPACE = "default"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
CLAIMS = f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims"
TEMPLATES = f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaimtemplates"
RUNNING_S = 120.0
"""The node authorizer may refuse the kubelet's first read of a fresh claim; the retry takes up to a minute."""

SLEEP = "trap exit TERM; sleep 100000 & wait"


def request(device_class: str, name: str = "gpu", selector: str = "") -> dict[str, Any]:
    """One device request of a claim; ``selector`` is CEL."""
    exactly: dict[str, Any] = {"deviceClassName": device_class}
    if selector:
        exactly["selectors"] = [{"cel": {"expression": selector}}]
    return {"name": name, "exactly": exactly}


def reported_of(cluster: Cluster, name: str) -> str:
    """The messages of the controller's Events about an object in NAMESPACE."""
    events = cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/events")["items"]
    about = [event for event in events if event["involvedObject"].get("name") == name]
    return " ".join(
        event["message"] for event in about if event.get("source", {}).get("component") == "tessera-controller"
    )


def definition(kind: str, api_version: str) -> dict[str, Any]:
    """A CustomResourceDefinition that accepts every field, in place of the one of another project."""
    group, version = api_version.split("/")
    plural = f"{kind.lower()}s"
    any_fields = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    served = {"name": version, "served": True, "storage": True, "subresources": {"status": {}}, "schema": any_fields}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, a part for a test"},
        },
        "spec": {
            "group": group,
            "names": {"kind": kind, "plural": plural, "listKind": f"{kind}List"},
            "scope": "Namespaced",
            "versions": [served],
        },
    }


def is_gone(cluster: Cluster, path: str) -> bool:
    """Whether there is no such object."""
    try:
        cluster.api.get(path)
    except ApiError as error:
        if error.status == 404:
            return True
        raise
    return False


def wait_default_account(cluster: Cluster, namespace: str) -> None:
    """Wait until the namespace has its default ServiceAccount, without which no pod is admitted there."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    wait_for(lambda: cluster.api.get(path), RUNNING_S, f"the default ServiceAccount of {namespace}")


def bound_pod(cluster: Cluster, name: str, node: str, claim: str, *, owned: bool) -> str:
    """A pod on a node without a kubelet, where it waits for ``claim``; gives its UID.

    ``owned``: something that exists, a ConfigMap, calls itself the controller of the pod.
    """
    owners = []
    if owned:
        owner = cluster.api.post(f"/api/v1/namespaces/{NAMESPACE}/configmaps", {"metadata": {"name": name}})
        identity = {"name": name, "uid": owner["metadata"]["uid"]}
        owners = [{"apiVersion": "v1", "kind": "ConfigMap", **identity, "controller": True}]
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}
    claims = [{"name": "gpu", "resourceClaimName": claim}]
    spec = {"nodeName": node, "containers": [container], "resourceClaims": claims}
    pod = cluster.api.post(PODS, {"metadata": {"name": name, "ownerReferences": owners}, "spec": spec})

    def is_reserved() -> bool:
        users = cluster.api.get(f"{CLAIMS}/{claim}")["status"].get("reservedFor", ())
        return pod["metadata"]["uid"] in {each["uid"] for each in users}

    wait_for(is_reserved, RUNNING_S, f"claim {claim} is reserved for pod {name}")
    return str(pod["metadata"]["uid"])


class Workloads:
    """What one test creates in a namespace. Names are the test's own; ``delete_all`` removes what is left."""

    def __init__(self, cluster: Cluster, namespace: str = NAMESPACE) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self._pods_path, self._claims_path, self._templates_path = (
            path.replace(f"/{NAMESPACE}/", f"/{namespace}/") for path in (PODS, CLAIMS, TEMPLATES)
        )
        self.pods: list[str] = []
        self._claims: list[str] = []
        self._templates: list[str] = []

    def claim(self, name: str, *requests: Mapping[str, Any]) -> str:
        body = {"metadata": {"name": name}, "spec": {"devices": {"requests": list(requests)}}}
        self.cluster.api.post(self._claims_path, body)
        self._claims.append(name)
        return name

    def template(self, name: str, *requests: Mapping[str, Any]) -> str:
        body = {"metadata": {"name": name}, "spec": {"spec": {"devices": {"requests": list(requests)}}}}
        self.cluster.api.post(self._templates_path, body)
        self._templates.append(name)
        return name

    def pod(
        self, name: str, *claims: str, template: str | None = None, script: str = SLEEP, image: str | None = None
    ) -> str:
        """A pod that uses every claim, and runs until it is deleted unless its shell ``script`` ends.

        ``image``: one whose own program runs instead of ``script``.
        """
        sources: list[dict[str, str]] = [{"name": claim, "resourceClaimName": claim} for claim in claims]
        if template is not None:
            sources.append({"name": template, "resourceClaimTemplateName": template})
        container = {
            "name": "main",
            "image": image or BUSYBOX_IMAGE,
            "imagePullPolicy": "Never",
            "command": None if image else ["sh", "-c", script],
            "resources": {"claims": [{"name": source["name"]} for source in sources]},
        }
        spec = {
            "hostNetwork": True,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 5,
            "containers": [container],
            "resourceClaims": sources,
        }
        self.cluster.api.post(self._pods_path, {"metadata": {"name": name}, "spec": spec})
        self.pods.append(name)
        return name

    def running(self, *pods: str) -> None:
        """Wait until they run."""
        for pod in pods:
            self.cluster.wait_pod(pod, namespace=self.namespace, deadline_s=RUNNING_S)

    def allocated(self, claim: str) -> list[str]:
        """The devices the scheduler gave the claim; empty before it did."""
        status = self.cluster.api.get(f"{self._claims_path}/{claim}").get("status", {})
        return [result["device"] for result in status.get("allocation", {}).get("devices", {}).get("results", ())]

    def pod_claims(self, pod: str) -> list[str]:
        """Names of the claims a pod uses, generated ones included."""
        status = self.cluster.api.get(f"{self._pods_path}/{pod}")["status"]
        return [entry["resourceClaimName"] for entry in status.get("resourceClaimStatuses", ())]

    def why_waiting(self, pod: str) -> str:
        """The scheduler's reason for a pod it can't place; empty while there is none."""
        for condition in self.cluster.api.get(f"{self._pods_path}/{pod}")["status"].get("conditions", ()):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return str(condition.get("message", ""))
        return ""

    def node(self, pod: str) -> str:
        """The node of a pod; empty before the scheduler has placed it."""
        return str(self.cluster.api.get(f"{self._pods_path}/{pod}")["spec"].get("nodeName", ""))

    def delete_pods(self, *pods: str) -> None:
        """Delete them and wait until they are gone, which is after their claims were unprepared."""
        self.end_pods(*pods)
        for pod in pods:
            self.cluster.wait_pod_gone(pod, self.namespace)

    def end_pods(self, *pods: str) -> None:
        """Delete them and wait for nothing."""
        for pod in pods:
            self._delete(f"{self._pods_path}/{pod}")

    def delete_claims(self, *claims: str) -> None:
        for claim in claims:
            self._delete(f"{self._claims_path}/{claim}")

    def delete_all(self) -> None:
        for path in self._paths():
            self._delete(path)

    def wait_until_gone(self) -> None:
        for path in self._paths():
            wait_for(lambda path=path: is_gone(self.cluster, path), RUNNING_S, f"{path} gone")  # type: ignore[misc]

    def exec(self, pod: str, *command: str) -> str:
        """What the command prints inside the pod's container, on whichever node it runs."""
        return self.cluster.node(self.node(pod)).exec(self.namespace, pod, command)

    def _paths(self) -> Iterable[str]:
        yield from (f"{self._pods_path}/{pod}" for pod in self.pods)
        yield from (f"{self._claims_path}/{claim}" for claim in self._claims)
        yield from (f"{self._templates_path}/{template}" for template in self._templates)

    def _delete(self, path: str) -> None:
        try:
            self.cluster.api.request("DELETE", path)
        except ApiError as error:
            if error.status != 404:
                raise
