"""The ResourceClaims of the cluster, indexed by whether they are allocated and by the pools of their devices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from driver.kube.types import (
    Allocation,
    Claim,
    ClaimSpec,
    ClaimTemplate,
    DeviceClass,
    DeviceTaintRule,
    Key,
    Node,
    Pod,
    PodGroup,
)
from driver.model.device import is_monitor, is_shared, is_shared_partition
from driver.model.plan import Held
from driver.model.shared_memory import gib_of

RESERVED = "="
"""In an entry of the fence between a whole GPU, the UIDs of the claims and pods, or a hash of the owner of a next pod,
for which it is reserved, and the time until which it is, by the API server's clock in seconds since 1970."""


class PoolDevice(NamedTuple):
    """A device by the names that an allocation has."""

    pool: str
    device: str

    def __str__(self) -> str:
        return f"{self.pool}/{self.device}"


def reservations_in(fenced: Iterable[PoolDevice]) -> dict[PoolDevice, frozenset[str]]:
    """The UIDs of the claims and pods for which GPUs are reserved, by entry of the fence."""
    entries = [entry for entry in fenced if RESERVED in entry.device]
    return {entry: frozenset(entry.device.split(RESERVED)[1].split(",")) for entry in entries}


def gpu_of(entry: PoolDevice) -> PoolDevice:
    """The GPU (``gpu-N`` of a pool) that an entry of the fence reserves; the device itself if it reserves none."""
    return entry._replace(device=entry.device.partition(RESERVED)[0])


class WrittenSpec(NamedTuple):
    """What a claim or a template asks for; ``namespace``: that of one of those that have this spec."""

    namespace: str
    spec: ClaimSpec


