"""Which GPUs of a map are shown, and how much of each product is free (pure)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from controller.report.map_model import FreePartition, Holder, MapGpu, MapNode, NodeState, Value
from controller.report.slice_states import SliceState

UNUSABLE = frozenset({NodeState.CORDONED, NodeState.NOT_READY, NodeState.UNREPORTED, NodeState.INCOMPLETE})
"""States of nodes whose GPUs ``unhealthy`` selects."""

FREE_STATES = (SliceState.FREE, SliceState.OFFERED, SliceState.STRANDED)


@dataclass(frozen=True)
class MapFilter:
    """The GPUs to keep: those that match every given field. ``product`` is a part of the name, in any case."""

    nodes: tuple[str, ...] = ()
    product: str | None = None
    namespace: str | None = None
    device_class: str | None = None
    free: bool = False
    unhealthy: bool = False

    def apply(self, nodes: Iterable[MapNode]) -> tuple[MapNode, ...]:
        """The kept GPUs on their nodes. Nodes without any are left out, unless their state is asked for."""
        others = replace(self, nodes=())
        shows_empty = others == MapFilter()
        kept = []
        for node in nodes:
            if self.nodes and node.name not in self.nodes:
                continue
            is_unusable = bool(UNUSABLE & set(node.states))
            gpus = tuple(gpu for gpu in node.gpus if self._matches(gpu, is_unusable=is_unusable))
            if gpus or shows_empty or (is_unusable and others == MapFilter(unhealthy=True)):
                kept.append(msgspec.structs.replace(node, gpus=gpus))
        return tuple(kept)

    def __bool__(self) -> bool:
        return self != MapFilter()

    def _matches(self, gpu: MapGpu, *, is_unusable: bool) -> bool:
        """``is_unusable``: by the state of its node."""
        holders = holders_of(gpu)
        return (
            (self.product is None or self.product.casefold() in gpu.product.casefold())
            and (self.namespace is None or self.namespace in {holder.namespace for holder in holders})
            and (self.device_class is None or self.device_class in {holder.device_class for holder in holders})
            and (not self.free or any(gpu.slices.get(state) for state in FREE_STATES))
            and (not self.unhealthy or gpu.fault is not None or is_unusable)
        )


def holders_of(gpu: MapGpu) -> list[Holder]:
    return [span.holder for span in gpu.spans if span.holder is not None]


def classes_of(nodes: Iterable[MapNode]) -> list[str]:
    """The classes of all holders in order of names: a class has the same colour in every drawing of ``nodes``."""
    holders = (holder for node in nodes for gpu in node.gpus for holder in holders_of(gpu))
    return sorted({class_of(holder) for holder in holders})


def class_of(holder: Holder) -> str:
    """The class for people."""
    return holder.device_class or "(class unknown)"


class ProductSummary(Value, frozen=True):
    """What there is of one product.

    A free GPU can be allocated whole, a free node has only free GPUs. ``largest_partition`` is the largest that fits
    on any GPU, and ``largest_partition_gpus`` the number of GPUs on which it fits.
    """

    product: str
    nodes: int = 0
    free_nodes: int = 0
    gpus: int = 0
    free_gpus: int = 0
    unhealthy_gpus: int = 0
    slices: Mapping[SliceState, float] = msgspec.field(default_factory=dict)
    largest_partition: FreePartition | None = None
    largest_partition_gpus: int = 0

    def with_node(self, gpus: Sequence[MapGpu], *, is_free: bool) -> ProductSummary:
        """The same with a node that has these GPUs of the product."""
        partitions = Counter(gpu.largest_partition for gpu in gpus if gpu.largest_partition is not None)
        if self.largest_partition is not None:
            partitions[self.largest_partition] += self.largest_partition_gpus
        largest = max(partitions, default=None)
        return ProductSummary(
            product=self.product,
            nodes=self.nodes + 1,
            free_nodes=self.free_nodes + is_free,
            gpus=self.gpus + len(gpus),
            free_gpus=self.free_gpus + sum(gpu.is_whole for gpu in gpus),
            unhealthy_gpus=self.unhealthy_gpus + sum(gpu.fault is not None for gpu in gpus),
            slices={
                state: self.slices.get(state, 0) + sum(gpu.slices.get(state, 0) for gpu in gpus) for state in SliceState
            },
            largest_partition=largest,
            largest_partition_gpus=partitions[largest] if largest is not None else 0,
        )


class MapSummary:
    """Sums up nodes, one at a time: the map of a large cluster takes tens of MiB."""

    def __init__(self) -> None:
        self._products: dict[str, ProductSummary] = {}
        self._classes: set[str] = set()

    def add(self, node: MapNode) -> None:
        gpus: defaultdict[str, list[MapGpu]] = defaultdict(list)
        for gpu in node.gpus:
            gpus[gpu.product].append(gpu)
        for product, there in gpus.items():
            before = self._products.get(product) or ProductSummary(product)
            self._products[product] = before.with_node(there, is_free=node.is_whole)
        self._classes.update(classes_of([node]))

    @property
    def products(self) -> list[ProductSummary]:
        """In order of names."""
        return [self._products[product] for product in sorted(self._products)]

    @property
    def classes(self) -> list[str]:
        """As ``classes_of`` all nodes."""
        return sorted(self._classes)


def summarize(nodes: Iterable[MapNode]) -> list[ProductSummary]:
    """A summary of each product, in order of names."""
    summary = MapSummary()
    for node in nodes:
        summary.add(node)
    return summary.products
