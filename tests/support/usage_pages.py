"""Pages of usage metrics as a node plugin serves them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Gauge, generate_latest

H100, A100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L4"
CLAIM_LABELS = ("namespace", "claim", "pod", "class", "profile", "device", "gpu", "node", "source")
GIB = 2**30


@dataclass(frozen=True)
class Held:
    """A device of a prepared claim. ``values``: its metrics without ``tessera_claim_``; what is missing is unknown."""

    claim: str = "team-a/train"
    device: str = "gpu-0"
    gpu: str = "gpu-0"
    slices: float = 8
    device_class: str = "gpu-training"
    pod: str = "pod"
    source: str = "gpm"
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuSeries:
    """A GPU of the node; ``reason``: why its activity is unknown."""

    name: str = "gpu-0"
    product: str = H100
    slices: int = 8
    reason: str = ""


def usage_page(node: str, gpus: Iterable[GpuSeries], held: Iterable[Held] = ()) -> str:
    """The text of the page of ``node``."""
    registry = CollectorRegistry()
    slices = Gauge("tessera_gpu_memory_slices", "Slices.", ("node", "gpu", "product"), registry=registry)
    unknown = Gauge("tessera_gpu_activity_unknown", "Reasons.", ("node", "gpu", "reason"), registry=registry)
    for gpu in gpus:
        slices.labels(node, gpu.name, gpu.product).set(gpu.slices)
        if gpu.reason:
            unknown.labels(node, gpu.name, gpu.reason).set(1)
    gauges: dict[str, Gauge] = {}
    for each in held:
        labels = (*each.claim.split("/"), each.pod, each.device_class, "none", each.device, each.gpu, node, each.source)
        for name, value in {"slices": each.slices, **each.values}.items():
            if name not in gauges:
                gauges[name] = Gauge(f"tessera_claim_{name}", "A metric.", CLAIM_LABELS, registry=registry)
            gauges[name].labels(*labels).set(value)
    return generate_latest(registry).decode()
