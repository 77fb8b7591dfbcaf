"""Moves of held devices that would make room: the way out of fragmentation (pure).

A move leaves the device's profile as it is, and its claim satisfied: selectors, constraints, taints, one node. For full
GPUs, all devices of some GPUs are moved, to other GPUs on which something is held, so that no other whole GPU is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice
from typing import NamedTuple

from controller.cluster.fleet import FleetGpu
from controller.demand.feasibility import Nodes
from controller.demand.pending_claims import Queue
from controller.demand.requirements import ClaimRequirements, RefusedRequest
from controller.explain.reason import ClaimReason
from controller.explain.sources.selected_gpus import untolerated
from driver.kube.types import DeviceTaintRule, Key, Pod
from driver.model.device import Device
from driver.model.offer import FULL, DeviceKind, Spot
from driver.slices.slice_names import Pool

MAX_NODES = 8
"""Nodes on which moves are tried, those with the most free memory."""

MAX_MOVED, MAX_MOVED_FOR_WHOLE = 2, 8
"""Devices that are moved at once, all from one GPU; and those that are moved for full GPUs."""

MAX_ELSEWHERE = 64
"""GPUs of other nodes to which devices may be moved."""

MAX_TRIED = 4_000
"""GPUs on which places for devices of one node are looked for."""

NO_MOVES = "no moves of claims within a node were found that would help"


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


MayGo = Callable[[HeldDevice, str], bool]
"""Whether the pod that has a device could have it on a certain node, which may be its own."""


class Move(NamedTuple):
    """A device of a claim is moved to ``spot`` of ``target``, its own GPU or another one of its product."""

    claim: str
    device: Device
    source: FleetGpu
    target: FleetGpu
    spot: Spot

    def __str__(self) -> str:
        profile = "" if self.device.profile is None else f" ({self.device.profile.name})"
        if self.target.gpu.uuid == self.source.gpu.uuid:
            return f"{self.claim}{profile} to another place of gpu-{self.source.number}"
        node = "" if self.target.node == self.source.node else f" of node {self.target.node}"
        return f"{self.claim}{profile} from gpu-{self.source.number} to gpu-{self.target.number}{node}"


KnownMoves = dict[tuple[tuple[ClaimRequirements, ...], tuple[Nodes, bytes]], str]
"""What moves would do, by the requirements of a pod's claims and what decides on which nodes it may run."""


def with_moves(reason: ClaimReason, queue: Queue, remembered: KnownMoves, may_go: MayGo | None = None) -> ClaimReason:
    """``reason`` with the moves that would help; without ``may_go``, that there are none is said, too."""
    pending = reason.pending
    key = (tuple(queue.combinations(pending.pods[0])), queue.exclusion_key(pending))
    if key not in remembered:
        remembered[key] = moves_text(moves_that_help(queue, pending.pods[0], may_go))
    text = remembered[key] or ("" if may_go else NO_MOVES)
    return reason._replace(sentence=f"{reason.sentence}; {text}" if text else reason.sentence, moves=remembered[key])


def moves_text(moves: Sequence[Move]) -> str:
    """What ``moves`` would do; empty without moves."""
    node = moves[0].source.node if moves else ""
    return f"on node {node} moving {', '.join(map(str, moves))} would make room" if moves else ""


def moves_that_help(queue: Queue, pod: Pod, may_go: MayGo | None = None) -> tuple[Move, ...]:
    """The fewest moves after which one node has room for ``pod``; empty if none were found.

    With ``may_go`` to other nodes, too, and for full GPUs only.
    """
    alternatives, nodes = list(queue.combinations(pod)), queue.nodes_for(pod)
    feasibility, fleet, whole = queue.feasibility, queue.feasibility.fleet, whole_gpus(queue, pod)
    if may_go is not None and not whole:
        return ()
    able = {node for needed in alternatives for node in feasibility.unheld.nodes_that_may_fit(needed, nodes)}
    partly_held = (gpu for node in feasibility.nodes for gpu in fleet.nodes[node] if gpu.held and gpu.state.free)
    elsewhere = list(islice(partly_held, MAX_ELSEWHERE)) if may_go is not None else []
    chosen = [node for node in reversed(feasibility.nodes) if node in able][:MAX_NODES]
    arrangements = [_Arrangements(queue, node, whole, elsewhere, may_go) for node in chosen]
    for count in range(1, 1 + (MAX_MOVED_FOR_WHOLE if whole else MAX_MOVED)):
        for arrangement in arrangements:
            for moves, after in arrangement.moved(count):
                if any(feasibility.fits_on(after, needed) for needed in alternatives):
                    return moves
    return ()


def whole_gpus(queue: Queue, pod: Pod) -> int:
    """The number of full GPUs that ``pod`` waits for; 0 if other devices would do, or are needed, too."""
    alternatives, nodes = list(queue.combinations(pod)), queue.nodes_for(pod)
    selectors = {request.selector for needed in alternatives for request in needed.requests}
    kinds = {selected.kind for selector in selectors for selected in queue.feasibility.kinds(selector, nodes)}
    return max(sum(needed.counts) for needed in alternatives) if kinds == {FULL} else 0


