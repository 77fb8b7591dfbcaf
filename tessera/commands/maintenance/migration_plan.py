"""What the move of a node from NVIDIA's drivers to Tessera means: what has to end, and which objects have to change."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import click

from deviceclasses.chart_classes import chart_classes
from deviceclasses.lint.class_and_claim_rules import lint
from deviceclasses.lint.documents import DRA_VERSION, Document
from deviceclasses.lint.nvidia_driver import CLASSES, class_for_resource
from driver.config.flag_values import NVIDIA_DRIVER
from driver.kube.client import KubeClient, Object
from driver.kube.get_and_list import RESOURCE_GROUP, read_all
from driver.kube.types import Claim, Pod
from tessera.commands.maintenance.migrating_node import DRIVERS, HERE, MONITORS, MigratingNode
from tessera.status.processes import OWN_LABEL
from tessera.tables_and_drawings import columns, printable

RELEASE, RELEASE_NAMESPACE = "meta.helm.sh/release-name", "meta.helm.sh/release-namespace"
MANAGED_BY = "app.kubernetes.io/managed-by"
FROM_TEMPLATE = "resource.kubernetes.io/pod-claim-name"
"""Annotation of a claim that was created from a template, which has to change in its place."""


@dataclass(frozen=True)
class PodOfPlugin:
    """A pod with GPUs of a device plugin, and the classes to request in place of its ``resources``."""

    pod: str
    owner: str
    resources: list[str]
    classes: list[str]


@dataclass(frozen=True)
class ClaimOfOther:
    """A claim with devices of NVIDIA's DRA driver. ``outcome``: Tessera adopts it, or it must end first."""

    claim: str
    devices: list[str]
    pods: list[str]
    outcome: str


@dataclass(frozen=True)
class ClassInUse:
    """A DeviceClass for devices of ``gpu.nvidia.com``. ``release`` installed it; ``instead`` is what to request."""

    name: str
    release: str
    resource: str
    instead: str


@dataclass(frozen=True)
class ObjectChange:
    """A field of an object that has to change, and what to write instead."""

    object: str
    path: str
    value: str
    message: str


@dataclass(frozen=True)
class MigrationPlan:
    """``labels`` are what the move sets on the Node, ``step`` how far it is."""

    node: str
    step: str
    labels: dict[str, str]
    pods: list[PodOfPlugin] = field(default_factory=list)
    claims: list[ClaimOfOther] = field(default_factory=list)
    classes: list[ClassInUse] = field(default_factory=list)
    changes: list[ObjectChange] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        labels = ", ".join(f"{name}={value}" for name, value in self.labels.items())
        parts = [f"node {self.node}: {self.step}; the move sets {labels}"]
        rows = [[pod.pod, pod.owner, ", ".join(pod.resources), ", ".join(pod.classes)] for pod in self.pods]
        header = ["POD", "OWNER", "RESOURCES", "REQUEST INSTEAD"]
        parts.append(_table("pods with GPUs of a device plugin: they must end first", header, rows))
        rows = [
            [claim.claim, ", ".join(claim.devices), ", ".join(claim.pods) or "-", claim.outcome]
            for claim in self.claims
        ]
        title = f"claims with devices of {NVIDIA_DRIVER}"
        parts.append(_table(title, ["CLAIM", "DEVICES", "PODS", "OUTCOME"], rows))
        rows = [[item.name, item.release, item.resource, item.instead] for item in self.classes]
        title = f"classes for devices of {NVIDIA_DRIVER}: each stays with its release until the last node has moved"
        parts.append(_table(title, ["CLASS", "RELEASE", "EXTENDED RESOURCE", "REQUEST INSTEAD"], rows))
        rows = [[change.object, change.path, change.value, change.message] for change in self.changes]
        title = "objects that have to change before their pods can get devices of Tessera"
        parts.append(_table(title, ["OBJECT", "PATH", "VALUE", "MESSAGE"], rows))
        return "\n\n".join(parts)


