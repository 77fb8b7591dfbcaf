"""The use for which labels of a Node keep its GPUs, all or single ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from driver.config.suggestions import meant
from driver.model.offer import DeviceKind
from driver.model.plan import PUBLISH, PUBLISH_VALUES

DEDICATED_TO = "gpu.tessera.dev/dedicated-to"
"""Label of a node that is meant for one use; its GPUs are offered for that and for nothing else."""

OF_ONE_GPU = re.compile(r"gpu-(?P<number>0|[1-9]\d{0,3})\." + re.escape(DEDICATED_TO))
"""The same for one GPU, by the number in its devices' names; it has the last word about that GPU."""

USES: Mapping[str, frozenset[DeviceKind]] = {
    "training": frozenset({DeviceKind.FULL}),
    "inference": frozenset({DeviceKind.PARTITION, DeviceKind.SHARED_PARTITION}),
    "dev": frozenset({DeviceKind.SHARE, DeviceKind.SHARED}),
}
EVERY_USE = frozenset(DeviceKind)


class UseLabel(NamedTuple):
    """A label that dedicates the GPUs of a node, or one of them, to a use."""

    name: str
    use: str

    def __str__(self) -> str:
        return f"{self.name}={self.use}"


@dataclass(frozen=True)
class Dedication:
    """The use of a node (None: any), and of those of its GPUs that have one of their own, by number."""

    node: str | None = None
    gpus: Mapping[int, str] = field(default_factory=dict)

    def kinds(self, number: int) -> frozenset[DeviceKind]:
        """The kinds of device that GPU may be offered as."""
        return USES.get(self.gpus.get(number, self.node or ""), EVERY_USE)

    def label(self, number: int) -> UseLabel | None:
        """The label that decides about that GPU; None if none does."""
        if number in self.gpus:
            return UseLabel(f"gpu-{number}.{DEDICATED_TO}", self.gpus[number])
        return UseLabel(DEDICATED_TO, self.node) if self.node else None


UNDEDICATED = Dedication()


def dedication_of(labels: Mapping[str, str]) -> Dedication:
    """What the labels of a Node say; labels that say nothing sensible are ignored (``faults_in`` names them)."""
    uses = {label: use for label, use in labels.items() if use in USES}
    matches = ((OF_ONE_GPU.fullmatch(label), use) for label, use in uses.items())
    return Dedication(uses.get(DEDICATED_TO), {int(match["number"]): use for match, use in matches if match})


def faults_in(labels: Mapping[str, str], numbers: Collection[int]) -> list[str]:
    """A sentence for each of Tessera's labels that is ignored; ``numbers`` are the node's GPUs, if known."""
    return [fault for name, use in sorted(labels.items()) for fault in _faults(name, use, numbers)]


def _faults(name: str, use: str, numbers: Collection[int]) -> Iterator[str]:
    if name == PUBLISH and use not in PUBLISH_VALUES:
        yield f"label {name}={use} is ignored: accepted are {' and '.join(PUBLISH_VALUES)}{meant(use, PUBLISH_VALUES)}"
    if name != DEDICATED_TO and not name.endswith(f".{DEDICATED_TO}"):
        return
    gpu = OF_ONE_GPU.fullmatch(name)
    if gpu is None and name != DEDICATED_TO:
        yield f"label {name} is ignored: it names no GPU; write gpu-<number>.{DEDICATED_TO}, or {DEDICATED_TO} for all"
    elif use not in USES:
        yield f"label {name}={use} is ignored: {use!r} is no use; there are {', '.join(USES)}{meant(use, USES)}"
    elif gpu is not None and numbers and int(gpu["number"]) not in numbers:
        there = ", ".join(map(str, sorted(numbers)))
        yield f"label {name}={use} is ignored: the node has no GPU {gpu['number']}; there are {there}"
