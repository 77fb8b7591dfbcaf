"""Moves of held devices within a node that would make room: the way out of fragmentation (pure).

A move leaves the device's profile as it is, and its claim satisfied: selectors, constraints, taints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import NamedTuple

from controller.cluster.fleet import FleetGpu
from controller.demand.pending_claims import Queue
from controller.demand.requirements import ClaimRequirements, RefusedRequest
from controller.explain.sources.selected_gpus import untolerated
from driver.kube.types import DeviceTaintRule, Key
from driver.model.device import Device
from driver.model.offer import DeviceKind, Spot
from driver.slices.slice_names import Pool

MAX_NODES = 8
"""Nodes on which moves are tried, those with the most free memory."""

MAX_MOVED = 2
"""Devices that are moved at once, all from one GPU."""


MAX_TRIED = 2_000
"""Arrangements that are tried on one node."""


@dataclass(frozen=True)
class HeldDevice:
    """A device on ``gpu``, and the requirements of its claim, of whose requests ``index`` has it."""

    claim: str
    requirements: ClaimRequirements
    index: int
    gpu: FleetGpu
    device: Device

    def may_be_on(self, gpu: FleetGpu, spot: Spot, rules: Iterable[DeviceTaintRule], driver: str) -> bool:
        """Whether its request selects the device of ``gpu`` that is at ``spot`` and tolerates its taints."""
        request, device = self.requirements.requests[self.index], gpu.device(spot)
        pool = Pool(gpu.node, driver).name
        return (
            device is not None
            and request.selector.on(gpu).has(*spot)
            and not any(rule.selects(driver, pool, device.name) for rule in untolerated(rules, [request]))
        )


class Move(NamedTuple):
    """A device of a claim is moved to another place of its GPU, or to another GPU of its node and product."""

    claim: str
    device: Device
    source: FleetGpu
    target: FleetGpu

    def __str__(self) -> str:
        profile = "" if self.device.profile is None else f" ({self.device.profile.name})"
        if self.target.number == self.source.number:
            return f"{self.claim}{profile} to another place of gpu-{self.source.number}"
        return f"{self.claim}{profile} from gpu-{self.source.number} to gpu-{self.target.number}"


def moves_that_help(queue: Queue, requirements: ClaimRequirements, nodes: Sequence[str]) -> tuple[Move, ...]:
    """The fewest moves on one of ``nodes`` after which it satisfies ``requirements``; empty if none were found."""
    arrangements = {node: _Arrangements(queue, node) for node in nodes[:MAX_NODES]}
    for count in range(1, MAX_MOVED + 1):
        for arrangement in arrangements.values():
            for moves, after in islice(arrangement.moved(count), MAX_TRIED):
                if queue.feasibility.fits_on(after, requirements):
                    return moves
    return ()


class _Arrangements:
    """The GPUs of one node with some of their devices at other places."""

    def __init__(self, queue: Queue, node: str) -> None:
        self._matching, self._rules = queue.feasibility.matching, queue.cluster.taint_rules
        self._gpus = {gpu.number: gpu for gpu in queue.feasibility.fleet.nodes[node]}
        names: dict[str, list[str]] = {}
        for (where, device), claims in queue.holders.items():
            for claim in claims if where == node else ():
                names.setdefault(claim, []).append(device)
        self._of_claims = {claim: self._held(queue, claim, devices) for claim, devices in names.items()}
        """The devices of each claim; none if what it requires is not known."""

    def _held(self, queue: Queue, name: str, devices: Sequence[str]) -> list[HeldDevice]:
        namespace, _, claim_name = name.partition("/")
        claim = queue.cluster.claims.find(Key(namespace, claim_name))
        read = () if claim is None else queue.reader.read(claim).requirements
        if claim is None or isinstance(read, RefusedRequest) or len(claim.results) != len(devices):
            return []  # devices of other drivers may be bound to these
        request_of = {result.device: result.request for result in claim.results}
        for requirements in read:
            indices = {request.name: index for index, request in enumerate(requirements.requests)}
            if indices.keys() >= set(request_of.values()):
                return [
                    HeldDevice(name, requirements, indices[request_of[device.name]], gpu, device)
                    for gpu in self._gpus.values()
                    for device in gpu.held
                    if device.name in request_of
                ]
        return []

    def moved(self, count: int) -> Iterator[tuple[tuple[Move, ...], tuple[FleetGpu, ...]]]:
        """Every choice of ``count`` devices of one GPU with places for them, and the GPUs after it."""
        for source in self._gpus.values():
            held = [item for items in self._of_claims.values() for item in items if item.gpu is source]
            partitions = sorted(
                (item for item in held if item.device.kind is DeviceKind.PARTITION), key=lambda item: item.device.name
            )
            for chosen in combinations(partitions, count):
                names = {item.device.name for item in chosen}
                after = {**self._gpus, source.number: source.holding(at for at in source.held if at.name not in names)}
                for targets, arranged in self._arranged(chosen, after):
                    if self._are_satisfied(chosen, targets):
                        moves = [
                            Move(item.claim, item.device, source, gpu)
                            for item, (gpu, _) in zip(chosen, targets, strict=True)
                        ]
                        yield tuple(moves), tuple(arranged.values())

    def _arranged(
        self, items: Sequence[HeldDevice], gpus: Mapping[int, FleetGpu]
    ) -> Iterator[tuple[tuple[tuple[FleetGpu, Spot], ...], Mapping[int, FleetGpu]]]:
        """Ways to place ``items``: on the first other GPU with room for each, or elsewhere on its own."""
        if not items:
            yield (), gpus
            return
        first, *others = items
        away, at_home = list[tuple[FleetGpu, Spot]](), list[tuple[FleetGpu, Spot]]()
        for gpu in gpus.values():
            is_home = gpu.number == first.gpu.number
            if gpu.gpu.product_name == first.gpu.gpu.product_name and (is_home or not away):
                free = (at for at in gpu.state.spots(first.device.spot.kind) if at != first.device.spot or not is_home)
                places = [(gpu, at) for at in free if first.may_be_on(gpu, at, self._rules, self._matching.driver)]
                at_home, away = (places, away) if is_home else (at_home, places[:1])
        for gpu, spot in (*away, *at_home):
            device = gpu.device(spot)
            held = gpu if device is None else gpu.holding((*gpu.held, device))
            for targets, arranged in self._arranged(others, {**gpus, gpu.number: held}):
                yield ((gpu, spot), *targets), arranged

    def _are_satisfied(self, items: Sequence[HeldDevice], targets: Sequence[tuple[FleetGpu, Spot]]) -> bool:
        """Whether the constraints of the claims of ``items`` hold when these are at ``targets``."""
        moved = {(item.claim, item.device.name): target for item, target in zip(items, targets, strict=True)}
        for claim in {item.claim for item in items}:
            devices = self._of_claims[claim]
            for constraint in devices[0].requirements.constraints:
                values = [
                    self._matching.value(
                        *moved.get((claim, item.device.name), (item.gpu, item.device.spot)), constraint.attribute
                    )
                    for item in devices
                    if item.index in constraint.requests
                ]
                different = len(set(values))
                if None in values or (different != len(values) if constraint.distinct else different > 1):
                    return False
        return True
