"""Moves of held devices within a node that would make room: the way out of fragmentation (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from controller.cluster.fleet import FleetGpu
from controller.demand.device_search import Budget, Outcome, fits
from controller.demand.feasibility import Feasibility
from controller.demand.requirements import ClaimRequirements
from driver.model.device import Device
from driver.placement.state import Spot, key_of, spot_of

MAX_NODES = 8
"""Nodes on which moves are tried, those with the most free memory."""

MAX_MOVED = 2
"""Devices that are moved at once, all from one GPU."""


class Move(NamedTuple):
    """A claim whose only device is moved from one GPU to another of the same node and product."""

    claim: str
    device: Device
    source: FleetGpu
    target: FleetGpu

    def __str__(self) -> str:
        profile = "" if self.device.profile is None else f" ({self.device.profile.name})"
        return f"{self.claim}{profile} from gpu-{self.source.number} to gpu-{self.target.number}"


class Moves(NamedTuple):
    """What to move on ``node``; ``tried``: whether all nodes were looked at."""

    node: str
    moves: tuple[Move, ...]


def moves_that_help(
    feasibility: Feasibility,
    requirements: ClaimRequirements,
    nodes: Sequence[str],
    claim_of: Mapping[tuple[str, str], str],
) -> Moves | None:
    """The fewest moves after which one of ``nodes`` satisfies ``requirements``; None if none were found."""
    devices = Counter(claim_of.values())
    for count in range(1, MAX_MOVED + 1):
        for node in nodes[:MAX_NODES]:
            gpus = feasibility.fleet.nodes[node]
            movable = {
                (node, name): claim
                for (where, name), claim in claim_of.items()
                if where == node and devices[claim] == 1
            }
            for moves, after in _moved(gpus, movable, count):
                states = tuple(entry.state for entry in after)
                if fits(after, states, requirements, feasibility.matching.value, Budget()) is Outcome.FITS:
                    return Moves(node, moves)
    return None


def _moved(
    gpus: Sequence[FleetGpu], movable: Mapping[tuple[str, str], str], count: int
) -> Iterator[tuple[tuple[Move, ...], tuple[FleetGpu, ...]]]:
    """Every choice of ``count`` devices of one GPU, each moved to the first GPU with room, and the GPUs after it."""
    for source in gpus:
        own = [device for device in source.held if (source.node, device.name) in movable and device.profile is not None]
        for chosen in combinations(own, count):
            after = {entry.number: entry for entry in gpus}
            after[source.number] = source.holding(each for each in source.held if each not in chosen)
            moves = []
            for device in chosen:
                target = next((each for each in after.values() if _takes(each, device, source)), None)
                if target is None:
                    break
                after[target.number] = _with(target, device)
                moves.append(Move(movable[source.node, device.name], device, source, target))
            if len(moves) == count:
                yield tuple(moves), tuple(after[entry.number] for entry in gpus)


def _takes(target: FleetGpu, device: Device, source: FleetGpu) -> bool:
    alike = target.gpu.product_name == source.gpu.product_name
    return alike and target.number != source.number and _spot(target, device) is not None


def _spot(target: FleetGpu, device: Device) -> Spot | None:
    return next(iter(target.state.spots(key_of(device))), None)


def _with(target: FleetGpu, device: Device) -> FleetGpu:
    spot = _spot(target, device)
    found = next(each for each in target.devices if spot_of(each) == spot)
    return target.holding((*target.held, replace(found, gpu=target.gpu)))
