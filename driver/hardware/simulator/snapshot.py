"""What is on a simulated node now, as values that go to JSON or a table."""

from __future__ import annotations

from typing import Any

from driver.hardware.host import ComputeMode
from driver.model.sharing import TimeSlice

from .node import SimulatedNode
from .products import Product
from .state import GpuInstance


def describe(node: SimulatedNode, held: dict[str, str]) -> list[dict[str, Any]]:
    """The node's GPUs as JSON objects, each with its MIG devices; memory in MiB.

    Each GPU is shown as it was at one moment. No NVML session is needed, and nothing waits.

    :param held: who holds what, by UUID of GPU or MIG device
    """
    return [_describe_gpu(node, minor, held) for minor in node.present]


def _describe_gpu(node: SimulatedNode, minor: int, held: dict[str, str]) -> dict[str, Any]:
    state, product = node.gpu_state(minor), node.description.gpu_product
    uuid = node.description.gpu_uuid(minor)
    everywhere = [*state.processes, *(p for gi in state.instances for ci in gi.compute for p in ci.processes)]
    in_order = sorted(state.instances, key=lambda gi: gi.start)
    return {
        "node": node.description.name,
        "index": node.present.index(minor),
        "name": product.name,
        "uuid": uuid,
        "pciBusId": node.gpus[minor].pci_bus_id,
        "memoryTotal": product.memory_mib,
        "memoryUsed": sum(process.memory for process in everywhere) >> 20,
        "migMode": _mode(product.mig_capable, state.mig_enabled),
        "migModePending": _mode(product.mig_capable, state.mig_pending),
        "computeMode": ComputeMode(state.compute_mode).name,
        "timeSlice": str(list(TimeSlice)[state.time_slice]),
        "holder": held.get(uuid),
        "processes": [process.pid for process in state.processes],
        "migDevices": [row for gi in in_order for row in _describe_instance(product, gi, held)],
    }


def _describe_instance(product: Product, gi: GpuInstance, held: dict[str, str]) -> list[dict[str, Any]]:
    profile = product.by_id[gi.profile]
    common: dict[str, Any] = {
        "gpuInstance": gi.id,
        "profile": profile.name,
        "placement": {"start": gi.start, "size": gi.size},
        "memory": profile.memory_at(gi.start),
    }
    if not gi.compute:
        return [common | {"computeInstance": None, "uuid": None, "holder": None, "processes": []}]
    return [
        common
        | {
            "computeInstance": ci.id,
            "uuid": ci.uuid,
            "holder": held.get(ci.uuid),
            "processes": [process.pid for process in ci.processes],
        }
        for ci in gi.compute
    ]


def _mode(capable: bool, enabled: bool) -> str:
    return ("Enabled" if enabled else "Disabled") if capable else "N/A"