def _table(title: str, header: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return click.style(f"{title}: none", bold=True)
    return f"{click.style(title, bold=True)}\n{columns(header, [[printable(cell) for cell in row] for row in rows])}"


def read_plan(client: KubeClient, node: MigratingNode) -> MigrationPlan:
    """Raises ApiError, StateError, and UsageError if there is no such Node."""
    state, labels = node.state(), node.labels()
    classes = list(_objects(client, "DeviceClass", "deviceclasses"))
    reasons = {claim.metadata.uid: reason for claim, reason in node.must_end()}
    return MigrationPlan(
        node.name,
        "not moved" if state is None else state.step.value,
        {**{name: "false" for name in (*MONITORS, *DRIVERS) if name in labels}, OWN_LABEL: HERE},
        [_pod(pod, names) for pod, names in node.plugin_pods()],
        [_claim(claim, node.name, reasons.get(claim.metadata.uid)) for claim in node.claims(ours=False)],
        [_class(item) for item in classes if _is_for_nvidia(item)],
        list(_changes(client, node.driver, classes)),
    )


def _pod(pod: Pod, resources: list[str]) -> PodOfPlugin:
    owner = pod.controller
    names = [class_for_resource(name) for name in resources]
    return PodOfPlugin(str(pod.metadata.key), f"{owner.kind}/{owner.name}" if owner else "-", resources, names)


def _claim(claim: Claim, pool: str, reason: str | None) -> ClaimOfOther:
    devices = [result.device for result in claim.results_in(NVIDIA_DRIVER, (pool,))]
    outcome = "adopted" if reason is None else f"must end first: {reason}"
    if reason is None and any("-mig-" in device for device in devices):
        outcome += (
            ", and its partition removed at its end; one that an administrator made stays with existingPartitions"
        )
        outcome += "=publish for this node"
    return ClaimOfOther(str(claim.metadata.key), devices, [pod.name for pod in claim.pod_consumers], outcome)


def _class(item: Object) -> ClassInUse:
    metadata = item["metadata"]
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    release = "/".join(annotations[name] for name in (RELEASE_NAMESPACE, RELEASE) if name in annotations)
    owner = release or labels.get(MANAGED_BY, "-")
    return ClassInUse(
        metadata["name"], owner, item["spec"].get("extendedResourceName", "-"), CLASSES.get(metadata["name"], "-")
    )


def _is_for_nvidia(item: Mapping[str, Any]) -> bool:
    """Whether an object names NVIDIA's DRA driver or its classes; those of compute domains are not for GPUs."""
    text = json.dumps(item["spec"])
    return any(name in text for name in CLASSES)


def _changes(client: KubeClient, driver: str, classes: Sequence[Object]) -> Iterator[ObjectChange]:
    """What `tessera lint` says of the objects that name NVIDIA's driver: templates, claims of people, their classes.

    Under its driver name Tessera's devices are of NVIDIA's classes, too, as long as these exist.
    """
    ours = chart_classes(driver)
    names = {*CLASSES, *(item["metadata"]["name"] for item in ours)}
    others = [item for item in classes if item["metadata"]["name"] not in names]
    objects = [
        *others,
        *_objects(client, "ResourceClaimTemplate", "resourceclaimtemplates"),
        *(item for item in _objects(client, "ResourceClaim", "resourceclaims") if not _is_from_template(item)),
    ]
    documents = [Document("", 1, item) for item in objects if _is_for_nvidia(item)]
    for finding in lint(documents, [*ours, *(classes if driver == NVIDIA_DRIVER else others)], driver):
        yield ObjectChange(finding.object, finding.path, finding.value, finding.message)


def _objects(client: KubeClient, kind: str, plural: str) -> Iterator[Object]:
    for item in read_all(client, f"{RESOURCE_GROUP}/{plural}", Object):
        yield {"apiVersion": DRA_VERSION, "kind": kind, **item}


def _is_from_template(item: Object) -> bool:
    return FROM_TEMPLATE in (item["metadata"].get("annotations") or {})
