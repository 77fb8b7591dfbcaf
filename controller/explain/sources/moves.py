"""Moves of held devices within a node that would make room: the way out of fragmentation (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice
from typing import NamedTuple

from controller.cluster.fleet import FleetGpu
from controller.demand.feasibility import Feasibility
from controller.demand.requirements import ClaimRequirements
from driver.model.device import Device

MAX_NODES = 8
"""Nodes on which moves are tried, those with the most free memory."""

MAX_MOVED = 2
"""Devices that are moved at once, all from one GPU."""


MAX_TRIED = 2_000
"""Arrangements that are tried on one node."""


class Move(NamedTuple):
    """A claim whose only device is moved to another place of its GPU, or to another GPU of its node and product."""

    claim: str
    device: Device
    source: FleetGpu
    target: FleetGpu

    def __str__(self) -> str:
        profile = "" if self.device.profile is None else f" ({self.device.profile.name})"
        if self.target.number == self.source.number:
            return f"{self.claim}{profile} to another place of gpu-{self.source.number}"
        return f"{self.claim}{profile} from gpu-{self.source.number} to gpu-{self.target.number}"


def moves_that_help(
    feasibility: Feasibility,
    requirements: ClaimRequirements,
    nodes: Sequence[str],
    claim_of: Mapping[tuple[str, str], str],
) -> tuple[Move, ...]:
    """The fewest moves on one of ``nodes`` after which it satisfies ``requirements``; empty if none were found."""
    devices = Counter(claim_of.values())
    for count in range(1, MAX_MOVED + 1):
        for node in nodes[:MAX_NODES]:
            gpus = feasibility.fleet.nodes[node]
            movable = {
                name: claim for (where, name), claim in claim_of.items() if where == node and devices[claim] == 1
            }
            for moves, after in islice(_moved(gpus, movable, count), MAX_TRIED):
                if feasibility.fits_on(after, requirements):
                    return moves
    return ()


def _moved(
    gpus: Sequence[FleetGpu], movable: Mapping[str, str], count: int
) -> Iterator[tuple[tuple[Move, ...], tuple[FleetGpu, ...]]]:
    """Every choice of ``count`` devices of one GPU with places for them, and the GPUs after it.

    ``movable``: the claims of the devices that may be moved, by name.
    """
    for source in gpus:
        held = [device for device in source.held if device.name in movable and device.profile is not None]
        for chosen in combinations(held, count):
            after = {entry.number: entry for entry in gpus}
            after[source.number] = source.holding(device for device in source.held if device not in chosen)
            for targets, arranged in _arranged(chosen, source, after):
                moves = [
                    Move(movable[device.name], device, source, target)
                    for device, target in zip(chosen, targets, strict=True)
                ]
                yield tuple(moves), tuple(arranged[entry.number] for entry in gpus)


def _arranged(
    devices: Sequence[Device], source: FleetGpu, gpus: Mapping[int, FleetGpu]
) -> Iterator[tuple[tuple[FleetGpu, ...], Mapping[int, FleetGpu]]]:
    """Ways to place ``devices``, which ``source`` had: on the first other GPU with room, or elsewhere on their own."""
    if not devices:
        yield (), gpus
        return
    first, *others = devices
    alike = (gpu for gpu in gpus.values() if gpu.gpu.product_name == source.gpu.product_name)
    away = (gpu for gpu in alike if gpu.number != source.number)
    elsewhere = next(((gpu, spot) for gpu in away for spot in gpu.state.spots(first.spot.kind)), None)
    at_home = gpus[source.number]
    places = [] if elsewhere is None else [elsewhere]
    places += [(at_home, spot) for spot in at_home.state.spots(first.spot.kind) if spot != first.spot]
    for target, spot in places:
        device = target.device(spot)
        held = target if device is None else target.holding((*target.held, device))
        placed = {**gpus, target.number: held}
        for targets, arranged in _arranged(others, source, placed):
            yield (target, *targets), arranged
