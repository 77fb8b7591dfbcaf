"""The GPUs of a cluster as text, and who is where on them. Pure: slices and claims in, a drawing out.

A full GPU is one bar, partitions are drawn to the scale of the GPU's memory slices, shares are cells of one size. Cells
of a shared GPU have the memory of its smallest claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import click

from driver.model.shared_memory import gib_of
from tessera.tables_and_drawings import Span, draw_slices

Object = Mapping[str, Any]

INNER = 79
"""Characters between the brackets, separators included: 8 memory slices of 9, 10 shares of 7."""

USES = {"gpu": ("full", "green"), "mig": ("MIG", "cyan"), "share": ("shares", "yellow"), "shared": ("shared", "yellow")}
"""What a GPU is used for, by its devices' ``type``: the word, and the colour where something is held."""


@dataclass(frozen=True, slots=True)
class Published:
    """A device as the slices of ``node`` have it. ``gib``: what claims can have of a shared one."""

    node: str
    name: str
    attributes: Object
    gib: int = 0

    @property
    def gpu(self) -> int:
        """The GPU's number on its node."""
        return int(self.name.split("-")[1])

    def value(self, attribute: str) -> Any:
        """An attribute's value; None where the device has none of that name."""
        return next(iter(self.attributes.get(attribute, {}).values()), None)

    @property
    def place(self) -> tuple[int, int]:
        """First cell and number of cells: memory slices of a partition, 1 of the shares, 1 of 1 for a full GPU."""
        if self.value("type") == "mig":
            return self.value("placementStart"), self.value("placementSize")
        return (int(self.name.rpartition("-")[2]), 1) if self.value("type") == "share" else (0, 1)


@dataclass(frozen=True, slots=True)
class Holding:
    """A pod and the device it has; ``claim`` is between them. ``gib``, ``share_id``: what it has of a shared one."""

    pod: str
    claim: str
    device: Published
    gib: int = 0
    share_id: str = ""


def published(slices: Iterable[Object]) -> dict[tuple[str, str], Published]:
    """Every device by the names of its pool and its own."""
    return {
        (item["spec"]["pool"]["name"], device["name"]): Published(
            item["spec"]["nodeName"], device["name"], device["attributes"], _gib_of(device)
        )
        for item in slices
        for device in item["spec"].get("devices") or ()
    }


def holdings(slices: Iterable[Object], claims: Iterable[Object]) -> list[Holding]:
    """Which pod has which device, in order of pods. Raises KeyError for a held device that is not published."""
    devices = published(slices)
    found = []
    for claim in claims:
        status = claim.get("status", {})
        results = status.get("allocation", {}).get("devices", {}).get("results", ())
        for pod in status.get("reservedFor", ()):
            for result in results:
                device = devices[result["pool"], result["device"]]
                gib = gib_of(result.get("consumedCapacity"), 0) or 0
                name = claim["metadata"]["name"]
                found.append(Holding(pod["name"], name, device, gib, result.get("shareID", "")))
    return sorted(found, key=lambda holding: holding.pod)


@dataclass(frozen=True, slots=True)
class Row:
    """One GPU of the picture: what it is used for, its cells, and which pod has which of them."""

    node: str
    product: str
    gpu: int
    kind: str
    cells: int
    spans: tuple[Span, ...]


def rows(slices: Sequence[Object], held: Iterable[Holding]) -> list[Row]:
    """All GPUs of all nodes, in order."""
    held = list(held)
    offered = list(published(slices).values())
    found = []
    for node, number, memory_slices in sorted(_gpus(slices)):
        product = next((str(device.value("productName")) for device in offered if device.node == node), "")
        devices = [device for device in offered if (device.node, device.gpu) == (node, number)]
        here = [holding for holding in held if (holding.device.node, holding.device.gpu) == (node, number)]
        # Where several kinds are offered, what is held decides; a GPU on which nothing is held is full until then.
        kinds = {holding.device.value("type") for holding in here} or {device.value("type") for device in devices}
        kind = next((kind for kind in USES if kind in kinds), "gpu")
        shares = next((device.value("shares") for device in devices if kind == "share"), 1)
        spans = tuple(Span(*holding.device.place, holding.pod) for holding in here)
        cells = memory_slices if kind == "mig" else shares
        if kind == "shared":
            cells, spans = _parts(max(device.gib for device in devices), here)
        found.append(Row(node, product, number, kind, cells, spans))
    return found


def _parts(gib: int, held: Sequence[Holding]) -> tuple[int, tuple[Span, ...]]:
    """Number of cells of a shared GPU with ``gib``, and the cells of each claim: as many as it has memory of them."""
    cell = min((holding.gib for holding in held), default=gib)
    sizes = [holding.gib // cell for holding in held]
    ends = accumulate(sizes)
    parts = zip(ends, sizes, held, strict=True)
    return gib // cell, tuple(Span(end - size, size, holding.pod) for end, size, holding in parts)


def _gib_of(device: Object) -> int:
    policy = device.get("capacity", {}).get("memory", {}).get("requestPolicy", {})
    return gib_of({"memory": policy["default"]}, 0) or 0 if policy else 0


def draw(slices: Sequence[Object], held: Iterable[Holding]) -> str:
    """All GPUs as text, a line each below the line of their node."""
    lines: list[str] = []
    node = ""
    for row in rows(slices, held):
        if row.node != node:
            node = row.node
            lines.append(f"{node}   {row.product}" if row.product else node)
        word, colour = USES[row.kind]
        bar = draw_slices(row.cells, row.spans, width=(INNER - row.cells + 1) // row.cells)
        styled = click.style(bar, fg=colour) if row.spans else click.style(bar, dim=True)
        lines.append(f"gpu-{row.gpu:<3} {word:<7} {styled}")
    return "\n".join(lines)


def _gpus(slices: Iterable[Object]) -> Iterator[tuple[str, int, int]]:
    """Node, number and memory slices of every GPU: its counter set is there whatever is held or offered."""
    for item in slices:
        for counters in item["spec"].get("sharedCounters", ()):
            cells = sum(name.startswith("memory-slice-") for name in counters["counters"])
            yield item["spec"]["nodeName"], int(counters["name"].split("-")[1]), cells
