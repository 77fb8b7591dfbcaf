"""``tessera simulate``: what scheduler and controller would do with pods and claims, without creating any."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import msgspec

from controller.eviction.gpu_policy import GpuPolicies
from controller.explain.reason import ReasonCode
from controller.report.cluster_view import read_cluster
from deviceclasses.chart_classes import chart_classes
from deviceclasses.lint.admission_policies import chart_policies
from driver.errors import UsageError
from driver.kube.client import KubeClient
from driver.kube.types import ClassSpec, DeviceClass, Key, Metadata, Pod, PodGroup
from driver.model.shared_memory import MEMORY_CAPACITY, gib_of
from tessera.cluster_options import ListOnceClient, access_of, with_driver_name, with_kubeconfig
from tessera.simulate.fill import Filled
from tessera.simulate.fill import fill as fill_cluster
from tessera.simulate.imagined_cluster import ClusterContent, ImaginedCluster
from tessera.simulate.output import Simulation
from tessera.simulate.scheduler import PodPlacement, UnplacedReason
from tessera.simulate.sources import (
    cluster_policies,
    documents_of,
    find_template,
    joined,
    of_cluster,
    policies_of_files,
    priority_classes,
    simulated,
    uncordoned,
    without,
)
from tessera.simulate.victims import VictimFinder
from tessera.simulate.workloads import Reader, Workloads
from tessera.tables_and_drawings import show, with_output

MANY = 20
"""Nodes or pods of which progress is shown, if there are at least as many."""


@click.command()
@click.argument("paths", metavar="[FILE...]", nargs=-1)
@click.option(
    "--nodes", metavar="NAME=COUNT,...", help="Simulated nodes: dgx-h100=4, or FILE=COUNT (docs/simulator.md)."
)
@click.option("--shares", help="With --nodes: as `tessera node --shares`.")
@click.option("--shared", help="With --nodes: as `tessera node --shared`.")
@click.option("--compute-instances", help="With --nodes: as `tessera node --compute-instances`.")
@click.option("--mig-gpus", help="With --nodes: Ampere GPUs in MIG mode: all, or indices.  [default: none]")
@click.option("--cluster", is_flag=True, help="The cluster as it is; --nodes adds to it.")
@click.option("--without", "gone", metavar="NAMESPACE/CLAIM", multiple=True, help="As if that claim had ended.")
@click.option("--uncordon", "uncordon", metavar="NODE[/gpu-N]", multiple=True, help="As if that were not cordoned.")
@click.option("--fill", metavar="CLASS[=MEMORY]", help="How many claims for one device of that class still fit.")
@click.option(
    "--policy", "policies", multiple=True, help="Whom these GpuPolicies (file, folder, -) would evict for the others."
)
@click.option("--summary", is_flag=True, help="Only how many pods are placed, and what is left.")
@with_kubeconfig
@with_driver_name
@with_output("table", "json")
def simulate(
    *,
    paths: Sequence[str],
    nodes: str | None,
    mig_gpus: str | None,
    cluster: bool,
    gone: Sequence[str],
    uncordon: Sequence[str],
    fill: str | None,
    policies: Sequence[str],
    summary: bool,
    kubeconfig: Path | None,
    driver_name: str,
    output: str,
    **sharing: str | None,
) -> None:
    """Show which devices the pods and claims in FILEs would get, or why they would wait (docs/simulate.md).

    FILE has Pods, objects of any kind with pod templates, ResourceClaims, ResourceClaimTemplates and DeviceClasses in
    YAML or JSON; it may be a folder, or - for standard input. The pods are placed in that order. Nothing is created.
    Exit code 0: everything fits; 1: something does not, or was not tried; 2: usage; 3: environment.

    \b
    Examples:
      tessera simulate pod.yaml --nodes dgx-h100=4
      tessera simulate deploy/examples --nodes dgx-h100=2 --shares all=4
      tessera simulate pod.yaml --nodes l4-4=2 --shared all=time-slicing
      tessera simulate job.yaml --cluster --without team-a/notebook --uncordon node-a/gpu-3
      tessera simulate job.yaml --cluster --policy policies.yaml
      tessera simulate --fill gpu-inference-1g-10gb --cluster
      tessera simulate --fill gpu-shared=6Gi --cluster
    """
    _check(paths, nodes, fill, cluster=cluster, gone=gone)
    allowing = list(policies_of_files(policies))
    client = ListOnceClient(access_of(kubeconfig), "tessera-simulate") if cluster else None
    content, waiting = _present(client, driver_name, nodes, mig_gpus=mig_gpus, **sharing)
    content = _changed(content, gone, uncordon, driver_name)
    given = _given(paths, client, content, driver_name, has_policies=bool(policies))
    content = _with_classes(content, given, fill)
    _leave_out_repeated(content, waiting, given)
    imagined = ImaginedCluster(driver_name, content)
    imagined, of_cluster_pods = _place(imagined, waiting)
    imagined, of_given_pods = _place(imagined, given)
    placements = [*of_cluster_pods, *of_given_pods]
    finder = VictimFinder(GpuPolicies(allowing), content, given.jobs, client) if policies else None
    previews = finder.find(imagined.fork(), placements) if finder is not None else None
    filled = _filled(imagined, fill) if fill is not None else None
    result = Simulation(imagined, placements, {id(pod) for pod in given.pods}, fill, filled, given, summary, previews)
    show(output, result.json, result.text)
    sys.exit(0 if result.fits else 1)


def _check(paths: Sequence[str], nodes: str | None, fill: str | None, *, cluster: bool, gone: Sequence[str]) -> None:
    if not cluster and nodes is None:
        raise UsageError("give --nodes (such as dgx-h100=4), --cluster, or both")
    if not paths and fill is None:
        raise UsageError("give files with pods or claims, or --fill with the name of a DeviceClass")
    if fill is not None and "=" in fill and gib_of({MEMORY_CAPACITY: fill.partition("=")[2]}, 1) is None:
        raise UsageError(f"--fill {fill}: write CLASS or CLASS=MEMORY, such as gpu-shared=6Gi")
    if gone and not cluster:
        raise UsageError("--without needs --cluster: simulated nodes are idle")


def _with_classes(content: ClusterContent, given: Workloads, fill: str | None) -> ClusterContent:
    """With the classes and templates of the files. Raises UsageError if there is no class that ``--fill`` names."""
    templates = (*content.templates, *given.templates)
    content = replace(content, classes={**content.classes, **given.classes}, templates=templates)
    if fill is not None and fill.partition("=")[0] not in content.classes:
        raise UsageError(f"--fill {fill}: there is no such DeviceClass; there are {', '.join(sorted(content.classes))}")
    return content


def _changed(content: ClusterContent, gone: Sequence[str], uncordon: Sequence[str], driver: str) -> ClusterContent:
    for claim in gone:
        content = without(content, claim, driver)
    for target in uncordon:
        content = uncordoned(content, target)
    return content


def _present(
    client: KubeClient | None, driver: str, nodes: str | None, **flags: str | None
) -> tuple[ClusterContent, Workloads]:
    """The cluster, if there is one, with the simulated nodes, and the pods that are pending now."""
    content, waiting = _empty(driver), Workloads()
    if client is not None:
        view = read_cluster(client, driver)
        content = of_cluster(client, view, driver)
        waiting = Workloads(view.queue.pods, groups=dict(view.snapshot.cluster.pod_groups))
    return content if nodes is None else joined(content, simulated(nodes, **flags)), waiting


def _empty(driver: str) -> ClusterContent:
    """No nodes, and the chart's classes."""
    classes = {}
    for manifest in chart_classes(driver):
        name = manifest["metadata"]["name"]
        classes[name] = DeviceClass(Metadata(name), msgspec.convert(manifest["spec"], ClassSpec))
    return ClusterContent(classes=classes)


