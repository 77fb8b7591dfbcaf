"""A scheduler that writes its decisions late, against offers being taken back: does anything overlap?

Runs on any API server. What is counted is what stands there in the end: a device that was withdrawn and is
allocated all the same, whatever else is offered on its memory meanwhile.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from controller.cluster.cache import ClusterCache
from controller.cluster.claim_index import PoolDevice
from controller.fence.fence import Withdrawable
from controller.fence.fence_probe import Canary
from driver.errors import ApiError
from driver.kube.client import KubeClient, Object
from driver.kube.get_and_list import RESOURCE_GROUP
from driver.kube.types import Claim
from driver.kube.watch_cache import WatchCache
from tests.support.running import eventually, in_thread

CLAIMS = f"{RESOURCE_GROUP}/namespaces/default/resourceclaims"
DRIVER = "gpu.tessera.dev"
POOL = f"node-a-{DRIVER}"


def devices_of(claim: Claim) -> frozenset[PoolDevice] | None:
    if claim.status.allocation is None:
        return None
    return frozenset(PoolDevice(result.pool, result.device) for result in claim.status.allocation.devices.results)


class ClaimsCache(ClusterCache):
    """The cache of claims alone."""

    def __init__(self, client: KubeClient) -> None:
        self.cache = WatchCache(client, f"{RESOURCE_GROUP}/resourceclaims", Claim, devices_of)

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        return self.cache.wait_for_version(version, timeout_s)

    def held(self) -> frozenset[PoolDevice]:
        return frozenset[PoolDevice]().union(*self.cache.snapshot().values())


@contextmanager
def claims_cache(client: KubeClient, wake: Callable[[], None]) -> Iterator[ClaimsCache]:
    claims = ClaimsCache(client)
    with in_thread(claims.cache.run, wake):
        eventually(lambda: claims.cache.synced, "the claims were listed")
        yield claims


def new_claim(client: KubeClient, name: str, **metadata: Any) -> Object:
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu-inference"}}
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name, **metadata}}
    return client.create(CLAIMS, {**body, "spec": {"devices": {"requests": [request]}}})


def allocate(
    client: KubeClient, claim: Object, *devices: PoolDevice, dry_run: bool = False, pod: str | None = None
) -> Object:
    """Write the allocation as the scheduler does, for the pod with the UID ``pod``; none: take it away.

    Raises ApiError.
    """
    results = [{"request": "gpu", "driver": DRIVER, "pool": each.pool, "device": each.device} for each in devices]
    status: Object = {"allocation": {"devices": {"results": results}}} if devices else {}
    status |= {"reservedFor": [{"resource": "pods", "name": "pod", "uid": pod}]} if pod else {}
    path = f"{CLAIMS}/{claim['metadata']['name']}/status"
    return client.replace(path, {**claim, "status": status}, {"dryRun": "All"} if dry_run else None)


def without_fence(client: KubeClient, claims: ClaimsCache) -> Callable[[Collection[PoolDevice]], Withdrawable]:
    """The same taking back, less the fence."""
    canary = Canary(client, "tessera")

    def take_back(devices: Collection[PoolDevice]) -> Withdrawable:
        assert claims.wait_for_version(canary.touch(), 60)
        held = frozenset(devices).intersection(claims.held())
        return Withdrawable(frozenset(devices) - held, held)

    return take_back


@dataclass
class Outcome:
    """Devices, summed over all rounds."""

    tried: int = 0
    withdrawn: int = 0
    held: int = 0
    refused: int = 0
    allocated: int = 0
    overlaps: int = 0


class Race:
    """Rounds in which ``CLAIMANTS`` claims are allocated while half of the devices are taken back."""

    CLAIMANTS, DEVICES, TAKEN = 12, 20, 10
    MOST_ROUNDS = 200

    def __init__(
        self,
        client: KubeClient,
        take_back: Callable[[Collection[PoolDevice]], Withdrawable],
        lift: Callable[[Collection[PoolDevice]], None],
        seed: int,
        most_delay_s: float,
    ) -> None:
        self._client = client
        self._take_back, self._lift = take_back, lift
        self._random = random.Random(seed)
        self._most_delay_s = most_delay_s
        self._lock = threading.Lock()
        self._never = threading.Event()
        self._everything = [PoolDevice(POOL, f"gpu-{number}-mig-1g10gb-0") for number in range(self.DEVICES)]
        self._claims = [new_claim(client, f"race-{number}") for number in range(self.CLAIMANTS)]
        self._published: set[PoolDevice] = set()
        self._assumed: set[PoolDevice] = set()
        self.outcome = Outcome()

    def delay(self) -> None:
        self._never.wait(self._random.uniform(0, self._most_delay_s))

    def run(self, rounds: int, until: Callable[[Outcome], object] = lambda _: True) -> Outcome:
        """So many rounds, and as many more, to a limit, until ``until`` is true."""
        try:
            with ThreadPoolExecutor(self.CLAIMANTS) as pool:
                for number in range(self.MOST_ROUNDS):
                    if number >= rounds and until(self.outcome):
                        break
                    self._round(pool)
        finally:
            for claim in self._claims:
                self._client.delete(f"{CLAIMS}/{claim['metadata']['name']}")
        return self.outcome

    def _round(self, pool: ThreadPoolExecutor) -> None:
        self._published, self._assumed = set(self._everything), set()
        jobs = [pool.submit(self._schedule, index) for index in range(self.CLAIMANTS)]
        targets = self._random.sample(self._everything, self.TAKEN)
        self.delay()
        result = self._take_back(targets)
        self.delay()
        with self._lock:
            self._published -= result.devices
        for job in jobs:
            job.result()
        self._count(result)
        for index, claim in enumerate(self._claims):
            self._claims[index] = allocate(self._client, claim)
        self._lift(result.devices)

    def _schedule(self, index: int) -> None:
        """Decide by what is published, and write that late; refused: decide again."""
        for _ in range(3):
            self.delay()
            with self._lock:
                free = sorted(self._published - self._assumed)
                if not free:
                    return  # a pod that waits
                device = self._random.choice(free)
                self._assumed.add(device)
            self.delay()
            try:
                self._claims[index] = allocate(self._client, self._claims[index], device)
                return
            except ApiError as error:
                assert error.status == 422, error  # noqa: PT017 - nothing else may refuse it
                with self._lock:
                    self.outcome.refused += 1
                    self._assumed.discard(device)

    def _count(self, result: Withdrawable) -> None:
        listed = msgspec.json.decode(self._client.get(CLAIMS, {"limit": "500"}), type=dict[str, object])
        found = msgspec.convert(listed["items"], list[Claim])
        allocated = frozenset().union(*(devices_of(claim) or frozenset() for claim in found))
        assert result.held <= allocated
        self.outcome.tried += self.TAKEN
        self.outcome.withdrawn += len(result.devices)
        self.outcome.held += len(result.held)
        self.outcome.allocated += len(allocated)
        self.outcome.overlaps += len(allocated & result.devices)
