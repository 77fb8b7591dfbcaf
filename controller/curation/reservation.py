"""Memory that is kept for a pod that waits in vain (pure but for what the class remembers).

The GPUs of pods that are evicted for it are reserved in the fence (``controller.eviction``). Nothing is offered there
but what it may have: else the scheduler would choose the rest for other pods again and again.

With disjoint offers the controller decides which claim gets free memory. A pod for which there is no room at first does
not keep others from using it. After ``WAIT_SECONDS`` the first such pod gets a reservation: nothing new is offered on
the GPUs with the most free memory that would satisfy it once they are free. One pod at a time has a reservation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import replace

from controller.cluster.claim_index import PoolDevice, gpu_of
from controller.cluster.fleet import Fleet, FleetGpu
from controller.demand.device_search import Budget, choose_devices
from controller.demand.pending_claims import Queue
from controller.demand.selected_devices import Selector
from driver.clock import Clock
from driver.kube.types import Key, Pod
from driver.model.device import Device
from driver.model.offer import Offer
from driver.placement.occupancy import overlap
from driver.slices.slice_names import Pool

WAIT_SECONDS = 120.0
"""Time after which a pod that could run on empty GPUs gets a reservation."""


class Reservations:
    """Remembers since when pods have no room; a new leader starts from zero. ``update`` returns the reserved GPUs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[Key, float] = {}
        self._reserved: dict[Key, frozenset[str]] = {}
        """The GPUs by UUID that are kept free for a pod, which is one at most."""

    @property
    def next_s(self) -> float | None:
        """Seconds until a pod may get a reservation; None if none waits for one."""
        if not self._since or self._reserved:
            return None
        return max(1.0, min(self._since.values()) + WAIT_SECONDS - self._clock())

    def update(self, queue: Queue) -> frozenset[str]:
        now, present = self._clock(), queue.feasibility.fleet.gpus.keys()
        waiting = [pod for pod in queue.pods if not _has_room(queue, pod)]
        self._since = {pod.metadata.key: self._since.get(pod.metadata.key, now) for pod in waiting}
        kept = self._reserved.items()
        self._reserved = {pod: gpus for pod, gpus in kept if pod in self._since and gpus <= present}
        if not self._reserved:
            overdue = (pod for pod in waiting if now - self._since[pod.metadata.key] >= WAIT_SECONDS)
            self._reserved = _reservation(queue, overdue)
        return frozenset[str]().union(*self._reserved.values())


def overdue_reservation(queue: Queue, clock: Clock) -> frozenset[str]:
    """The GPUs that a leader reserves that has seen all pending pods since they were created."""
    ages = ((pod, clock.seconds_since(pod.metadata.creation_timestamp)) for pod in queue.pods)
    overdue = (pod for pod, age in ages if age >= WAIT_SECONDS and not _has_room(queue, pod))
    return frozenset[str]().union(*_reservation(queue, overdue).values())


def _reservation(queue: Queue, overdue: Iterable[Pod]) -> dict[Key, frozenset[str]]:
    """For the first pod that could run on empty GPUs."""
    return next(({pod.metadata.key: gpus} for pod in overdue if (gpus := _emptiest(queue, pod))), {})


def without(fleet: Fleet, gpus: Collection[str]) -> Fleet:
    """``fleet`` as it is for all others: nothing new is offered on reserved GPUs."""
    return fleet.changed(replace(fleet.gpus[uuid], uses=frozenset()) for uuid in gpus) if gpus else fleet


def whole_gpu(gpu: FleetGpu, driver: str) -> PoolDevice:
    """``gpu`` as reservations name it."""
    return PoolDevice(Pool(gpu.node, driver).name, f"gpu-{gpu.number}")


def reserved_gpus(queue: Queue, reservations: Mapping[PoolDevice, frozenset[str]]) -> dict[str, frozenset[str]]:
    """By UUID of each GPU that entries of the fence reserve, the UIDs of the pods and claims for which they do."""
    fleet, driver = queue.feasibility.fleet, queue.feasibility.matching.driver
    uids = {gpu_of(entry): of for entry, of in reservations.items()}
    pools = {gpu.pool for gpu in uids}
    gpus = (gpu for node in fleet.nodes if Pool(node, driver).name in pools for gpu in fleet.nodes[node])
    return {gpu.gpu.uuid: uids[name] for gpu in gpus if (name := whole_gpu(gpu, driver)) in uids}


def devices_for(queue: Queue, reserved: Mapping[str, Collection[str]]) -> dict[str, list[Offer]]:
    """By key of the claim, what it may have of the GPUs that are reserved for it or its pods, next to what is held.

    ``reserved``: by UUID of the GPU, the UIDs of such pods and claims.
    """
    feasibility, devices = queue.feasibility, dict[str, list[Offer]]()
    for pending in queue.pending:
        uids = pending.uids
        gpus = [feasibility.fleet.gpus[uuid] for uuid, of in reserved.items() if not uids.isdisjoint(of)]
        selectors = {request.selector for request in queue.requests(pending)} if gpus else set[Selector]()
        for gpu in gpus if selectors else ():
            by_kind = (feasibility.kinds(selector, frozenset({gpu.node})) for selector in selectors)
            kinds = [kind for gpus in by_kind for kind, alike in gpus.items() if gpu.gpu.uuid in alike]
            spots = (device.spot for device in gpu.devices if gpu.state.admits(device.spot))
            offers = [Offer(gpu.gpu.uuid, spot) for spot in spots if any(kind.has(spot) for kind in kinds)]
            devices.setdefault(pending.key, []).extend(offers)
    return devices


def apart(queue: Queue, devices: Mapping[str, list[Offer]], published: Container[Offer]) -> dict[str, list[Offer]]:
    """As many of these ``devices`` as each claim asks for, ``published`` ones first, none of which overlap."""
    fleet, taken, chosen = queue.feasibility.fleet, dict[str, list[Device]](), dict[str, list[Offer]]()
    for pending in (pending for pending in queue.pending if pending.key in devices):
        count = sum(request.count or 1 for request in queue.requests(pending))
        for offer in sorted(devices[pending.key], key=lambda offer: (offer not in published, str(offer))):
            device, others = fleet.device(offer), taken.setdefault(offer.gpu, [])
            if count and device is not None and not any(overlap(device, other) for other in others):
                others.append(device)
                chosen.setdefault(pending.key, []).append(offer)
                count -= 1
    return chosen


def _has_room(queue: Queue, pod: Pod) -> bool:
    """True, too, for a pod whose claims can't be evaluated, or are for other drivers' devices."""
    combinations = [requirements for requirements in queue.combinations(pod) if requirements.requests]
    nodes = queue.nodes_for(pod)
    return not combinations or any(queue.feasibility.may_fit(requirements, nodes) for requirements in combinations)


def _emptiest(queue: Queue, pod: Pod) -> frozenset[str]:
    """The GPUs on which ``pod`` could run if nothing were held there: of the node with the most free memory."""
    feasibility, unheld = queue.feasibility, queue.feasibility.unheld
    eligible = queue.nodes_for(pod)
    for requirements in queue.combinations(pod):
        budget = Budget()
        for node in reversed(feasibility.nodes):
            if node not in eligible or not unheld.may_fit(requirements, frozenset({node})):
                continue
            gpus = sorted(feasibility.fleet.nodes[node], key=lambda gpu: -gpu.state.free)
            states = tuple(gpu.unheld.state for gpu in gpus)
            chosen = choose_devices(gpus, states, requirements, feasibility.matching.value, budget)
            if chosen:
                return frozenset(gpu.gpu.uuid for gpu, _ in chosen)
    return frozenset()
