"""``tessera kueue config``: Kueue's Configuration and quotas for the GPUs that a cluster has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import yaml

from deviceclasses.chart_classes import ANY_PARTITION, FULL_GPU, SHARE, profile_classes
from driver.config.shared_flags import check_driver_name
from driver.errors import EnvironmentFault, FatalError, UsageError
from driver.kube.client import Object
from driver.model.plan import COUNTERS_FIELD, KIND, GpuReport, states_of
from driver.slices.attributes import quantity
from driver.slices.build import memory_of_gpu
from kubelet_plugin.inventory.open_hardware import open_host
from kubelet_plugin.settings import node_settings
from tessera.cluster_options import client_of, find_plans, with_driver_name, with_kubeconfig

GROUP = "kueue.x-k8s.io"
VERSION = f"{GROUP}/v1beta2"
MAX_CLASSES = 8
"""Maximum classes of a mapping that Kueue accepts (pkg/config/validation.go)."""

MEMORY, DEVICES = "memory", "devices"
RESOURCES = {MEMORY: "gpu-memory", DEVICES: "gpus"}
"""The name of the quota, by what is charged."""

FLAVOR = QUEUE = "gpus"


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
@click.option("-n", "--nodes", type=click.IntRange(min=1), help="With --gpus: number of nodes.  [default: 1]")
@click.option("--shares", help="With --gpus: as `tessera node --shares`.")
@click.option(
    "--charge",
    type=click.Choice([MEMORY, DEVICES]),
    default=MEMORY,
    show_default=True,
    help="The memory that devices of any class take, or the number of full GPUs.",
)
@click.option("--queues", is_flag=True, help="Also a ResourceFlavor, a ClusterQueue and a LocalQueue.")
@click.option("-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml", show_default=True, help="Format.")
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
    try:
        check_driver_name(driver_name)
    except ValueError as error:
        raise UsageError(f"--driver-name {driver_name}: {error}") from error
    if gpus is None and (nodes is not None or shares is not None):
        raise UsageError("--nodes and --shares describe the nodes of --gpus: give --gpus, too, such as sim:dgx-h100")
    reports = _of_cluster(kubeconfig, charge) if gpus is None else _of_hardware(gpus, shares) * (nodes or 1)
    classes, left_out = _classes(reports, charge)
    if left_out:
        note = f"a mapping has at most {MAX_CLASSES} classes; not covered: {', '.join(left_out)}"
        click.secho(f"{note}. Jobs can select their profiles with class {ANY_PARTITION}", fg="yellow", err=True)
    products = sorted({report.gpu.product_name for report in reports})
    if charge == MEMORY and len(products) > 1:
        note = f"products: {', '.join(products)}. A request that selects none is charged as the largest"
        click.secho(note, fg="yellow", err=True)
    written: list[Object] = [_configuration(classes, charge, driver_name)]
    if queues:
        written += _queues(reports, charge)
    click.echo(json.dumps(written, indent=2) if output == "json" else _as_yaml(written))


def _of_hardware(gpus: str, shares: str | None) -> list[GpuReport]:
    """The GPUs of a simulated node. Raises UsageError and HardwareError."""
    settings = node_settings(node_name="kueue", gpus=gpus, shares=shares, sim_latency="zero")
    with open_host(settings, lasting=False) as (host, _):
        found = host.discover().gpus
    return [GpuReport(gpu, gpu.minor, settings.shares.of(gpu)) for gpu in found]


def _of_cluster(kubeconfig: Path | None, charge: str) -> list[GpuReport]:
    """The GPUs of all nodes by their plans: curated slices do not have what nobody holds or may take."""
    try:
        plans = find_plans(client_of(kubeconfig, "tessera-kueue"))
    except msgspec.MsgspecError as error:
        raise FatalError(f"a {KIND} can't be read: {error}") from error
    reports = [report for plan in plans or () for report in states_of(plan.status.inventory)]
    if not reports:
        raise EnvironmentFault(f"no {KIND} lists a GPU: is the controller running? --gpus sim:NAME does not need it")
    if charge == MEMORY and any(COUNTERS_FIELD in plan.status.dropped for plan in plans or ()):
        raise EnvironmentFault(
            f"the API server does not keep {COUNTERS_FIELD}, by which Kueue charges memory: give --charge {DEVICES} "
            "(docs/versions.md)"
        )
    return reports


def _classes(reports: Iterable[GpuReport], charge: str) -> tuple[list[str], list[str]]:
    """The chart's classes for devices of these GPUs: those that a mapping has room for, and the others."""
    if charge == DEVICES:
        return [FULL_GPU], []
    profiles = {profile.name for report in reports for profile in report.gpu.profiles}
    shared = [SHARE] if any(report.shares for report in reports) else []
    partitions = [name for profile, name in sorted(profile_classes().items()) if profile in profiles]
    classes = [FULL_GPU, *shared, *([ANY_PARTITION] if partitions else []), *partitions]
    return classes[:MAX_CLASSES], classes[MAX_CLASSES:]


def _configuration(classes: Sequence[str], charge: str, driver: str) -> Object:
    mapping: Object = {"name": RESOURCES[charge], "deviceClassNames": list(classes)}
    if charge == MEMORY:
        selector = {"cel": {"expression": f'device.driver == "{driver}"'}}
        mapping["sources"] = [{"counter": {"name": MEMORY, "driver": driver, "deviceSelector": selector}}]
    content = {"apiVersion": f"config.{VERSION}", "kind": "Configuration"}
    return {**content, "resources": {"deviceClassMappings": [mapping]}}


def _queues(reports: Sequence[GpuReport], charge: str) -> Iterator[Object]:
    memory = quantity(sum(memory_of_gpu(report.gpu) for report in reports))
    quota: Any = memory if charge == MEMORY else len(reports)
    resource = RESOURCES[charge]
    flavors = [{"name": FLAVOR, "resources": [{"name": resource, "nominalQuota": quota}]}]
    group = {"coveredResources": [resource], "flavors": flavors}
    yield {"apiVersion": VERSION, "kind": "ResourceFlavor", "metadata": {"name": FLAVOR}}
    spec: Object = {"namespaceSelector": {}, "resourceGroups": [group]}
    yield {"apiVersion": VERSION, "kind": "ClusterQueue", "metadata": {"name": QUEUE}, "spec": spec}
    metadata = {"name": QUEUE, "namespace": "default"}
    yield {"apiVersion": VERSION, "kind": "LocalQueue", "metadata": metadata, "spec": {"clusterQueue": QUEUE}}


def _as_yaml(documents: Sequence[Object]) -> str:
    return yaml.dump_all(documents, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False).rstrip()
