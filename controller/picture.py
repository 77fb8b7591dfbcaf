"""The cluster's GPUs as values, from what nodes say of themselves and what claims have (pure, but for a memory)."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from controller.dedication import UNDEDICATED, Dedication
from controller.fleet import Fleet, FleetGpu
from driver.errors import StateError
from driver.model.device import Device, DeviceKind, share_device
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


@dataclass
class Picture:
    """Makes the fleet, and only those nodes anew of which something changed."""

    _known: dict[str, tuple[object, tuple[FleetGpu, ...]]] = field(default_factory=dict)

    def fleet(self, nodes: Collection[NodeView]) -> Fleet:
        found = {node.name: self._node(node) for node in nodes}
        self._known = {name: self._known[name] for name in found}
        # A GPU whose node was registered again by another name is the new node's.
        ordered = sorted(nodes, key=lambda node: node.open)
        return Fleet.of(gpu for node in ordered for gpu in found[node.name])

    def _node(self, node: NodeView) -> tuple[FleetGpu, ...]:
        facts = (node.status.inventory, frozenset(node.held), node.dedication, node.open)
        known = self._known.get(node.name)
        if known is None or known[0] != facts:
            known = self._known[node.name] = (facts, tuple(_gpu(node, state) for state in _states(node)))
        return known[1]


def _states(node: NodeView) -> list[GpuState]:
    """The node's GPUs; none where it tells what we can't read: what it has stays, and nothing is added."""
    try:
        return states_of(node.status.inventory)
    except StateError as error:
        log.error("can't read what a node says of its GPUs", extra={"node": node.name, "error": str(error)})
        return []


def _gpu(node: NodeView, state: GpuState) -> FleetGpu:
    empty = FleetGpu(
        node=node.name,
        gpu=state.gpu,
        number=state.number,
        shares=state.shares,
        shares_only=state.shares_only,
        foreign=state.foreign,
        fault=state.fault,
        uses=node.uses(state.number),
    )
    return empty.holding(_held(node, empty))


def _held(node: NodeView, gpu: FleetGpu) -> Sequence[Device]:
    """The held devices of one GPU; a share as it was given out, whatever the number of shares is now."""
    known = {device.name: device for device in gpu.devices}
    found = []
    for name in node.held:
        share = SHARE.fullmatch(name)
        if share and int(share["number"]) == gpu.number:
            shares = node.published.get(name, gpu.shares) or 1
            found.append(share_device(gpu.gpu, gpu.number, int(share["index"]), shares))
        elif name in known:
            found.append(known[name])
    return found