class _Arrangements:
    """The GPUs of one node with some of their devices at other places, also on GPUs ``elsewhere``.

    ``whole``: the number of GPUs that should become whole, all devices of which are moved; 0: those of one GPU are.
    """

    def __init__(
        self, queue: Queue, node: str, whole: int, elsewhere: Iterable[FleetGpu], may_go: MayGo | None
    ) -> None:
        self._matching, self._rules = queue.feasibility.matching, queue.cluster.taint_rules
        self._whole, self._may_go, self._tries_left = whole, may_go, MAX_TRIED
        self._own = {gpu.gpu.uuid: gpu for gpu in queue.feasibility.fleet.nodes[node]}
        self._gpus = self._own | {gpu.gpu.uuid: gpu for gpu in elsewhere if gpu.node != node}
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
                    for gpu in self._own.values()
                    for device in gpu.held
                    if device.name in request_of
                ]
        return []

    def moved(self, count: int) -> Iterator[tuple[tuple[Move, ...], tuple[FleetGpu, ...]]]:
        """Every choice of ``count`` devices with places for them, and the GPUs of the node after it."""
        for chosen in self._chosen(count):
            after = dict(self._gpus)
            for item in chosen:
                uuid = item.gpu.gpu.uuid
                after[uuid] = after[uuid].holding(at for at in after[uuid].held if at.name != item.device.name)
            for targets, arranged in self._arranged(chosen, after):
                if self._are_satisfied(chosen, targets):
                    places = zip(chosen, targets, strict=True)
                    moves = tuple(Move(item.claim, item.device, item.gpu, *target) for item, target in places)
                    yield moves, tuple(arranged[uuid] for uuid in self._own)

    def _chosen(self, count: int) -> Iterator[tuple[HeldDevice, ...]]:
        """``count`` devices of one GPU, or all those of as many GPUs as have to become whole."""
        partitions = (item for of_claim in self._of_claims.values() for item in of_claim)
        in_order = sorted(partitions, key=lambda item: item.device.name)
        of_gpus = [
            [item for item in in_order if item.gpu is gpu and item.device.kind is DeviceKind.PARTITION]
            for gpu in self._own.values()
        ]
        if not self._whole:
            return chain.from_iterable(combinations(items, count) for items in of_gpus)
        movable = [items for items in of_gpus if items and len(items) == len(items[0].gpu.held)]
        missing = self._whole - sum(gpu.state.whole for gpu in self._own.values())
        emptied = map(chain.from_iterable, combinations(movable, max(1, missing)))
        return (items for items in map(tuple, emptied) if len(items) == count)

    def _arranged(
        self, items: Sequence[HeldDevice], gpus: Mapping[str, FleetGpu]
    ) -> Iterator[tuple[tuple[tuple[FleetGpu, Spot], ...], Mapping[str, FleetGpu]]]:
        """Ways to place ``items``: on the first other GPU with room of each node, or elsewhere on its own."""
        if not items:
            yield (), gpus
            return
        (first, *others), tried = items, set[str]()
        for uuid, gpu in gpus.items():
            is_home, is_alike = uuid == first.gpu.gpu.uuid, gpu.gpu.product_name == first.gpu.gpu.product_name
            if not is_alike or (self._whole and not gpu.held) or (gpu.node in tried and not is_home):
                continue
            if self._tries_left == 0:
                return
            self._tries_left -= 1
            free = (at for at in gpu.state.spots(first.device.spot.kind) if at != first.device.spot or not is_home)
            places = [at for at in free if first.may_be_on(gpu, at, self._rules, self._matching.driver)]
            if places and self._may_go is not None and not self._may_go(first, gpu.node):
                continue
            tried |= {gpu.node} if places and not is_home else set()
            for spot in places if is_home else places[:1]:
                device = gpu.device(spot)
                held = gpu if device is None else gpu.holding((*gpu.held, device))
                for targets, arranged in self._arranged(others, {**gpus, uuid: held}):
                    yield ((gpu, spot), *targets), arranged

    def _are_satisfied(self, items: Sequence[HeldDevice], targets: Sequence[tuple[FleetGpu, Spot]]) -> bool:
        """Whether the claims of ``items`` are on one node each and satisfied when these are at ``targets``."""
        moved = {(item.claim, item.device.name): target for item, target in zip(items, targets, strict=True)}
        for claim in {item.claim for item in items}:
            devices = self._of_claims[claim]
            at = [moved.get((claim, item.device.name), (item.gpu, item.device.spot)) for item in devices]
            if len({gpu.node for gpu, _ in at}) > 1:
                return False
            for constraint in devices[0].requirements.constraints:
                values = [
                    self._matching.value(*place, constraint.attribute)
                    for item, place in zip(devices, at, strict=True)
                    if item.index in constraint.requests
                ]
                different = len(set(values))
                if None in values or (different != len(values) if constraint.distinct else different > 1):
                    return False
        return True
