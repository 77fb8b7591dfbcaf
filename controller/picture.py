"""The cluster's GPUs as values, from what nodes say of themselves and what claims have (pure, but for a memory)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controller.dedication import UNDEDICATED, Dedication
from controller.fleet import Fleet, FleetGpu
from driver.errors import StateError
from driver.model.device import Device, DeviceKind, share_device
from driver.model.gpu import Gpu
from driver.model.plan import Held, PlanStatus
from driver.model.plan_gpus import GpuState, states_of

log = logging.getLogger(__name__)

SHARE = re.compile(r"gpu-(?P<number>\d+)-share-(?P<index>\d+)")


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node: what it says of its GPUs, what its slices have, what claims have, and its dedication.

    ``published`` maps the names of devices in its slices to how many shares of that kind a GPU has (1: no share).
    ``offered`` are the names of those that new claims may get.
    ``held`` maps the names of allocated devices to who has them. ``open``: new pods may come, and what is offered is
    ours to say; ``follows``: it does what its plan says. ``uid`` of the Node.
    """

    name: str
    uid: str
    pool: str
    status: PlanStatus
    published: Mapping[str, int]
    offered: frozenset[str]
    held: Mapping[str, Held]
    dedication: Dedication = UNDEDICATED
    open: bool = True
    follows: bool = True

    def uses(self, number: int) -> frozenset[DeviceKind]:
        """The kinds of device that GPU may be offered as."""
        return self.dedication.kinds(number) if self.open else frozenset()


@dataclass(frozen=True, slots=True)
class Known:
    """What was made of a node: its GPUs with nothing held, then as they are."""

    view: NodeView
    empty: tuple[FleetGpu, ...]
    gpus: tuple[FleetGpu, ...]


@dataclass
class Picture:
    """Makes the fleet, and only those GPUs anew of which something changed."""

    _known: dict[str, Known] = field(default_factory=dict)
    _fleet: Fleet = field(default_factory=Fleet)
    _nodes: Sequence[NodeView] = ()
    _distinct: bool = True
    """Whether no GPU is on two nodes."""

    def fleet(self, nodes: Sequence[NodeView]) -> Fleet:
        """Fast where most of ``nodes`` are the same objects, at the same places, as the last time."""
        before, self._nodes = self._nodes, nodes
        changed = [now for was, now in zip(before, nodes, strict=False) if was is not now]
        if len(before) != len(nodes) or any(now.name not in self._known for now in changed):
            return self._anew(nodes)
        old = [self._known[node.name] for node in changed]
        new = [self._node(node, known) for node, known in zip(changed, old, strict=True)]
        self._known |= {known.view.name: known for known in new}
        if not self._distinct or not all(map(_same_hardware, old, new)):
            return self._anew(nodes)
        entries = [entry for was, now in zip(old, new, strict=True) for entry in _differing(was.gpus, now.gpus)]
        self._fleet = self._fleet.changed(entries) if entries else self._fleet
        return self._fleet

    def _anew(self, nodes: Sequence[NodeView]) -> Fleet:
        self._known = {node.name: self._node(node, self._known.get(node.name)) for node in nodes}
        # A GPU whose node was registered again by another name is the new node's.
        ordered = sorted(nodes, key=lambda node: node.open)
        self._fleet = Fleet.of(gpu for node in ordered for gpu in self._known[node.name].gpus)
        self._distinct = sum(len(known.gpus) for known in self._known.values()) == len(self._fleet.gpus)
        return self._fleet

    def _node(self, node: NodeView, known: Known | None) -> Known:
        if known is not None and known.view is node:
            return known
        empty = known.empty if known is not None and _alike(known.view, node) else _empty(node, known)
        there = {entry.gpu.uuid: entry for entry in known.gpus} if known is not None else {}
        return Known(node, empty, tuple(_holding(node, entry, there.get(entry.gpu.uuid)) for entry in empty))


def _alike(before: NodeView, after: NodeView) -> bool:
    """Whether they are the same but for what is held."""
    return (before.status.inventory, before.dedication, before.open) == (
        after.status.inventory,
        after.dedication,
        after.open,
    )


def _same_hardware(before: Known, after: Known) -> bool:
    return [(entry.gpu, entry.shares) for entry in before.gpus] == [(entry.gpu, entry.shares) for entry in after.gpus]


def _differing(before: Sequence[FleetGpu], after: Sequence[FleetGpu]) -> list[FleetGpu]:
    return [now for was, now in zip(before, after, strict=True) if was is not now]


def _empty(node: NodeView, known: Known | None) -> tuple[FleetGpu, ...]:
    """The node's GPUs with nothing held; a GPU that is as it was stays the same object."""
    there = {entry.gpu.uuid: entry.gpu for entry in known.empty} if known is not None else {}
    return tuple(_gpu(node, state, there.get(state.gpu.uuid)) for state in _states(node))


def _states(node: NodeView) -> list[GpuState]:
    """The node's GPUs; none where it tells what we can't read: what it has stays, and nothing is added."""
    try:
        return states_of(node.status.inventory)
    except StateError as error:
        log.error("can't read what a node says of its GPUs", extra={"node": node.name, "error": str(error)})
        return []


def _gpu(node: NodeView, state: GpuState, before: Gpu | None) -> FleetGpu:
    return FleetGpu(
        node=node.name,
        gpu=before if before is not None and before == state.gpu else state.gpu,
        number=state.number,
        shares=state.shares,
        shares_only=state.shares_only,
        foreign=state.foreign,
        fault=state.fault,
        uses=node.uses(state.number),
    )


def _holding(node: NodeView, empty: FleetGpu, before: FleetGpu | None) -> FleetGpu:
    """The GPU with what is held on it; as it was before, where that is the same."""
    found = empty.holding(_held(node, empty))
    return before if before is not None and before == found else found


def _held(node: NodeView, gpu: FleetGpu) -> Sequence[Device]:
    """The held devices of one GPU; a share as it was given out, whatever the number of shares is now."""
    found = []
    for name in node.held:
        share = SHARE.fullmatch(name)
        if share and int(share["number"]) == gpu.number:
            shares = node.published.get(name, gpu.shares) or 1
            found.append(share_device(gpu.gpu, gpu.number, int(share["index"]), shares))
        elif not share and (device := gpu.device(name)) is not None:
            found.append(device)
    return found
