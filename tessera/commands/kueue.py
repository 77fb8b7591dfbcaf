"""``tessera kueue config``: Kueue's Configuration and quotas for the GPUs that a cluster has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from deviceclasses.chart_classes import ANY_PARTITION, FULL_GPU, SHARE_OF_GPU, SHARED_GPU, profile_classes
from driver.config.flag_values import check_driver_name
from driver.errors import EnvironmentFault, UsageError
from driver.kube.client import Object
from driver.model.plan import COUNTERS_FIELD
from driver.model.reported_gpus import GpuReport
from driver.slices.attributes import quantity
from driver.slices.build import memory_of_gpu
from tessera.cluster_options import check_flag, client_of, with_driver_name, with_kubeconfig
from tessera.gpu_sources import MAX_NODES, hardware, plans_and_gpus
from tessera.tables_and_drawings import as_documents, with_output

KUEUE_API_VERSION = "kueue.x-k8s.io/v1beta2"
MAX_MAPPED_CLASSES = 8
"""Maximum classes of a mapping that Kueue accepts (pkg/config/validation.go)."""

CHARGE_MEMORY, FULL_GPUS = "memory", "devices"
QUOTA_NAMES = {CHARGE_MEMORY: "gpu-memory", FULL_GPUS: "gpus"}

FLAVOR_NAME = QUEUE = "gpus"


@click.group()
def kueue() -> None:
    """Kueue with Tessera (docs/queues.md).

    \b
    Examples:
      tessera kueue config
      tessera kueue config --gpus sim:dgx-h100 --queues
    """


@kueue.command()
@click.option("--gpus", metavar="SOURCE", help="GPUs of each node: sim:NAME or sim:FILE.  [default: the cluster's]")
@click.option("-n", "--nodes", type=click.IntRange(1, MAX_NODES), help="With --gpus: number of nodes.  [default: 1]")
@click.option("--shares", help="With --gpus: as `tessera node --shares`.")
@click.option(
    "--charge",
    type=click.Choice([CHARGE_MEMORY, FULL_GPUS]),
    default=CHARGE_MEMORY,
    show_default=True,
    help="The memory that devices of any class take, or the number of full GPUs.",
)
@click.option("--queues", is_flag=True, help="Also a ResourceFlavor, a ClusterQueue and a LocalQueue.")
@with_output("yaml", "json")
@with_kubeconfig
@with_driver_name
def config(
    *,
    gpus: str | None,
    nodes: int | None,
    shares: str | None,
    charge: str,
    queues: bool,
    output: str,
    kubeconfig: Path | None,
    driver_name: str,
) -> None:
    """Print a Kueue Configuration with deviceClassMappings for the GPUs of the cluster.

    The fields of Kueue's own installation are not in it: add `resources` to yours. By default one quota, in bytes,
    covers full GPUs, partitions and shares, which are made of the same GPUs. The quota of --queues is all that the
    nodes have at present.

    \b
    Examples:
      tessera kueue config
      tessera kueue config --queues > queues.yaml
      tessera kueue config --gpus sim:dgx-h100 -n 4 --queues -o json
      tessera kueue config --charge devices
    """
    check_flag("--driver-name", driver_name, check_driver_name)
    if gpus is None and (nodes is not None or shares is not None):
        raise UsageError("--nodes and --shares describe the nodes of --gpus: give --gpus, too, such as sim:dgx-h100")
    reports = _of_cluster(kubeconfig, charge) if gpus is None else hardware(gpus=gpus, shares=shares) * (nodes or 1)
    classes, left_out = _classes(reports, charge)
    if left_out:
        note = f"a mapping has at most {MAX_MAPPED_CLASSES} classes; not covered: {', '.join(left_out)}"
        click.secho(f"{note}. Jobs can select their profiles with class {ANY_PARTITION}", fg="yellow", err=True)
    if charge == CHARGE_MEMORY and any(report.shared is not None for report in reports):
        note = f"class {SHARED_GPU} is not covered: its claims need a capacity source (docs/queues.md)"
        click.secho(note, fg="yellow", err=True)
    products = sorted({report.gpu.product_name for report in reports})
    if charge == CHARGE_MEMORY and len(products) > 1:
        note = f"products: {', '.join(products)}. A request that selects none is charged as the largest"
        click.secho(note, fg="yellow", err=True)
    written: list[Object] = [_configuration(classes, charge, driver_name)]
    if queues:
        written += _queues(reports, charge)
    click.echo(as_documents(written, output))


def _of_cluster(kubeconfig: Path | None, charge: str) -> list[GpuReport]:
    needs = ": is the controller running? --gpus sim:NAME does not need it"
    plans, reports = plans_and_gpus(client_of(kubeconfig, "tessera-kueue"), needs)
    if charge == CHARGE_MEMORY and any(COUNTERS_FIELD in plan.status.dropped for plan in plans):
        raise EnvironmentFault(
            f"the API server does not keep {COUNTERS_FIELD}, by which Kueue charges memory: give --charge {FULL_GPUS} "
            "(docs/versions.md)"
        )
    return reports


def _classes(reports: Iterable[GpuReport], charge: str) -> tuple[list[str], list[str]]:
    """The chart's classes for devices of these GPUs: those that a mapping has room for, and the others."""
    if charge == FULL_GPUS:
        return [FULL_GPU], []
    profiles = {profile.name for report in reports for profile in report.gpu.profiles}
    shared = [SHARE_OF_GPU] if any(report.shares for report in reports) else []
    partitions = [name for profile, name in sorted(profile_classes().items()) if profile in profiles]
    classes = [FULL_GPU, *shared, *([ANY_PARTITION] if partitions else []), *partitions]
    return classes[:MAX_MAPPED_CLASSES], classes[MAX_MAPPED_CLASSES:]


def _configuration(classes: Sequence[str], charge: str, driver: str) -> Object:
    mapping: Object = {"name": QUOTA_NAMES[charge], "deviceClassNames": list(classes)}
    if charge == CHARGE_MEMORY:
        selector = {"cel": {"expression": f'device.driver == "{driver}"'}}
        mapping["sources"] = [{"counter": {"name": CHARGE_MEMORY, "driver": driver, "deviceSelector": selector}}]
    content = {"apiVersion": f"config.{KUEUE_API_VERSION}", "kind": "Configuration"}
    return {**content, "resources": {"deviceClassMappings": [mapping]}}


def _queues(reports: Sequence[GpuReport], charge: str) -> Iterator[Object]:
    memory = quantity(sum(memory_of_gpu(report.gpu) for report in reports))
    quota: Any = memory if charge == CHARGE_MEMORY else len(reports)
    resource = QUOTA_NAMES[charge]
    flavors = [{"name": FLAVOR_NAME, "resources": [{"name": resource, "nominalQuota": quota}]}]
    group = {"coveredResources": [resource], "flavors": flavors}
    yield {"apiVersion": KUEUE_API_VERSION, "kind": "ResourceFlavor", "metadata": {"name": FLAVOR_NAME}}
    spec: Object = {"namespaceSelector": {}, "resourceGroups": [group]}
    yield {"apiVersion": KUEUE_API_VERSION, "kind": "ClusterQueue", "metadata": {"name": QUEUE}, "spec": spec}
    metadata = {"name": QUEUE, "namespace": "default"}
    yield {"apiVersion": KUEUE_API_VERSION, "kind": "LocalQueue", "metadata": metadata, "spec": {"clusterQueue": QUEUE}}
