"""``tessera template``: the Node and the ResourceSlices of a node that does not exist yet, for autoscalers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from driver.config.flag_values import SUBDOMAIN, check_driver_name
from driver.errors import EnvironmentFault, FatalError, UsageError
from driver.kube.client import KubeClient, Object
from driver.kube.types import GpuNodePlan, Metadata, Node, NodeStatus, Taint
from driver.model.gpu_settings import GpuSelection, GpuSharing
from driver.model.plan import COMPLETE, COUNTERS_FIELD, KIND, PATH, PUBLISH
from driver.model.reported_gpus import GpuReport, decode_inventory
from driver.model.shared_memory import MemoryLimit
from driver.slices.build import SliceBuilder, slice_object
from driver.slices.slice_names import Pool
from kubelet_plugin.inventory.inventory import Inventory
from kubelet_plugin.inventory.published_devices import PublishPolicy
from tessera.cluster_options import check_flag, client_of, with_driver_name, with_kubeconfig
from tessera.gpu_sources import anonymous, hardware
from tessera.tables_and_drawings import as_documents, with_output

DEFAULT_LABELS = "kubernetes.io/os=linux,kubernetes.io/arch=amd64"
DEFAULT_RESOURCES = "cpu=192,memory=2Ti,ephemeral-storage=1Ti,pods=110"

OWN_LABELS = (
    "kubernetes.io/hostname",
    "gpu.tessera.dev/fabric-clique",
    "nvidia.com/gpu.clique",
    "gpu.tessera.dev/simulated-fleet",
)
"""Labels that say which node it is, or where it is: a new node has others."""

PASSING_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/", "ToBeDeleted", "DeletionCandidate")
"""How the keys of taints begin that say what happens to a node at present."""

CAPACITY_PREFIX = "capacity.cluster-autoscaler.kubernetes.io/"
"""Prefix of the annotations that the provider clusterapi of cluster-autoscaler reads (clusterapi_utils.go)."""

CAPACITY_NAMES = {"cpu": "cpu", "memory": "memory", "ephemeral-storage": "ephemeral-disk", "pods": "maxPods"}

DOCUMENTS = ("objects", "cluster-autoscaler", "karpenter")


@click.command()
@click.option("--gpus", metavar="SOURCE", help="GPUs of the node: sim:NAME, sim:FILE, or nvml: those of this machine.")
@click.option("--like", metavar="NODE", help="A node of the cluster: what a new node of its kind has.")
@click.option("--name", default="template", show_default=True, help="Name of the Node that is printed.")
@click.option("--resources", default=DEFAULT_RESOURCES, show_default=True, help="With --gpus: capacity of the node.")
@click.option("--labels", default=DEFAULT_LABELS, show_default=True, help="With --gpus: labels of the node.")
@click.option("--shares", help="With --gpus: as `tessera node --shares`.")
@click.option("--shared", help="With --gpus: as `tessera node --shared`.")
@click.option("--shares-only", help="With --gpus: as `tessera node --shares-only`.")
@click.option("--compute-instances", help="With --gpus: as `tessera node --compute-instances`.")
@click.option("--mig-gpus", help="With --gpus: as `tessera node --mig-gpus`, after the reset.")
@click.option("--for", "document", type=click.Choice(DOCUMENTS), default="objects", show_default=True, help="Reader.")
@with_output("yaml", "json")
@with_kubeconfig
@with_driver_name
def template(
    *,
    gpus: str | None,
    like: str | None,
    name: str,
    resources: str,
    labels: str,
    mig_gpus: str | None,
    document: str,
    output: str,
    kubeconfig: Path | None,
    driver_name: str,
    **sharing: str | None,
) -> None:
    """Print the Node and the ResourceSlices of a new, idle node that publishes everything (docs/autoscaling.md).

    For autoscalers that add the first node of a group. UUIDs and fabric cliques are placeholders, because only the real
    node will have its own. --for cluster-autoscaler: what the providers externalgrpc and clusterapi need; --for
    karpenter: the ResourceSliceTemplates of an instance type.

    \b
    Examples:
      tessera template --gpus sim:dgx-h100
      tessera template --like worker-1 --name a100-pool -o json
      tessera template --like worker-1 --for cluster-autoscaler
    """
    if (gpus is None) == (like is None):
        raise UsageError("give either --gpus (such as sim:dgx-h100) or --like (the name of a node)")
    check_flag("--name", name, _check_name)
    check_flag("--driver-name", driver_name, check_driver_name)
    if like is not None:
        description, reports = _of_node(client_of(kubeconfig, "tessera-template"), like)
    else:
        amounts = _pairs("--resources", resources, "NAME=QUANTITY, such as cpu=192")
        names = _pairs("--labels", labels, "NAME=VALUE, such as kubernetes.io/arch=arm64")
        description = Node(Metadata(name, labels=names), status=NodeStatus(amounts, amounts))
        reports = hardware(gpus=gpus, mig_gpus=mig_gpus, **sharing)
    node, slices = _node(name, description), _slices(Pool(name, driver_name), reports)
    written: list[Any] = [node, *slices]
    if document == "karpenter":
        written = [{"resourceSliceTemplates": [_slice_template(item["spec"]) for item in slices]}]
    elif document == "cluster-autoscaler":
        annotations = dict(_annotations(node, driver_name, len(reports)))
        external = {"node": node, "resourceSlices": slices}
        written = [{"externalgrpc": external, "clusterapi": {"annotations": annotations}}]
    click.echo(as_documents(written, output))


def _check_name(name: str) -> None:
    if len(name) > 253 or not SUBDOMAIN.fullmatch(name):
        raise ValueError("must be a name for a Node object: a DNS subdomain such as worker-1")


def _pairs(flag: str, text: str, accepted: str) -> dict[str, str]:
    """Read ``cpu=192,memory=2Ti``. Raises UsageError."""
    pairs = {}
    for entry in text.split(","):
        name, separator, value = entry.strip().partition("=")
        if not (name and separator and value):
            raise UsageError(f"{flag} {text}: {entry!r} is not {accepted}")
        pairs[name] = value
    return pairs


def _of_node(client: KubeClient, name: str) -> tuple[Node, list[GpuReport]]:
    """A node of the cluster, and its GPUs by its plan. Raises ApiError and FatalError."""
    node, plan = client.find(f"/api/v1/nodes/{name}"), client.find(f"{PATH}/{name}")
    if node is None:
        raise UsageError(f"--like {name}: the cluster has no such Node; `tessera status` lists the nodes with GPUs")
    if plan is None:
        raise EnvironmentFault(f"--like {name}: the node has no {KIND}, which the controller creates: is it running?")
    try:
        description, status = msgspec.convert(node, Node), msgspec.convert(plan, GpuNodePlan).status
    except msgspec.MsgspecError as error:
        raise FatalError(f"--like {name}: its Node or {KIND} can't be read: {error}") from error
    reports = decode_inventory(status.inventory)
    if not reports:
        raise FatalError(f"--like {name}: its {KIND} lists no GPU (status.inventory): its node plugin has not started")
    if COUNTERS_FIELD in status.dropped:
        raise EnvironmentFault(
            f"--like {name}: the API server does not keep {COUNTERS_FIELD}, so no node can publish everything; "
            "it needs Kubernetes 1.37, or 1.36 with DRAPartitionableDevices (docs/versions.md)"
        )
    for report in reports:
        if report.fault is not None:
            note = f"gpu-{report.number} of {name} can't be used at present ({report.fault}); the template has it free"
            click.secho(note, fg="yellow", err=True)
    return description, reports


def _slices(pool: Pool, reports: Iterable[GpuReport]) -> list[Object]:
    """The slices of a node with these GPUs of which nothing is held."""
    nameless = [anonymous(report, pool.node) for report in reports]
    by_uuid = {report.gpu.uuid: report for report in nameless}
    sharing = GpuSharing(
        lambda gpu: by_uuid[gpu.uuid].shares,
        GpuSelection(frozenset(report.gpu.uuid for report in nameless if report.shares_only)),
        lambda gpu: shared.strategy if (shared := by_uuid[gpu.uuid].shared) is not None else None,
        lambda gpu, _: shared.limit if (shared := by_uuid[gpu.uuid].shared) is not None else MemoryLimit.NONE,
    )
    numbers = {report.gpu.uuid: report.number for report in nameless}
    inventory = Inventory([report.gpu for report in nameless], numbers, sharing)
    builder = SliceBuilder(pool)
    of_pools = {
        pool: builder.build(inventory.published(PublishPolicy(complete=True))),
        pool.of_monitors: builder.monitors(inventory.monitors()),
    }
    return [
        slice_object(name, content, of_pool, 1, len(built), None)
        for of_pool, built in of_pools.items()
        for name, content in built.items()
    ]


def _node(name: str, like: Node) -> Object:
    labels = {key: value for key, value in like.metadata.labels.items() if key not in OWN_LABELS}
    taints = [taint for taint in like.spec.taints if not taint.key.startswith(PASSING_TAINTS)]
    ready = {"type": "Ready", "status": "True", "reason": "Template", "message": "a node that does not exist yet"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**labels, "kubernetes.io/hostname": name, PUBLISH: COMPLETE}},
        "spec": {"taints": msgspec.to_builtins(taints)} if taints else {},
        "status": {**msgspec.to_builtins(like.status), "conditions": [ready]},
    }


def _slice_template(spec: Mapping[str, Any]) -> Object:
    """Karpenter's ResourceSliceTemplate (pkg/cloudprovider/dynamicresources.go)."""
    content = {key: spec[key] for key in ("sharedCounters", "devices") if key in spec}
    return {"driver": spec["driver"], "pool": {"name": spec["pool"]["name"]}, **content}


def _annotations(node: Object, driver: str, gpus: int) -> Iterator[tuple[str, str]]:
    """Annotations of a MachineDeployment, from which the provider makes a node with full GPUs only."""
    for resource, name in CAPACITY_NAMES.items():
        if (amount := node["status"].get("capacity", {}).get(resource)) is not None:
            yield CAPACITY_PREFIX + name, amount
    yield f"{CAPACITY_PREFIX}dra-driver", driver
    yield f"{CAPACITY_PREFIX}gpu-count", str(gpus)
    labels = node["metadata"]["labels"].items()
    yield f"{CAPACITY_PREFIX}labels", ",".join(f"{key}={value}" for key, value in labels if key not in OWN_LABELS)
    taints = [msgspec.convert(taint, Taint) for taint in node["spec"].get("taints", ())]
    if taints:
        yield f"{CAPACITY_PREFIX}taints", ",".join(f"{taint.key}={taint.value}:{taint.effect}" for taint in taints)
