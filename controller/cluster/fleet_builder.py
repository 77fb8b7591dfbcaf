"""Building the fleet: the GPUs that nodes report, with the devices that claims hold on them."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from controller.cluster.fleet import Fleet, FleetGpu, parts_of
from controller.cluster.node_views import NodeChanges, NodeView
from driver.errors import StateError
from driver.model.device import Device, is_shared, is_shared_partition, share_device, shared_device
from driver.model.gpu import Gpu
from driver.model.offer import OF_SEVERAL
from driver.model.reported_gpus import FaultKind, GpuReport, decode_inventory
from driver.model.shared_memory import SHARING_FIELD, SharedMemory, SharingStrategy

log = logging.getLogger(__name__)

SHARE = re.compile(r"gpu-(?P<number>[0-9]{1,4})-share-(?P<index>[0-9]{1,2})")


@dataclass(frozen=True, slots=True)
class BuiltNode:
    """The GPUs of a node as they were built last: with nothing held, and as they are."""

    view: NodeView
    empty: tuple[FleetGpu, ...]
    gpus: tuple[FleetGpu, ...]


class FleetBuilder:
    """Builds the fleet from the views of the nodes, and renews only the GPUs of which something changed."""

    def __init__(self) -> None:
        self._built: dict[str, BuiltNode] = {}
        self._fleet = Fleet()
        self._distinct = True
        """Whether no GPU is on two nodes."""

    def build(self, views: Sequence[NodeView], changes: NodeChanges) -> Fleet:
        """The fleet of ``views``, all of which the last call had too but for ``changes``."""
        if changes.membership:
            return self._rebuild(views)
        old = [self._built[view.name] for view in changes.views]
        new = [self._node(view, before) for view, before in zip(changes.views, old, strict=True)]
        self._built |= {built.view.name: built for built in new}
        if not self._distinct or list(map(_hardware, old)) != list(map(_hardware, new)):
            return self._rebuild(views)
        pairs = ((was.gpus, now.gpus) for was, now in zip(old, new, strict=True))
        entries = [now for gpus in pairs for was, now in zip(*gpus, strict=True) if was is not now]
        if entries or any(was.view.held != now.view.held for was, now in zip(old, new, strict=True)):
            self._fleet = self._fleet.changed(entries)
        return self._fleet

    def _rebuild(self, views: Sequence[NodeView]) -> Fleet:
        self._built = {view.name: self._node(view, self._built.get(view.name)) for view in views}
        # A GPU that two nodes report belongs to the one that accepts offers: its node was registered by another name.
        ordered = sorted(views, key=lambda view: not view.why_no_offers)
        self._fleet = Fleet.of(gpu for view in ordered for gpu in self._built[view.name].gpus)
        self._distinct = sum(len(built.gpus) for built in self._built.values()) == len(self._fleet.gpus)
        return self._fleet

    def _node(self, node: NodeView, before: BuiltNode | None) -> BuiltNode:
        if before is not None and before.view is node:
            return before
        empty = before.empty if before is not None and _alike(before.view, node) else _empty(node, before)
        there = {entry.gpu.uuid: entry for entry in before.gpus} if before is not None else {}
        return BuiltNode(node, empty, tuple(_holding(node, entry, there.get(entry.gpu.uuid)) for entry in empty))


def _alike(before: NodeView, after: NodeView) -> bool:
    """Whether two views of a node differ at most in what is held and published."""
    return _of_gpus(before) == _of_gpus(after)


def _of_gpus(node: NodeView) -> tuple[object, ...]:
    """What the GPUs of a node with nothing held are made from."""
    status = node.status
    return (status.inventory, status.dropped, node.unable, node.dedication, node.why_no_offers)


def _hardware(built: BuiltNode) -> list[tuple[object, ...]]:
    return [(entry.gpu, entry.shares, entry.shared) for entry in built.gpus]


def _empty(node: NodeView, before: BuiltNode | None) -> tuple[FleetGpu, ...]:
    """The node's GPUs with nothing held; an unchanged GPU stays the same object."""
    there = {entry.gpu.uuid: entry.gpu for entry in before.empty} if before is not None else {}
    try:
        return tuple(_gpu(node, state, there.get(state.gpu.uuid)) for state in decode_inventory(node.status.inventory))
    except StateError as error:
        log.error(
            "the GPU inventory in a node's plan is unreadable: its GPUs are ignored",
            extra={"node": node.name, "error": str(error)},
        )
        return ()


def _gpu(node: NodeView, state: GpuReport, before: Gpu | None) -> FleetGpu:
    fault, fault_kind = state.fault, state.fault_kind
    if fault is None and node.unable is not None:  # a plugin that can't find its GPUs reports the condition alone
        fault, fault_kind = node.unable, FaultKind.UNHEALTHY
    lacks_sharing = SHARING_FIELD in node.status.dropped  # without the field, a device would be one claim's alone
    return FleetGpu(
        node=node.name,
        gpu=before if before == state.gpu and before is not None else state.gpu,
        number=state.number,
        shares=state.shares,
        shares_only=state.shares_only,
        foreign=state.foreign,
        fault=fault,
        fault_kind=fault_kind,
        uses=node.dedication.kinds(state.number) - (OF_SEVERAL if lacks_sharing else frozenset()),
        dedicated_by=node.dedication.label(state.number),
        why_no_offers=node.why_no_offers,
        shared=None if lacks_sharing else state.shared,
    )


def _holding(node: NodeView, empty: FleetGpu, before: FleetGpu | None) -> FleetGpu:
    """The GPU with its held devices, of which a share keeps its allocated size; an unchanged GPU stays the same."""
    held: list[Device] = []
    for name in node.held:
        share = SHARE.fullmatch(name)
        if share and int(share["number"]) == empty.number:
            shares = node.published.get(name, empty.shares) or 1
            held.append(share_device(empty.gpu, empty.number, int(share["index"]), shares))
        elif is_shared(name):
            device = empty.device_named(name) if is_shared_partition(name) else _shared_device(empty)
            held += parts_of(device, node.shared.get(name, ())) if device is not None and device.name == name else []
        elif not share and (device := empty.device_named(name)) is not None:
            held.append(device)
    gpu = empty.holding(held)
    return before if before is not None and before == gpu else gpu


def _shared_device(gpu: FleetGpu) -> Device:
    """The shared device of ``gpu``, which may not be shared any more."""
    shared = gpu.shared or SharedMemory(SharingStrategy.TIME_SLICING, gpu.gpu.memory_bytes)
    return shared_device(gpu.gpu, gpu.number, shared)
