"""A late scheduler against GPUs whose offers are replaced, or that leave the slices: is any memory given out twice?

Claims, fence and canary are on a real API server. Each node follows plans by the product's rules; its slices, which no
part of the API server looks at, stay in this process. Every step is late: what the scheduler sees of the slices, what
it writes, what the controller withdraws, what the node publishes and prepares. Two things a scheduler is spared: claims
that end are not seen before the slices in which they were prepared, and devices are not offered again before it has
seen that they were withdrawn.

With counters the scheduler refuses a device that overlaps a published one that is allocated. With disjoint offers it
takes any device, and the controller offers nothing that overlaps a device before that was withdrawn.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from controller.cluster.claim_index import PoolDevice
from controller.fence.fence import Fence
from driver.errors import ApiError
from driver.kube.client import KubeClient
from driver.kube.types import GpuNodePlan, PlanMetadata
from driver.model.device import Device, devices_of
from driver.model.plan import OfferMode, PlanMode, PlanSpec, PublishHeld
from driver.placement.occupancy import GpuState, overlap
from driver.slices.dropped_fields import KeptFields
from kubelet_plugin.changes import ChangeNotifier
from kubelet_plugin.inventory.inventory import ClaimReference, Inventory
from kubelet_plugin.plan.follower import PlanFollower
from kubelet_plugin.plan.plan_file import PlanMemory
from tests.harness.waiting import DeadlineError, wait_for
from tests.support.fence_race import ClaimsCache, allocate, new_claim
from tests.support.following import GivenInstructions, GivenSlices, GivenStore
from tests.support.gpus import gpu_of
from tests.support.published import DRIVER
from tests.support.workloads import CLAIMS

CLAIMANTS = {OfferMode.COUNTERS: 4, OfferMode.DISJOINT: 2}
"""Claims of each node."""

RESTS = {OfferMode.COUNTERS: 1, OfferMode.DISJOINT: 6}
"""Delays between two claims: only offers that are free for a while can be replaced."""

POLL_S = 0.02
POLLS_PER_DELAY = 50
"""Hundreds of threads that poll more often than they need to would leave no time for the race."""

GPU = gpu_of()
DEVICES = {
    device.name: device
    for device in devices_of(GPU, 0, 0)
    if device.profile is None or device.profile.name in {"1g.10gb", "3g.40gb"}
}


@dataclass
class Outcome:
    """``tried``: decisions that were written, stored or refused by the fence. ``refused_by_node``: prepares.

    ``reshaped``: devices that took the place of withdrawn ones that overlap them.
    """

    tried: int = 0
    refused: int = 0
    overlaps: int = 0
    refused_by_node: int = 0
    unpublished: int = 0
    republished: int = 0
    reshaped: int = 0


class Published(NamedTuple):
    """The devices in the slices, and those of them without the taint of those that are not offered."""

    names: frozenset[str] = frozenset()
    offered: frozenset[str] = frozenset()


class NodeRace:
    """One node with one GPU, its claimants, and the part of a controller that is about it."""

    def __init__(
        self,
        client: KubeClient,
        fence: Fence,
        claims: ClaimsCache,
        number: int,
        most_delay_s: float,
        mode: OfferMode,
        total: Outcome,
    ) -> None:
        self._client, self._fence, self._claims, self.total = client, fence, claims, total
        self._mode = mode
        self._random = random.Random(number)
        self._most_delay_s = most_delay_s
        self._poll_s = max(POLL_S, most_delay_s / POLLS_PER_DELAY)
        self._pool = f"race-{number}-{DRIVER}"
        self._lock = threading.Lock()
        self._inventory = Inventory([GPU], {GPU.uuid: 0})
        self._plan = GpuNodePlan(PlanMetadata("race"), self._spec())
        store = GivenStore(PlanMemory("epoch", PlanMode.PLANNED))
        instructions = GivenInstructions(lambda: self._plan)
        self._follower = PlanFollower(instructions, self._inventory, KeptFields(), store, ChangeNotifier())
        self._slices = [Published()]
        """Every version of the slices; the scheduler sees them up to ``_seen``."""
        self._seen = 0
        self._assumed: set[str] = set()
        self._stored: set[str] = set()
        self._hidden = False
        self._objects = [new_claim(client, f"race-{number}-{at}") for at in range(CLAIMANTS[mode])]

    def delay(self, stop: threading.Event) -> None:
        """Short delays often, long ones seldom."""
        stop.wait(self._most_delay_s * self._random.random() ** 3)

    def remove(self) -> None:
        """Delete the claims."""
        for claim in self._objects:
            self._client.delete(f"{CLAIMS}/{claim['metadata']['name']}")

    # The node

    def _publish(self) -> int:
        """Publish by the present plan. Returns the version of the slices."""
        with self._lock:
            [entry] = self._follower.published(GivenSlices())
            names = frozenset(device.name for device in (*entry.held, *entry.offers) if not entry.unpublished)
            if entry.unpublished != self._hidden:
                self._hidden = entry.unpublished
                self.total.unpublished += entry.unpublished and bool(entry.held)
                self.total.republished += not entry.unpublished and bool(entry.held)
            if (published := Published(names, names - entry.closed)) != (before := self._slices[-1]):
                gone = [DEVICES[name] for name in before.names - names]
                new = [DEVICES[name] for name in names - before.names]
                self.total.reshaped += sum(any(overlap(device, other) for other in gone) for device in new)
                self._slices.append(published)
            return len(self._slices) - 1

    def node(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self.delay(stop)
            self._publish()

    # The scheduler

    def watch(self, stop: threading.Event) -> None:
        """See newer slices, late."""
        while not stop.is_set():
            newest = len(self._slices) - 1
            self.delay(stop)
            self._seen = max(self._seen, newest)

    def _wait_seen(self, version: int, stop: threading.Event) -> None:
        self._wait(lambda: self._seen >= version, stop)

    def _decide(self, tolerates: bool) -> Device | None:
        with self._lock:
            published = self._slices[self._seen]
            state = GpuState.of(GPU, [DEVICES[name] for name in published.names & self._assumed])
            choice = (published.names if tolerates else published.offered) - self._assumed
            free = sorted(name for name in choice if self._mode is OfferMode.DISJOINT or state.fits(DEVICES[name]))
            if not free:
                return None
            name = self._random.choice(free)
            self._assumed.add(name)
            return DEVICES[name]

    def claimant(self, at: int, stop: threading.Event) -> None:
        """Get a device, have it prepared, give it back; again and again."""
        while not stop.is_set():
            for _ in range(RESTS[self._mode]):
                self.delay(stop)
            if (device := self._decide(tolerates=at == 0)) is None:
                stop.wait(self._poll_s)
                continue
            self.delay(stop)
            if not self._allocate(at, device):
                continue
            self.delay(stop)
            holder = ClaimReference("default", f"claim-{at}", f"{self._pool}-{at}")
            with self._lock:
                fits = self._inventory.conflict(holder.uid, device) is None
                if fits:
                    self._inventory.hold(holder, [device])
                self.total.refused_by_node += not fits
            self._wait_seen(self._publish(), stop)
            self.delay(stop)
            self._inventory.release(holder.uid)
            with self._lock:
                self._stored.discard(device.name)
            self._objects[at] = allocate(self._client, self._objects[at])
            with self._lock:
                self._assumed.discard(device.name)

    def _allocate(self, at: int, device: Device) -> bool:
        try:
            self._objects[at] = allocate(self._client, self._objects[at], PoolDevice(self._pool, device.name))
        except ApiError as error:
            assert error.status == 422, error  # noqa: PT017 - nothing else may refuse it
            with self._lock:
                self.total.tried += 1
                self.total.refused += 1
                self._assumed.discard(device.name)
            return False
        with self._lock:
            self.total.tried += 1
            self.total.overlaps += sum(overlap(device, DEVICES[name]) for name in self._stored)
            self._stored.add(device.name)
        return True

    # The controller

    def controller(self, stop: threading.Event) -> None:
        """Offer any devices that fit, with counters most often none; withdraw others through the fence."""
        while not stop.is_set():
            self.delay(stop)
            held = self._held()
            state = GpuState.of(GPU, [DEVICES[name] for name in held])
            fitting = sorted(name for name, device in DEVICES.items() if name not in held and state.fits(device))
            count = self._random.choice([0, 0, 1, 3] if self._mode is OfferMode.COUNTERS else [1, 1, 3])
            wanted = self._random.sample(fitting, min(len(fitting), count))
            possible = self._unobstructed(wanted, ())
            self._lift(possible, stop)
            self._offer(possible, held)
            self.delay(stop)
            excess = {self._device(name) for name in self._slices[-1].names.difference(wanted, self._held())}
            if excess:
                try:
                    gone = self._fence.take_back(excess).devices
                except ApiError:  # as above
                    continue
                self.delay(stop)
                possible = self._unobstructed(wanted, {device.device for device in gone})
                self._lift(possible, stop)
                self._offer(possible, self._held(), gone)
                self._wait(lambda gone=gone: not gone & {*map(self._device, self._slices[-1].names)}, stop)  # type: ignore[misc]
                self._wait_seen(len(self._slices) - 1, stop)

    def _unobstructed(self, wanted: list[str], withdrawn: Collection[str]) -> list[str]:
        """Those of ``wanted`` that may be offered beside what is published and not ``withdrawn``."""
        if self._mode is OfferMode.COUNTERS:
            return wanted
        found: list[str] = []
        for name in wanted:
            others = (self._slices[-1].names | {*found}) - {name, *withdrawn}
            if not any(overlap(DEVICES[name], DEVICES[other]) for other in others):
                found.append(name)
        return found

    def _lift(self, wanted: list[str], stop: threading.Event) -> None:
        """Lift the fence from devices that are offered again, once no earlier decision for them can be written."""
        fenced = {device for device in map(self._device, wanted) if device in self._fence.fenced.devices}
        self._wait(lambda: not self._pending(fenced), stop)
        self._fence.lift(fenced)

    def _offer(self, wanted: list[str], held: frozenset[str], withdrawn: Collection[PoolDevice] = ()) -> None:
        if not withdrawn and not self._fence.catch_up():  # the other nodes' controllers change the canary, too
            return
        if (now := self._held()) != held:  # the product makes another decision
            wanted, held = [], now
        offers = tuple(str(DEVICES[name].offer) for name in wanted)
        named = tuple(f"{name} default/claim" for name in sorted(held))
        gone = tuple(device.device for device in withdrawn)
        self._plan = GpuNodePlan(PlanMetadata("race"), self._spec(named, offers, gone))

    def _spec(
        self, held: tuple[str, ...] = (), offers: tuple[str, ...] = (), withdrawn: tuple[str, ...] = ()
    ) -> PlanSpec:
        return PlanSpec("epoch", held, offers, withdrawn, PublishHeld.BESIDE_OFFERS, self._mode)

    def _held(self) -> frozenset[str]:
        return frozenset(device.device for device in self._claims.held() if device.pool == self._pool)

    def _device(self, name: str) -> PoolDevice:
        return PoolDevice(self._pool, name)

    def _pending(self, devices: set[PoolDevice]) -> set[PoolDevice]:
        """Those of ``devices`` for which a decision is not written yet."""
        with self._lock:
            return devices & {*map(self._device, self._assumed - self._stored)}

    def _wait(self, condition: Callable[[], bool], stop: threading.Event) -> None:
        while not condition() and not stop.wait(self._poll_s):
            pass


def race(
    client: KubeClient,
    fence: Fence,
    claims: ClaimsCache,
    nodes: int,
    most_delay_s: float,
    is_over: Callable[[Outcome], bool],
    within_s: float,
    mode: OfferMode = OfferMode.COUNTERS,
) -> Outcome:
    """Races on so many nodes at once until ``is_over``."""
    total, stop = Outcome(), threading.Event()
    races = [NodeRace(client, fence, claims, number, most_delay_s, mode, total) for number in range(nodes)]
    with ThreadPoolExecutor(nodes * (CLAIMANTS[mode] + 3)) as pool:
        jobs = [pool.submit(job, stop) for each in races for job in (each.node, each.watch, each.controller)]
        jobs += [pool.submit(each.claimant, at, stop) for each in races for at in range(CLAIMANTS[mode])]
        try:
            wait_for(lambda: is_over(total) or any(job.done() for job in jobs), within_s, "the race is over", POLL_S)
        except DeadlineError as error:
            raise DeadlineError(f"{error}; so far: {total}") from None
        finally:
            stop.set()
    for each in races:
        each.remove()
    for job in jobs:
        job.result()
    return total
