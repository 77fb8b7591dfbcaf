"""What the web page shows of the cluster, encoded as JSON, and the differences between two states of it (pure).

The JSON of 1,000 nodes takes 7 MiB, so it is kept compressed and made piece by piece.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

import msgspec

from controller.cluster.fleet import FleetGpu
from controller.explain.helpful_changes import HelpfulChange
from controller.explain.sources.holder_relations import workload_of
from controller.report.claim_explainer import Explainer, Explanation
from controller.report.cluster_view import ClusterView
from controller.report.map_model import MapNode, Value, cluster_map
from controller.report.map_summary import MapSummary

MAX_PENDING = 500
"""Pending claims that are listed; their number is shown in any case."""

MAX_NAMES = 20
"""Pods and holders of one claim that are listed."""

MAX_TEXT = 2000
"""Characters of a message that are shown: parts of it come from tenants."""

PIECE_BYTES = 64 * 1024

GZIP = zlib.MAX_WBITS | 16
"""The format gzip, as ``zlib`` numbers it."""

encode = msgspec.json.Encoder().encode


class GpuHardware(Value, frozen=True):
    """Where a GPU is in its node, and its links; None: unknown. NICs have the same ``pcie_root``."""

    pci_bus_id: str
    pcie_root: str | None
    numa_node: int | None
    architecture: str
    driver_version: str
    nvlink_generation: int | None
    nvlink_links: int | None
    nvlink_bandwidth: int | None


class PageNode(MapNode, frozen=True):
    """A node of the map; ``hardware`` has an entry for each of its GPUs."""

    hardware: tuple[GpuHardware, ...] = ()


class PagePending(Value, frozen=True):
    """A claim that is pending or that its node can not prepare or release, or a pod without claim (``claim`` is None).

    ``workload`` is what replaces the first pod, such as ``Deployment team-a/web``; None: nothing does.
    ``is_explained``: holders and changes were looked for; otherwise only the reason is known.
    """

    claim: str | None
    pods: tuple[str, ...]
    pod_count: int
    workload: str | None
    created: str | None
    reason: str
    message: str
    holders: tuple[str, ...]
    holder_count: int
    changes: tuple[HelpfulChange, ...]
    reports: tuple[str, ...]
    is_explained: bool


@dataclass(frozen=True)
class PageContent:
    """The content in encoded form: ``nodes`` by name, each compressed, and the other ``parts`` by field."""

    nodes: Mapping[str, bytes]
    parts: Mapping[str, bytes]

    def complete(self, version: str) -> bytes:
        """All of it, as a JSON object in the format gzip."""
        return _object(version, self.parts, self.nodes.values(), ())

    def changes_since(self, old: PageContent, version: str) -> bytes:
        """What differs from ``old``, as an object of the same form; ``removed`` are names of nodes."""
        parts = {name: part for name, part in self.parts.items() if old.parts.get(name) != part}
        nodes = (node for name, node in self.nodes.items() if old.nodes.get(name) != node)
        return _object(version, parts, nodes, sorted(old.nodes.keys() - self.nodes.keys()))


def _object(version: str, parts: Mapping[str, bytes], nodes: Iterable[bytes], removed: Iterable[str]) -> bytes:
    fields = {name: msgspec.Raw(part) for name, part in parts.items()}
    start = encode({"version": version, **fields, "removed": [*removed]})
    packer = zlib.compressobj(zlib.Z_BEST_SPEED, wbits=GZIP)
    packed = [packer.compress(start[:-1] + b',"nodes":[')]
    for place, node in enumerate(nodes):
        packed.append(packer.compress((b"," if place else b"") + zlib.decompress(node)))
    return b"".join((*packed, packer.compress(b"]}"), packer.flush()))


def unpacked(packed: bytes) -> Iterator[bytes]:
    """The text of what is in the format gzip, piece by piece."""
    unpacker = zlib.decompressobj(GZIP)
    while not unpacker.eof:
        yield unpacker.decompress(packed, PIECE_BYTES)
        packed = unpacker.unconsumed_tail


def content_of(view: ClusterView, in_detail: Callable[[], bool]) -> PageContent:
    """The content for one view. ``in_detail`` says, claim by claim, whether there is time for what would help."""
    summary, nodes = MapSummary(), {}
    for node in cluster_map(view):
        summary.add(node)
        encoded = encode(_node(node, view.fleet.nodes.get(node.name, ())))
        nodes[node.name] = zlib.compress(encoded, zlib.Z_BEST_SPEED)
    explainer = Explainer(view)
    stuck = [*explainer.unprepared(in_detail=False), *explainer.unreleased()]
    explanations = chain(stuck, explainer.pending(in_detail))
    pending = list(map(_explained, islice(explanations, MAX_PENDING)))
    pending.sort(key=lambda each: (each.created or "", each.claim or ""))
    parts = {
        "driver": view.driver,
        "stale": view.stale,
        "products": summary.products,
        "classes": summary.classes,
        "pending": pending,
        "evictions": () if view.reads is None else view.reads.evictions(),
        "pendingCount": max(len(pending), len(view.queue.pending) + len(stuck)),
    }
    return PageContent(nodes, {name: encode(part) for name, part in parts.items()})


def _node(node: MapNode, entries: Iterable[FleetGpu]) -> PageNode:
    return PageNode(**msgspec.structs.asdict(node), hardware=tuple(map(_hardware, entries)))


def _hardware(entry: FleetGpu) -> GpuHardware:
    gpu, links = entry.gpu, entry.gpu.nvlink
    return GpuHardware(
        pci_bus_id=gpu.pci_bus_id,
        pcie_root=gpu.pcie_root,
        numa_node=gpu.numa_node,
        architecture=gpu.architecture,
        driver_version=gpu.driver_version,
        nvlink_generation=None if links is None else links.generation,
        nvlink_links=None if links is None else links.links,
        nvlink_bandwidth=None if links is None else links.bandwidth,
    )


def _explained(explanation: Explanation) -> PagePending:
    workload = workload_of(explanation.pods[0]) if explanation.pods else None
    return PagePending(
        claim=explanation.claim or None,
        pods=tuple(str(pod.metadata.key) for pod in explanation.pods[:MAX_NAMES]),
        pod_count=len(explanation.pods),
        workload=_clipped(f"{workload.kind} {workload.namespace}/{workload.name}") if workload is not None else None,
        created=explanation.pods[0].metadata.creation_timestamp if explanation.pods else None,
        reason=explanation.code,
        message=_clipped(explanation.message),
        holders=explanation.holders[:MAX_NAMES],
        holder_count=len(explanation.holders),
        changes=tuple(
            HelpfulChange(change.kind, _clipped(change.text), change.claims[:MAX_NAMES])
            for change in explanation.changes
        ),
        reports=tuple(_clipped(f"{pod}: {message}") for pod, message in explanation.reports[:MAX_NAMES]),
        is_explained=explanation.is_detailed,
    )


def _clipped(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
