"""Tables, pictures and JSON of a simulation (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from controller.cluster.fleet import FleetGpu
from controller.eviction.preemption_preview import Preview
from controller.explain.sources.selected_gpus import listed
from driver.kube.types import Result
from driver.model.offer import DeviceKind
from driver.model.shared_memory import MEMORY_CAPACITY
from tessera.simulate.fill import Filled
from tessera.simulate.imagined_cluster import ImaginedCluster
from tessera.simulate.scheduler import PodPlacement
from tessera.simulate.workloads import Workloads
from tessera.tables_and_drawings import Span, cell_width, columns, counted, draw_slices, printable

MAX_DRAWN_NODES = 16
"""Nodes that are drawn whether or not a pod was placed on them."""

SHOWN_REASONS = 2
"""Different reasons why pods are spared that are shown for a pod for which no pod would be evicted."""


class Totals(NamedTuple):
    """Pods that are placed or not, GPUs with devices that are held, nodes without any, and how many there are."""

    placed: int
    refused: int
    gpusUsed: int  # noqa: N815 - named as in the JSON
    gpus: int
    idleNodes: int  # noqa: N815
    nodes: int


@dataclass(frozen=True)
class Simulation:
    """``placements`` in order; ``given`` are the ids of the pods of the files, the others were pending before.

    ``fill`` is the class of ``--fill``, ``files`` what the files contain. ``is_short``: the text is the summary only.
    ``previews``: who would be evicted for pods without a place; None: that was not asked.
    """

    cluster: ImaginedCluster
    placements: Sequence[PodPlacement]
    given: Collection[int]
    fill: str | None
    filled: Filled | None
    files: Workloads
    is_short: bool = False
    previews: Sequence[Preview] | None = None

    @property
    def fits(self) -> bool:
        """Whether every pod of the files is placed, and could be tried."""
        given = (placement for placement in self.placements if id(placement.pod) in self.given)
        return not self.files.untried and all(placement.node is not None for placement in given)

    @property
    def text(self) -> str:
        """Tables for people, and a picture."""
        files, parts = self.files, list[str]()
        if files.ignored:
            parts.append(f"ignored: {', '.join(map(printable, files.ignored))}")
        parts += [
            f"NOT TRIED: {printable(item)}: it seems to make pods, but has no pod template" for item in files.untried
        ]
        parts += [f"note: {printable(note)}" for note in files.notes]
        if not self.is_short:
            parts += [*self._placed_text(), *self._reasons_text(), *self._victims_text(), *self._fill_text()]
            parts.append(self._picture())
        return "\n\n".join([*parts, self._summary_text()])

    @property
    def json(self) -> dict[str, Any]:
        """The same as plain objects, with all nodes."""
        fill: dict[str, Any] | None = None
        if self.filled is not None:
            by_node, by_product = self._counts(self.filled)
            counts = {"fits": by_node.total(), "byNode": dict(by_node), "byProduct": dict(by_product)}
            fill = {"class": self.fill, **counts, "nextDoesNotFit": list(self.filled.why)}
        files = self.files
        about_files = {"ignored": files.ignored, "notTried": files.untried, "notes": files.notes}
        tried = {"summary": self._totals()._asdict(), "placements": list(map(self._as_json, self.placements))}
        evictions = None if self.previews is None else [_eviction(preview) for preview in self.previews]
        return {**tried, **about_files, "evictions": evictions, "fill": fill, "gpus": list(self._gpus())}

    def _totals(self) -> Totals:
        fleet = self.cluster.fleet
        placed = sum(placement.node is not None for placement in self.placements)
        used = {gpu.node for gpu in fleet if gpu.held}
        return Totals(
            placed,
            len(self.placements) - placed,
            sum(bool(gpu.held) for gpu in fleet),
            len(fleet.gpus),
            len(fleet.nodes.keys() - used),
            len(fleet.nodes),
        )

    def _summary_text(self) -> str:
        placed, refused, used, gpus, idle, nodes = self._totals()
        pods = f"{counted(placed, 'pod')} placed, {refused} not; {used} of {gpus} GPUs in use"
        return f"{pods}; {idle} of {nodes} nodes with GPUs have nothing on them"

    def _placed_text(self) -> Iterator[str]:
        rows: list[tuple[str, ...]] = []
        for placement in self.placements:
            if placement.node is None:
                continue
            pod, node, also = self._name(placement), placement.node, listed(placement.elsewhere) or "-"
            rows += [
                (pod, claim.metadata.name, result.request, node, _with_amount(result), also)
                for claim, allocation in placement.allocations
                for result in allocation.devices.results
            ] or [(pod, "-", "-", node, "-", also)]
        yield from _table(("POD", "CLAIM", "REQUEST", "NODE", "DEVICE", "ALSO FITS ON"), rows)

    def _name(self, placement: PodPlacement) -> str:
        return f"{placement.pod.metadata.key}{'' if id(placement.pod) in self.given else ' (pending now)'}"

    def _reasons_text(self) -> Iterator[str]:
        rows = [
            (self._name(placement), reason.claim, reason.code or "-", reason.sentence)
            for placement in self.placements
            for reason in placement.reasons
        ]
        yield from _table(("NOT PLACED", "CLAIM", "REASON", "MESSAGE"), rows)

    def _victims_text(self) -> Iterator[str]:
        """Which pods would be evicted for which, and the pods for which none would be."""
        evictions = [_eviction(preview) for preview in self.previews or ()]
        rows = [
            (row["pod"], str(row["priority"]), row["node"], listed(row["victims"]), f"{row['gpuHours']:g}")
            for row in evictions
            if row["node"] is not None
        ]
        yield from _table(("ROOM FOR", "PRIORITY", "NODE", "IF THESE WERE EVICTED", "GPU HOURS LOST"), rows)
        others = [(row["pod"], str(row["priority"]), row["why"]) for row in evictions if row["node"] is None]
        yield from _table(("NO EVICTION FOR", "PRIORITY", "WHY"), others)

    def _fill_text(self) -> Iterator[str]:
        if self.filled is None:
            return
        by_node, by_product = self._counts(self.filled)
        yield f"{counted(by_node.total(), 'claim')} of class {self.fill} would still fit"
        if by_node:
            yield columns(("PRODUCT", "CLAIMS"), [(name, str(count)) for name, count in sorted(by_product.items())])
            yield columns(("NODE", "CLAIMS"), [(name, str(count)) for name, count in sorted(by_node.items())])
        yield from (f"the next claim does not fit: {printable(reason)}" for reason in self.filled.why)

    def _counts(self, filled: Filled) -> tuple[Counter[str], Counter[str]]:
        """The claims of ``--fill`` by node and by product; devices of other drivers have none."""
        fleet = self.cluster.fleet
        products = {(gpu.node, device.name): gpu.gpu.product_name for gpu in fleet for device in gpu.held}
        by_node = Counter({node: len(names) for node, names in filled.devices.items()})
        got = ((node, name) for node, names in filled.devices.items() for name in names)
        return by_node, Counter(products.get(device, "other") for device in got)

    def _picture(self) -> str:
        """A line for each GPU of the nodes on which pods were placed; of all nodes if they are few."""
        fleet = self.cluster.fleet
        used = {placement.node for placement in self.placements} | set(self.filled.devices if self.filled else ())
        nodes = [node for node in sorted(fleet.nodes) if len(fleet.nodes) <= MAX_DRAWN_NODES or node in used]
        gpus = [gpu for node in nodes for gpu in fleet.nodes[node]]
        if not gpus:
            return "no GPUs to draw"
        width = cell_width(span for gpu in gpus for span in _spans(gpu))
        rows = []
        for gpu in gpus:
            drawing = draw_slices(gpu.gpu.memory_slices, _spans(gpu), width)
            rows.append((gpu.node, f"gpu-{gpu.number}", drawing, gpu.gpu.product_name))
        return columns(("NODE", "GPU", "MEMORY SLICES AFTERWARDS", "PRODUCT"), rows)

    def _as_json(self, placement: PodPlacement) -> dict[str, Any]:
        claims = [
            {
                "claim": str(claim.metadata.key),
                "devices": [
                    {
                        "request": result.request,
                        "driver": result.driver,
                        "pool": result.pool,
                        "device": result.device,
                        **({"consumedCapacity": result.consumed_capacity} if result.consumed_capacity else {}),
                    }
                    for result in allocation.devices.results
                ],
            }
            for claim, allocation in placement.allocations
        ]
        return {
            "pod": str(placement.pod.metadata.key),
            "pendingNow": id(placement.pod) not in self.given,
            "node": placement.node,
            "alsoFitsOn": list(placement.elsewhere),
            "claims": claims,
            "reasons": [
                {"claim": reason.claim, "code": reason.code, "message": reason.sentence} for reason in placement.reasons
            ],
        }

    def _gpus(self) -> Iterator[dict[str, Any]]:
        for node, gpus in sorted(self.cluster.fleet.nodes.items()):
            holders = self.cluster.holders(node)
            for gpu in gpus:
                names = dict.fromkeys(device.name for device in gpu.held)
                held = [
                    {"device": name, "claim": holding.claim, **({"gib": holding.gib} if holding.gib else {})}
                    for name in names
                    for holding in holders.get(name, ())
                ]
                about = {"gpu": f"gpu-{gpu.number}", "uuid": gpu.gpu.uuid, "product": gpu.gpu.product_name}
                yield {"node": node, **about, "held": held}


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """``rows`` under ``header``; nothing without rows."""
    if rows:
        yield columns(header, [tuple(map(printable, row)) for row in rows])


def _eviction(preview: Preview) -> dict[str, Any]:
    """The victims for a pod; without any the reason."""
    chosen, spared = preview.preemption, Counter(pods.reason for pods in preview.search.spared)
    spared_because = [f"{reason} ({counted(count, 'time')})" for reason, count in spared.most_common(SHOWN_REASONS)]
    none = "; ".join(["no set of pods that may be evicted makes room for it", *spared_because])
    return {
        "pod": str(preview.search.pod.metadata.key),
        "priority": preview.search.pod.spec.priority,
        "node": None if chosen is None else chosen.node,
        "victims": [] if chosen is None else [pod for unit in chosen.units for pod in unit.pods],
        "gpuHours": 0.0 if chosen is None else chosen.cost.gpu_hours,
        "why": (preview.obstacle or none) if chosen is None else None,
        "unexamined": list(preview.unexamined),
    }


def _with_amount(result: Result) -> str:
    """The name of a device, with what the claim has of it if it is shared."""
    amounts = result.consumed_capacity or {}
    return f"{result.device} ({amounts[MEMORY_CAPACITY]})" if MEMORY_CAPACITY in amounts else result.device


def _spans(gpu: FleetGpu) -> list[Span]:
    """What takes the memory slices of a GPU."""
    slices = gpu.gpu.memory_slices
    shares = [device for device in gpu.held if device.kind is DeviceKind.SHARE]
    if shares:
        return [Span(0, slices, f"{len(shares)} of {shares[0].shares}")]
    if gpu.state.used:
        return [Span(0, slices, f"{gpu.state.used} of {gpu.state.room} GiB")]
    if gpu.fault is not None and not gpu.held:
        return [Span(0, slices, "unusable")]
    foreign = [Span(start, 1, "used") for start in range(slices) if gpu.foreign >> start & 1]
    return foreign + [
        Span(0, slices, "full")
        if device.placement is None or device.profile is None
        else Span(device.placement.start, device.placement.size, device.profile.name)
        for device in {device.name: device for device in gpu.held}.values()
    ]
