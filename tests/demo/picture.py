"""The GPUs of a cluster as text, and who is where on them. Pure: slices and claims in, a drawing out.

A full GPU is one bar, partitions are drawn to the scale of the GPU's memory slices, shares are cells of one size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from tessera.drawing import Span, draw_slices

Object = Mapping[str, Any]

INNER = 79
"""Characters between the brackets, separators included: 8 memory slices of 9, 10 shares of 7."""

USES = {"gpu": ("full", "green"), "mig": ("MIG", "cyan"), "share": ("shares", "yellow")}
"""What a GPU is used for, by its devices' ``type``: the word, and the colour where something is held."""


@dataclass(frozen=True, slots=True)
class Published:
    """A device as the slices of ``node`` have it."""

    node: str
    name: str
    attributes: Object

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
    """A pod and the device it has; ``claim`` is between them."""

    pod: str
    claim: str
    device: Published


def published(slices: Iterable[Object]) -> dict[tuple[str, str], Published]:
    """Every device by the names of its pool and its own."""
    return {
        (item["spec"]["pool"]["name"], device["name"]): Published(
            item["spec"]["nodeName"], device["name"], device["attributes"]
        )
        for item in slices
        for device in item["spec"].get("devices", ())
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
                found.append(Holding(pod["name"], claim["metadata"]["name"], device))
    return sorted(found, key=lambda holding: holding.pod)


def draw(slices: Sequence[Object], held: Iterable[Holding]) -> str:
    """All GPUs of all nodes, a line each, in order."""
    held = list(held)
    offered = list(published(slices).values())
    lines: list[str] = []
    node = ""
    for name, number, memory_slices in sorted(_gpus(slices)):
        devices = [device for device in offered if (device.node, device.gpu) == (name, number)]
        here = [holding for holding in held if (holding.device.node, holding.device.gpu) == (name, number)]
        if name != node:
            node = name
            lines.append(f"{name}   {devices[0].value('productName')}" if devices else name)
        lines.append(f"gpu-{number:<3} {_bar(devices, here, memory_slices)}")
    return "\n".join(lines)


def _gpus(slices: Iterable[Object]) -> Iterator[tuple[str, int, int]]:
    """Node, number and memory slices of every GPU: its counter set is there whatever is held or offered."""
    for item in slices:
        for counters in item["spec"].get("sharedCounters", ()):
            cells = sum(name.startswith("memory-slice-") for name in counters["counters"])
            yield item["spec"]["nodeName"], int(counters["name"].split("-")[1]), cells


def _bar(devices: Sequence[Published], held: Sequence[Holding], memory_slices: int) -> str:
    """One GPU: what it is used for, and its cells."""
    # Where several kinds are offered, what is held decides; a GPU on which nothing is held is full until then.
    kinds = {holding.device.value("type") for holding in held} or {device.value("type") for device in devices}
    kind = next((kind for kind in USES if kind in kinds), "gpu")
    shares = next((device.value("shares") for device in devices if kind == "share"), 1)
    cells = memory_slices if kind == "mig" else shares
    spans = [Span(*holding.device.place, holding.pod) for holding in held]
    word, colour = USES[kind]
    bar = draw_slices(cells, spans, width=(INNER - cells + 1) // cells)
    return f"{word:<7} {click.style(bar, fg=colour) if held else click.style(bar, dim=True)}"
