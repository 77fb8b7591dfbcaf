"""Labels of Nodes that say which GPUs they have, for programs that choose nodes by label.

Kueue's topology-aware scheduling and PodGroups keep a gang on nodes that have one value of a label: the fabric clique
is the NVLink domain. Labels are written by server-side apply with field managers of their own, so that only what was
written here is ever changed or removed. NVIDIA's labels are also written by other programs, whose values are kept.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from controller.cluster.fleet import Fleet
from driver.errors import CONFLICT, FORBIDDEN, INVALID, NOT_FOUND, ApiError
from driver.kube.client import KubeClient, Object
from driver.kube.types import Node
from driver.kube.work_loop import Loop
from driver.model.gpu import Gpu

log = logging.getLogger(__name__)

NODES = "/api/v1/nodes"
VALUE_LIMIT = 63
NO_VALUE = re.compile(r"[^A-Za-z0-9_.-]+")

COALESCE_SECONDS = 0.2
"""Time in which changes are collected: a Node that is written wakes the scheduler."""

FINAL = (NOT_FOUND, CONFLICT, FORBIDDEN, INVALID)
"""The Node is another by now; somebody else has the label; this account may not write it. Trying again is useless."""


def label_value(text: str) -> str:
    """``text`` as the value of a label: ``NVIDIA-H100-80GB-HBM3``."""
    return NO_VALUE.sub("-", text)[:VALUE_LIMIT].strip("-_.")


@dataclass(frozen=True)
class LabelSet:
    """Labels with one field manager. A label is left out where the node's GPUs differ, or do not have it.

    ``takes_over``: the names are Tessera's, so whatever somebody else wrote there is replaced.
    """

    manager: str
    takes_over: bool
    facts: Mapping[str, Callable[[Gpu], object]]
    count: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.facts, *filter(None, [self.count]))

    def of(self, gpus: Sequence[Gpu]) -> dict[str, str]:
        values = {name: {read(gpu) for gpu in gpus} for name, read in self.facts.items()}
        common = {name: found.pop() for name, found in values.items() if len(found) == 1}
        written = {name: label_value(str(value)) for name, value in common.items() if value is not None}
        return written | ({self.count: str(len(gpus))} if self.count is not None else {})

    def apply(self, client: KubeClient, node: str, uid: str, labels: Mapping[str, str]) -> None:
        """Let the node have ``labels`` of this set and no others. Raises ApiError."""
        metadata = {"name": node, "uid": uid, "labels": dict(labels)}
        body: Object = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
        client.apply(f"{NODES}/{node}", body, self.manager, force=self.takes_over)


OWN = LabelSet(
    "tessera-node-labels",
    takes_over=True,
    facts={
        "gpu.tessera.dev/product": lambda gpu: gpu.product_name,
        "gpu.tessera.dev/driver-version": lambda gpu: gpu.driver_version,
        "gpu.tessera.dev/nvlink-generation": lambda gpu: gpu.nvlink and gpu.nvlink.generation,
        "gpu.tessera.dev/fabric-clique": lambda gpu: gpu.fabric_clique,
    },
    count="gpu.tessera.dev/count",
)
NVIDIA = LabelSet(
    "tessera-nvidia-labels",
    takes_over=False,
    facts={
        "nvidia.com/gpu.product": lambda gpu: gpu.product_name,
        "nvidia.com/gpu.clique": lambda gpu: gpu.fabric_clique,
    },
)

LABEL_SETS: Mapping[str, tuple[LabelSet, ...]] = {"none": (), "tessera": (OWN,), "all": (OWN, NVIDIA)}
"""By the value of ``--node-labels``."""


class Write(NamedTuple):
    """A write of one set of labels to one Node, which had ``present`` of that set before and gets ``values``."""

    labels: LabelSet
    node: str
    uid: str
    values: Mapping[str, str]
    present: Mapping[str, str]


class NodeLabels:
    """Finds Nodes with wrong labels as decisions are made, and writes them in the thread of ``loop``."""

    def __init__(self, client: KubeClient, sets: Sequence[LabelSet]) -> None:
        self._client, self._sets = client, sets
        self.loop = Loop("writing labels of nodes", self._write_due, COALESCE_SECONDS)
        self._lock = threading.Lock()
        self._due: dict[tuple[str, str], Write] = {}
        """By node and field manager."""
        self._refused: dict[tuple[str, str], Write] = {}
        """Refused writes are not repeated until the labels change."""

    def update(self, nodes: Iterable[Node], changed: Iterable[str], fleet: Fleet) -> None:
        """Compare the labels of the nodes that ``changed`` with their GPUs. Nodes without a report are left alone."""
        if not self._sets:
            return
        node_of = {node.metadata.name: node for node in nodes}
        with self._lock:
            for name in changed:
                self._compare(name, node_of.get(name), [entry.gpu for entry in fleet.nodes.get(name, ())])
            due = bool(self._due)
        if due:
            self.loop.notify()

    def _compare(self, name: str, node: Node | None, gpus: Sequence[Gpu]) -> None:
        """The caller holds the lock."""
        for labels in self._sets:
            key = (name, labels.manager)
            self._due.pop(key, None)
            if node is None:
                self._refused.pop(key, None)
            elif gpus:
                present = {label: value for label, value in node.metadata.labels.items() if label in labels.names}
                write = Write(labels, name, node.metadata.uid, labels.of(gpus), present)
                if present == write.values:
                    self._refused.pop(key, None)
                elif self._refused.get(key) != write:
                    self._due[key] = write

    def _write_due(self) -> None:
        """Raises ApiError where another attempt may succeed."""
        while True:
            with self._lock:
                if not self._due:
                    return
                key, write = self._due.popitem()
            try:
                write.labels.apply(self._client, write.node, write.uid, write.values)
            except ApiError as error:
                with self._lock:
                    if error.status not in FINAL:
                        self._due.setdefault(key, write)
                        raise
                    self._refused[key] = write
                log.warning("labels of a node are not written", extra={"node": write.node, "error": str(error)})
