"""The GPUs of nodes that do not exist: of simulated nodes, or like those of a real one."""

from __future__ import annotations

import uuid
from dataclasses import replace

from driver.errors import EnvironmentFault
from driver.model.plan import GpuReport
from kubelet_plugin.inventory.open_hardware import open_host
from kubelet_plugin.settings import node_settings


def hardware(**flags: str | None) -> list[GpuReport]:
    """The GPUs of a simulated node, or of this machine. Raises UsageError, HardwareError and EnvironmentFault."""
    settings = node_settings(node_name="template", sim_latency="zero", **flags)
    with open_host(settings, lasting=False) as (host, _):
        found = host.discover()
    for fault in found.faults:
        raise EnvironmentFault(f"--gpus {settings.gpus}: {fault} can't be read: {fault.reason}")
    by_minor = sorted(found.gpus, key=lambda gpu: gpu.minor)
    return [GpuReport(gpu, gpu.minor, settings.shares.of(gpu), gpu in settings.shares_only) for gpu in by_minor]


def anonymous(report: GpuReport, node: str) -> GpuReport:
    """The GPU without what no other node has."""
    gpu, fabric = report.gpu, report.gpu.fabric_clique
    gpu = replace(
        gpu,
        uuid=f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node}/gpu-{report.number}')}",
        fabric_clique=None if fabric is None else f"{uuid.UUID(int=0)}.{fabric.rpartition('.')[2]}",
    )
    return replace(report, gpu=gpu)
