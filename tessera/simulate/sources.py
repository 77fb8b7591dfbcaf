"""What a simulation begins with: nodes that do not exist, the cluster as it is, and changes to it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from controller.cluster.claim_index import ClaimIndex
from controller.cluster.fleet import Fleet, FleetGpu
from controller.cluster.node_views import NodeView
from controller.curation.offer_mode import decide_offer_mode
from controller.demand.node_eligibility import CORDONED as NODE_CORDONED
from controller.demand.pending_claims import fleet_without
from controller.eviction.gpu_policy import GpuPolicy, parse_policy
from controller.report.cluster_view import ClusterView, unreported_nodes
from deviceclasses.lint.admission_policies import AdmissionPolicy, chart_policies
from deviceclasses.lint.documents import Document, read_documents
from driver.errors import ApiError, FatalError, UsageError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import RESOURCE_GROUP, list_claims, minor_version, read_all
from driver.kube.kubeconfig import DEFAULT_NAMESPACE
from driver.kube.slice_types import DetailedSlice
from driver.kube.types import ClaimSpec, ClaimTemplate, Key, Metadata, Node
from driver.model.plan import PlanMode
from driver.model.reported_gpus import FaultKind, GpuReport
from driver.slices.publisher import SLICES
from kubelet_plugin.inventory.published_devices import PublishPolicy
from tessera.gpu_sources import MAX_NODES, anonymous, hardware
from tessera.simulate.imagined_cluster import ClusterContent
from tessera.simulate.workloads import PriorityClass

GPU = re.compile(r"(?P<node>[^/]+)(?:/gpu-(?P<number>[0-9]+))?")

POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"

PRIORITY_CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"

MAX_DIGITS = 12
"""Digits of a number of nodes that are read."""


def simulated(text: str, **flags: str | None) -> ClusterContent:
    """Nodes as ``dgx-h100=4,FILE`` names them, all idle; ``flags`` are those of ``tessera node``.

    Raises UsageError and HardwareError.
    """
    gpus: list[FleetGpu] = []
    nodes: list[Node] = []
    named: Counter[str] = Counter()
    for entry in text.split(","):
        source, _, written = entry.strip().partition("=")
        if not source or (written and not written.isdecimal()):
            raise UsageError(f"--nodes {text}: {entry.strip()!r} is not NAME, NAME=COUNT or FILE=COUNT, as dgx-h100=4")
        reports, stem = hardware(gpus=f"sim:{source}", **flags), Path(source).stem
        count = int(written or 1) if len(written) <= MAX_DIGITS else MAX_NODES + 1
        if len(nodes) + count > MAX_NODES:
            raise UsageError(
                f"--nodes {source}={written[:MAX_DIGITS]}: all simulated nodes together are at most {MAX_NODES}"
            )
        for _ in range(count):
            named[stem] += 1
            name = f"{stem}-{named[stem]}"
            labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
            nodes.append(Node(Metadata(name, labels=labels)))
            gpus += [_idle(name, anonymous(report, name)) for report in reports]
    return ClusterContent(Fleet.of(gpus), tuple(nodes))


def _idle(node: str, report: GpuReport) -> FleetGpu:
    shares, only = report.shares, report.shares_only
    return FleetGpu(node, report.gpu, report.number, shares=shares, shares_only=only, shared=report.shared)


def of_cluster(client: KubeClient, view: ClusterView, driver: str) -> ClusterContent:
    """The cluster as it is. Raises ApiError and FatalError."""
    try:
        slices = tuple(read_all(client, SLICES, DetailedSlice, {"fieldSelector": f"spec.driver!={driver}"}))
        nodes = tuple(read_all(client, "/api/v1/nodes", Node))
        version = minor_version(client.get_object("/version"))
    except msgspec.MsgspecError as error:
        raise FatalError(f"an object of the cluster can't be read: {error}") from error
    cluster = view.snapshot.cluster
    policies = {node.name: _policy(node, view) for node in view.snapshot.views}
    return ClusterContent(
        fleet=view.fleet,
        nodes=nodes,
        classes={device_class.metadata.name: device_class for device_class in cluster.classes},
        claims=tuple(list_claims(client)),
        slices=slices,
        policies={name: policy for name, policy in policies.items() if policy is not None},
        mode=decide_offer_mode("auto", version, view.snapshot.views).mode,
        rules=cluster.taint_rules,
        templates=cluster.templates,
        offers=frozenset(view.devices.offered),
        unreported=replace(unreported_nodes(view.snapshot, view.clock), may_report=False),
    )


def _policy(node: NodeView, view: ClusterView) -> PublishPolicy | None:
    """What a node publishes that does not follow its plan; None for the others."""
    if node.is_complete:
        return PublishPolicy(complete=True)
    if node.follows_plan:
        return None
    if node.status.mode is PlanMode.STANDALONE:
        return PublishPolicy()
    offers = (offer for offer in view.devices.offered if view.fleet.gpus[offer.gpu].node == node.name)
    return PublishPolicy(offers=frozenset(offers), closing=True)


def joined(one: ClusterContent, other: ClusterContent) -> ClusterContent:
    """Both contents in one cluster; the second adds nodes and their GPUs."""
    fleet = Fleet.of([*one.fleet, *other.fleet])
    return replace(one, fleet=fleet, nodes=(*one.nodes, *other.nodes), offers=None)


def without(content: ClusterContent, claim: str, driver: str) -> ClusterContent:
    """The cluster without ``namespace/name``. Raises UsageError if there is no such claim."""
    namespace, _, name = claim.rpartition("/")
    key = Key(namespace or DEFAULT_NAMESPACE, name)
    claims = tuple(other for other in content.claims if other.metadata.key != key)
    if len(claims) == len(content.claims):
        raise UsageError(f"--without {claim}: there is no ResourceClaim {key}; write NAMESPACE/NAME")
    fleet = fleet_without(content.fleet, frozenset({str(key)}), ClaimIndex(driver, content.claims), driver)
    return replace(content, claims=claims, fleet=fleet)


def uncordoned(content: ClusterContent, target: str) -> ClusterContent:
    """The cluster after ``NODE`` or ``NODE/gpu-N`` is uncordoned. Raises UsageError if there is nothing to uncordon."""
    names = GPU.fullmatch(target)
    node = next((candidate for candidate in content.nodes if names and candidate.metadata.name == names["node"]), None)
    if names is None or node is None:
        raise UsageError(f"--uncordon {target}: there is no such node; write NODE or NODE/gpu-N")
    number = None if names["number"] is None else int(names["number"])
    chosen = [gpu for gpu in content.fleet.nodes.get(names["node"], ()) if number in (None, gpu.number)]
    cordoned = {gpu.gpu.uuid for gpu in chosen if gpu.fault_kind is FaultKind.CORDONED}
    reopened = number is None and node.spec.unschedulable
    if not cordoned and not reopened:
        raise UsageError(f"--uncordon {target}: it is not cordoned")

    def changed(entry: FleetGpu) -> FleetGpu:
        usable = replace(entry, fault=None, fault_kind=None) if entry.gpu.uuid in cordoned else entry
        return replace(usable, why_no_offers="") if reopened and entry.node == names["node"] else usable

    taints = tuple(taint for taint in node.spec.taints if not reopened or taint.key != NODE_CORDONED.key)
    spec = msgspec.structs.replace(node.spec, unschedulable=node.spec.unschedulable and not reopened, taints=taints)
    nodes = tuple(Node(other.metadata, spec, other.status) if other is node else other for other in content.nodes)
    return replace(content, nodes=nodes, fleet=Fleet.of(map(changed, content.fleet)))


def cluster_policies(client: KubeClient, driver: str) -> tuple[AdmissionPolicy, ...]:
    """The chart's admission policies with the values of the cluster; with the default values if it can't be read."""
    default = chart_policies(driver)
    try:
        manifests = [*read_all(client, POLICIES, dict[str, Any])]
    except ApiError:
        return default
    names = {policy.name for policy in default}
    return tuple(AdmissionPolicy(manifest) for manifest in manifests if manifest["metadata"]["name"] in names)


def documents_of(paths: Sequence[str], option: str = "") -> Iterator[Document]:
    """The documents of files. Raises UsageError if one can't be read; ``option`` begins it."""
    for path in paths:
        for part in read_documents(path):
            if not isinstance(part, Document):
                raise UsageError(f"{option}{part.file}: {part.path}: {part.message}")
            yield part


def policies_of_files(paths: Sequence[str]) -> Iterator[GpuPolicy]:
    """The policies of the option ``--policy``. Raises UsageError."""
    for document in documents_of(paths, "--policy "):
        yield parse_policy(document.content, f"--policy {document.file}, document {document.number}")


def priority_classes(client: KubeClient | None) -> dict[str, PriorityClass]:
    """The PriorityClasses of the cluster by name; none without one. Raises ApiError."""
    classes = read_all(client, PRIORITY_CLASSES, PriorityClass) if client is not None else ()
    return {item.metadata.name: item for item in classes}


def find_template(client: KubeClient, key: Key) -> ClaimSpec | None:
    """The claim spec of a ResourceClaimTemplate of the cluster; None if it does not exist. Raises ApiError."""
    path = f"{RESOURCE_GROUP}/namespaces/{key.namespace}/resourceclaimtemplates/{key.name}"
    template = client.find(path)
    try:
        return None if template is None else msgspec.convert(template, ClaimTemplate).spec.spec
    except msgspec.MsgspecError as error:
        raise FatalError(f"ResourceClaimTemplate {key} can't be read: {error}") from error
