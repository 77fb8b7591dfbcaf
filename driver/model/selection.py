"""Naming GPUs: by index, UUID or PCI address."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from driver.model.gpu import Gpu

ALL = "all"
ENTRY = re.compile(r"all|\d+|GPU-[0-9a-f-]+|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True)
class Selection:
    """Some of a node's GPUs. No entries mean none; ``all`` means every one."""

    entries: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Selection:
        """``0,GPU-...,0000:1b:00.0`` or ``all``. Raises ValueError naming the entry that is none of these."""
        entries = [entry.strip() for entry in text.split(",") if entry.strip()]
        for entry in entries:
            if not ENTRY.fullmatch(entry):
                raise ValueError(f"{entry!r} is no index (0), UUID (GPU-...) or PCI address (0000:1b:00.0), nor `all`")
        return cls(frozenset(entries))

    def __contains__(self, gpu: Gpu) -> bool:
        return bool(self.entries & {ALL, str(gpu.index), gpu.uuid, gpu.pci_bus_id})

    def unmatched(self, gpus: Sequence[Gpu]) -> list[str]:
        """Entries that name none of ``gpus``: a slip of the pen, or a GPU that is not there."""
        known = {ALL, *(name for gpu in gpus for name in (str(gpu.index), gpu.uuid, gpu.pci_bus_id))}
        return sorted(self.entries - known)


EVERY_GPU = Selection(frozenset({ALL}))
NO_GPU = Selection()