class ClaimIndex:
    """Claims by key, kept up to date by ``put``. Not thread-safe."""

    def __init__(self, driver: str = "", claims: Iterable[Claim] = ()) -> None:
        self._driver = driver
        self._claims: dict[Key, Claim] = {}
        self._unallocated: dict[Key, Claim] = {}
        self._held: dict[str, dict[str, tuple[Held, ...]]] = {}
        self._specs: dict[int, tuple[WrittenSpec, int]] = {}
        """By identity of a spec, which equal claims share, the spec and how many claims have it."""
        self.specs: tuple[WrittenSpec, ...] = ()
        """The different specs of all claims; the same object as long as they are."""
        for claim in claims:
            self.put(claim.metadata.key, claim)

    @property
    def unallocated(self) -> tuple[Claim, ...]:
        return tuple(self._unallocated.values())

    def find(self, key: Key) -> Claim | None:
        return self._claims.get(key)

    def allocation(self, key: Key) -> Allocation | None:
        """The allocation of a claim; None if the claim is not allocated or does not exist."""
        claim = self._claims.get(key)
        return None if claim is None else claim.status.allocation

    def satisfies(self, keys: Iterable[Key]) -> bool:
        """Whether all of these claims are allocated; False for an empty list."""
        allocations = [self.allocation(key) for key in keys]
        return bool(allocations) and None not in allocations

    def held(self, pool: str) -> Mapping[str, Held]:
        """The allocated devices of ``pool`` by name; the latest claim where several have the same device."""
        return {device: holders[-1] for device, holders in self.holders(pool).items()}

    def shared(self, pool: str) -> Mapping[str, tuple[Held, ...]]:
        """The shared devices among the allocated ones of ``pool``, each with all its claims."""
        return {device: tuple(claims) for device, claims in self.holders(pool).items() if is_shared(device)}

    def holders(self, pool: str) -> Mapping[str, Sequence[Held]]:
        """The allocated devices of ``pool`` by name, each with all claims that have it."""
        # A copy: another thread may take over changes.
        return dict(self._held.get(pool, {}))

    def users_of(self, driver: str) -> dict[tuple[str, str], str]:
        """The claim that has each device of ``driver``, by pool and device."""
        claims = tuple(self._claims.values())  # a copy, as above
        return {
            (result.pool, result.device): str(claim.metadata.key)
            for claim in claims
            for result in claim.results
            if result.driver == driver
        }

    def requesting(self, namespace: str, classes: Collection[str]) -> list[str]:
        """Names of the claims of ``namespace`` that request devices of one of these classes, sorted."""
        claims = tuple(self._claims.values())  # a copy, as above
        of_namespace = (claim for claim in claims if claim.metadata.namespace == namespace)
        return sorted(claim.metadata.name for claim in of_namespace if not set(classes).isdisjoint(claim.class_names))

    @property
    def pools(self) -> Iterable[str]:
        return tuple(self._held)

    def view(self, unallocated: Iterable[Claim] | None = None) -> ClaimIndex:
        """A view in which ``unallocated`` no longer changes; allocations may still become newer.

        ``unallocated`` replaces the claims without an allocation.
        """
        view = ClaimIndex(self._driver)
        view._claims, view._held, view.specs = self._claims, self._held, self.specs
        replaced = None if unallocated is None else {claim.metadata.key: claim for claim in unallocated}
        view._unallocated = dict(self._unallocated) if replaced is None else replaced
        return view

    def put(self, key: Key, claim: Claim | None) -> set[str]:
        """Add, replace or (None) delete a claim. Returns the pools whose allocated devices changed."""
        before = self._claims.pop(key, None)
        self._unallocated.pop(key, None)
        self._count_spec(before, -1)
        self._count_spec(claim, 1)
        if claim is not None:
            self._claims[key] = claim
            if claim.status.allocation is None:
                self._unallocated[key] = claim
        old, new = set(self._devices(before)), set(self._devices(claim))
        for pool, held in old - new:
            self._remove(pool, held)
        for pool, held in new - old:
            devices = self._held.setdefault(pool, {})
            devices[held.device] = (*devices.get(held.device, ()), held)
        return {pool for pool, _ in old ^ new}

    def _count_spec(self, claim: Claim | None, more: int) -> None:
        if claim is None:
            return
        written, count = self._specs.get(id(claim.spec), (WrittenSpec(claim.metadata.namespace, claim.spec), 0))
        if count + more:
            self._specs[id(claim.spec)] = written, count + more
        else:
            del self._specs[id(claim.spec)]
        if not count or not count + more:
            self.specs = tuple(written for written, _ in self._specs.values())

    def _remove(self, pool: str, held: Held) -> None:
        devices = self._held[pool]
        others = tuple(other for other in devices.pop(held.device) if other != held)
        if others:
            devices[held.device] = others
        elif not devices:
            del self._held[pool]

    def _devices(self, claim: Claim | None) -> Iterator[tuple[str, Held]]:
        allocation = claim.status.allocation if claim is not None else None
        if claim is None or allocation is None:
            return
        name, shares = str(claim.metadata.key), dict[tuple[str, str], list[int]]()
        for result in allocation.devices.results:
            # A monitor device is in a pool of its own, so that nobody takes it for a held device of the node.
            if result.driver != self._driver or (result.admin_access and not is_monitor(result.device)):
                continue
            if is_shared(result.device):
                is_partition = is_shared_partition(result.device)
                gib = 1 if is_partition else gib_of(result.consumed_capacity, whole=0) or 0
                shares.setdefault((result.pool, result.device), []).append(gib)
            else:
                yield result.pool, Held(result.device, name)
        for (pool, device), parts in shares.items():
            yield pool, Held(device, name, sum(parts) if all(parts) else 0)


@dataclass(frozen=True)
class ClusterState:
    """The objects of the cluster, as cached from the API server."""

    claims: ClaimIndex
    classes: tuple[DeviceClass, ...]
    pods: tuple[Pod, ...]
    nodes: tuple[Node, ...]
    pod_groups: Mapping[Key, PodGroup] = field(default_factory=dict)
    taint_rules: tuple[DeviceTaintRule, ...] = ()
    templates: tuple[ClaimTemplate, ...] = ()
