"""What the demo shows of slices, GPUs and CDI specs, as text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from driver.model.gpu import Gpu
from tessera.tables_and_drawings import Span, columns, draw_slices

Slice = Mapping[str, Any]


def slices_table(slices: Iterable[Slice]) -> str:
    """ResourceSlices, one a line."""
    rows = []
    for item in slices:
        spec = item["spec"]
        devices = spec.get("devices") or []
        gpus = sorted({device["name"].split("-mig-")[0] for device in devices})
        sets = spec.get("sharedCounters") or []
        content = ", ".join(gpus) or (f"{len(sets)} counter sets, one a GPU" if sets else "nothing")
        rows.append([item["metadata"]["name"], str(spec["pool"]["generation"]), str(len(devices)), content])
    return columns(["RESOURCESLICE", "GENERATION", "DEVICES", "OF"], rows)


def offers_table(slices: Iterable[Slice], only: int = 8) -> str:
    """How many devices of each profile every GPU has in the slices."""
    counts: dict[str, Counter[str]] = {}
    for item in slices:
        for device in item["spec"].get("devices") or []:
            profile = device["attributes"]["profile"]["string"]
            counts.setdefault(device["name"].split("-mig-")[0], Counter())[profile] += 1
    profiles = sorted({name for found in counts.values() for name in found if name != "none"})
    rows = [
        [gpu, "yes" if found["none"] else "-", *(str(found[name] or "-") for name in profiles)]
        for gpu, found in sorted(counts.items())[:only]
    ]
    return columns(["GPU", "FULL", *profiles], rows)


def placements_drawing(gpu: Gpu) -> str:
    """Every legal placement of every profile of a GPU, drawn over its memory slices."""
    lines = []
    for profile in sorted(gpu.profiles, key=lambda profile: (profile.compute_slices, profile.name)):
        for row in _side_by_side([(place.start, place.size) for place in profile.placements]):
            spans = [Span(start, size, profile.name) for start, size in row]
            lines.append(f"{profile.name:<11} {draw_slices(gpu.memory_slices, spans, width=10)}")
    return "\n".join(lines)


def _side_by_side(placements: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Placements in as few rows as possible without overlap."""
    rows: list[list[tuple[int, int]]] = []
    for start, size in sorted(placements):
        for row in rows:
            if row[-1][0] + row[-1][1] <= start:
                row.append((start, size))
                break
        else:
            rows.append([(start, size)])
    return rows


def cdi_essentials(path: Path) -> str:
    """The part of a CDI spec that differs from claim to claim."""
    spec = json.loads(path.read_text())
    lines = [str(path), f"kind: {spec['kind']}"]
    for device in spec["devices"]:
        edits = device["containerEdits"]
        lines += [f"device: {device['name']}", *(f"  env     {entry}" for entry in edits["env"])]
        lines += [f"  node    {_node(node)}" for node in edits["deviceNodes"]]
    lines.append(f"for every device: {', '.join(spec['containerEdits']['env'])}")
    lines.append(f"  {len(spec['containerEdits']['mounts'])} read-only mounts of driver files")
    return "\n".join(lines)


def _node(node: Mapping[str, Any]) -> str:
    return f"{node['path']} (char {node['major']}:{node['minor']})" if "major" in node else node["path"]
