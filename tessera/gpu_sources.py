"""The GPUs of nodes: of all in the cluster, and of nodes that do not exist."""

from __future__ import annotations

import uuid
from dataclasses import replace

import msgspec

from driver.errors import EnvironmentFault, FatalError, StateError
from driver.kube.client import KubeClient
from driver.kube.types import GpuNodePlan
from driver.model.gpu import MigMode
from driver.model.plan import KIND
from driver.model.reported_gpus import GpuReport, decode_inventory
from kubelet_plugin.inventory.open_hardware import open_host
from kubelet_plugin.settings import node_settings
from tessera.cluster_options import find_plans

MAX_NODES = 5_000
"""Nodes that do not exist, together: as many as the largest cluster that Kubernetes supports has."""


def plans_and_gpus(client: KubeClient, needs: str) -> tuple[list[GpuNodePlan], list[GpuReport]]:
    """The plans of all nodes and the GPUs in them. Raises EnvironmentFault if there is no GPU (``needs``: what for).

    Plans, not slices: curated slices leave out what nobody holds or may take.
    """
    try:
        plans = find_plans(client) or []
    except msgspec.MsgspecError as error:
        raise FatalError(f"a {KIND} can't be read: {error}") from error
    reports = [report for plan in plans for report in decode_inventory(plan.status.inventory)]
    if not reports:
        raise EnvironmentFault(f"no {KIND} lists a GPU{needs}")
    return plans, reports


def readable_reports(plan: GpuNodePlan) -> list[GpuReport]:
    """The GPUs that a node reports in its plan's status; empty if that can't be read."""
    try:
        return decode_inventory(plan.status.inventory)
    except StateError:
        return []


def hardware(**flags: str | None) -> list[GpuReport]:
    """The GPUs of a simulated node, or of this machine. ``flags`` are those of ``tessera node``, after any reset.

    Raises UsageError, HardwareError and EnvironmentFault.
    """
    settings = node_settings(node_name="template", sim_latency="zero", **flags)
    with open_host(settings, lasting=False) as (host, _):
        discovery = host.discover()
    for fault in discovery.faults:
        raise EnvironmentFault(f"--gpus {settings.gpus}: {fault} can't be read: {fault.reason}")
    named = [settings.compute_instances.applied_to(gpu, {}) for gpu in discovery.gpus]
    gpus = (
        replace(gpu, mig_mode=MigMode.ENABLED)
        if gpu in settings.mig_gpus and gpu.mig_capable and not gpu.toggles_freely
        else gpu
        for gpu in named
    )
    sharing = settings.sharing
    return [
        GpuReport(
            gpu,
            gpu.minor,
            sharing.shares_of(gpu),
            gpu in sharing.only,
            shared=sharing.memory_of(gpu, sharing.strategy_of(gpu)),
        )
        for gpu in sorted(gpus, key=lambda gpu: gpu.minor)
    ]


def anonymous(report: GpuReport, node: str) -> GpuReport:
    """The GPU without what no other node has."""
    gpu, fabric = report.gpu, report.gpu.fabric_clique
    gpu = replace(
        gpu,
        uuid=f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node}/gpu-{report.number}')}",
        fabric_clique=None if fabric is None else f"{uuid.UUID(int=0)}.{fabric.rpartition('.')[2]}",
    )
    return replace(report, gpu=gpu)
