"""The examples in deploy/examples/queues, and the paths at which the API server takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from driver.kube.client import KubeClient
from tests.support.workloads import NAMESPACE, PROJECT

FOLDER = PROJECT / "deploy" / "examples" / "queues"
CLUSTER_SCOPED = {"ResourceFlavor", "Cohort", "ClusterQueue", "WorkloadPriorityClass"}
STRICT = {"fieldValidation": "Strict"}
PLURALS = {"WorkloadPriorityClass": "workloadpriorityclasses"}


def example(name: str) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())


def collection(content: dict[str, Any], namespace: str = NAMESPACE) -> str:
    """The path of the objects of this kind, in ``namespace`` if they have one."""
    version, kind = content["apiVersion"], content["kind"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    scope = "" if kind in CLUSTER_SCOPED else f"/namespaces/{namespace}"
    return f"{root}{scope}/{PLURALS.get(kind, f'{kind.lower()}s')}"


def apply(client: KubeClient, name: str) -> None:
    """Create the objects of an example; unknown fields are refused."""
    for content in example(name):
        client.create(collection(content), content, STRICT)
