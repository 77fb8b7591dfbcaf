"""Claims that were allocated a larger device than they accept on the same GPU (pure but for a memory).

Any claim may take any offer. A claim that accepts several kinds asks for the smallest, but the scheduler may choose a
node on which only larger offers, made for other claims, are left.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from enum import StrEnum

from controller.cluster.fleet import Fleet
from controller.demand.pending_claims import Queue
from controller.demand.requirements import RefusedRequest
from driver.kube.types import Claim
from driver.model.device import Device, is_shared
from driver.model.offer import SHARED

MOST_NOTED = 10_000
"""Allocations between two decisions that are looked at."""


class TakenSize(StrEnum):
    """Of the GPU that has the device."""

    PART = "part"
    WHOLE = "whole"


class LargerDevicesTaken:
    """Counts them. ``note`` may be called by another thread than ``update``."""

    def __init__(self) -> None:
        self._allocated: deque[Claim] = deque(maxlen=MOST_NOTED)

    def note(self, allocated: Claim) -> None:
        """Remember a claim that was just allocated, until the next update."""
        self._allocated.append(allocated)

    def update(self, queue: Queue, fleet: Fleet) -> Counter[TakenSize]:
        """How many devices of claims noted since the last update are larger than others that their claims accept."""
        taken: Counter[TakenSize] = Counter()
        while self._allocated:
            for device in _larger(queue, fleet, self._allocated.popleft()):
                is_whole = device.shares == 1 and device.mask == device.gpu.all_slices
                taken[TakenSize.WHOLE if is_whole else TakenSize.PART] += 1
        return taken


def _larger(queue: Queue, fleet: Fleet, claim: Claim) -> Iterator[Device]:
    requirements = queue.reader.read(claim).requirements
    combinations = () if isinstance(requirements, RefusedRequest) else requirements
    requests = {request.name: request for combination in combinations for request in combination.requests}
    driver = queue.feasibility.matching.driver
    for result in claim.results:
        request = requests.get(result.request)
        # A claim has as much of a shared device as it asks for.
        if request is None or result.driver != driver or result.admin_access or is_shared(result.device):
            continue
        for gpu in fleet.nodes.get(result.pool.removesuffix(f"-{driver}"), ()):
            device, accepted = gpu.device_named(result.device), request.selector.on(gpu)
            # Equal layouts have equal devices, but of GPUs without MIG not equal sizes.
            exclusive = [spot for spot in gpu.layout.devices if spot.kind != SHARED]
            others = [gpu.device(spot) for spot in exclusive if accepted.has(*spot)] if device else []
            if device and any(other and other.memory_bytes < device.memory_bytes for other in others):
                yield device