def _given(
    paths: Sequence[str], client: KubeClient | None, content: ClusterContent, driver: str, *, has_policies: bool
) -> Workloads:
    """The workloads of the files, with templates and admission policies of the cluster if there is one."""
    documents, priorities = documents_of(paths), priority_classes(client) if has_policies else None
    if client is None:
        return Reader(lambda _: None, content.nodes, chart_policies(driver), priorities).read(documents)
    find = partial(find_template, client)
    return Reader(find, content.nodes, cluster_policies(client, driver), priorities).read(documents)


def _leave_out_repeated(content: ClusterContent, waiting: Workloads, given: Workloads) -> None:
    """Claims and pending pods of the cluster that are in the files, too, exist once: as they are in the cluster."""
    existing, names = {claim.metadata.key for claim in content.claims}, {pod.metadata.key for pod in given.pods}
    given.claims = {key: claim for key, claim in given.claims.items() if key not in existing}
    waiting.pods = [pod for pod in waiting.pods if pod.metadata.key not in names]


def _place(cluster: ImaginedCluster, workloads: Workloads) -> tuple[ImaginedCluster, list[PodPlacement]]:
    """Place the pods one after the other, those of a gang together or not at all; the cluster after that."""
    placements: list[PodPlacement] = []
    for key, claim in workloads.claims.items():
        if ("ResourceClaim", key) not in workloads.refused:
            cluster.add(claim)
    groups: dict[Hashable, list[Pod]] = {}
    for number, pod in enumerate(workloads.pods):
        group = workloads.groups.get(pod.pod_group) if pod.pod_group is not None else None
        groups.setdefault(pod.pod_group if group is not None and group.min_count else number, []).append(pod)
    with _progress("pods placed", len(workloads.pods)) as advance:
        for group_key, pods in groups.items():
            gang = workloads.groups[group_key] if isinstance(group_key, Key) else None
            after = cluster if gang is None else cluster.fork()
            placed = [_place_one(after, workloads, pod, advance) for pod in pods]
            fitting = sum(placement.node is not None for placement in placed)
            if gang is not None and fitting < gang.min_count:
                placements += [_without_gang(gang, placement, fitting) for placement in placed]
            else:
                cluster = after
                placements += placed
    return cluster, placements


def _place_one(cluster: ImaginedCluster, workloads: Workloads, pod: Pod, advance: Callable[[], None]) -> PodPlacement:
    """Place one pod, unless an admission policy refuses it or a claim of it."""
    objects = [("Pod", pod.metadata.key), *(("ResourceClaim", key) for key in pod.claims)]
    refused = [(key, workloads.refused[kind, key]) for kind, key in objects if (kind, key) in workloads.refused]
    if refused:
        placement = PodPlacement(pod, reasons=tuple(UnplacedReason(str(key), "", text) for key, text in refused))
    else:
        placement = cluster.place(pod)
        cluster.settle()
    advance()
    return placement


def _without_gang(group: PodGroup, placement: PodPlacement, fitting: int) -> PodPlacement:
    """The placement of a pod of a gang of which only so many pods fit."""
    sentence = f"PodGroup {group.metadata.name} needs {group.min_count} pods at once; only {fitting} can be placed"
    reason = UnplacedReason(str(placement.pod.metadata.key), ReasonCode.GANG.value, sentence)
    return PodPlacement(placement.pod, reasons=(reason, *placement.reasons))


def _filled(cluster: ImaginedCluster, fill: str) -> Filled:
    device_class, _, memory = fill.partition("=")
    with _progress("nodes filled", len(cluster.fleet.nodes)) as advance:
        return fill_cluster(cluster, device_class, memory, lambda _: advance())


@contextmanager
def _progress(label: str, length: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error, if that is a terminal and the work is long; call the result after each item."""
    hidden = length < MANY or not sys.stderr.isatty()
    with click.progressbar(length=length, label=label, file=sys.stderr, hidden=hidden) as bar:
        yield lambda: bar.update(1)
