"""All claims of the cluster, of which only few are news at a time: who waits, and who holds what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from controller.objects import Allocation, Claim
from driver.kube.objects import Key
from driver.model.plan import Held


class ClaimBook:
    """Claims by key, kept up to date by ``put``; not thread-safe."""

    def __init__(self, driver: str = "", claims: Iterable[Claim] = ()) -> None:
        self._driver = driver
        self._claims: dict[Key, Claim] = {}
        self._unallocated: dict[Key, Claim] = {}
        self._held: dict[str, dict[str, tuple[Held, ...]]] = {}
        for claim in claims:
            self.put(claim.metadata.key, claim)

    def __iter__(self) -> Iterator[Claim]:
        return iter(tuple(self._claims.values()))

    @property
    def unallocated(self) -> tuple[Claim, ...]:
        return tuple(self._unallocated.values())

    def allocation(self, key: Key) -> Allocation | None:
        """What the claim of that key has; None, too, where there is no such claim."""
        claim = self._claims.get(key)
        return None if claim is None else claim.status.allocation

    def satisfies(self, keys: Iterable[Key]) -> bool:
        """Whether all claims of those keys have what they asked for; False where there are none."""
        allocations = [self.allocation(key) for key in keys]
        return bool(allocations) and None not in allocations

    def held(self, pool: str) -> Mapping[str, Held]:
        """Who has which devices of ``pool``. Of several claims on one device, which there never should be, the last."""
        return {device: holders[-1] for device, holders in self._held.get(pool, {}).items()}

    @property
    def pools(self) -> Iterable[str]:
        """Those with devices that are held."""
        return tuple(self._held)

    def reading(self) -> ClaimBook:
        """The same, but that who waits stays as it is now; what is allocated may become newer."""
        found = ClaimBook(self._driver)
        found._claims, found._held = self._claims, self._held
        found._unallocated = dict(self._unallocated)
        return found

    def put(self, key: Key, claim: Claim | None) -> set[str]:
        """The claim is this now, None: it is gone. Returns the pools of which something else is held."""
        before = self._claims.pop(key, None)
        self._unallocated.pop(key, None)
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

    def _remove(self, pool: str, held: Held) -> None:
        devices = self._held[pool]
        others = tuple(each for each in devices.pop(held.device) if each != held)
        if others:
            devices[held.device] = others
        elif not devices:
            del self._held[pool]

    def _devices(self, claim: Claim | None) -> Iterator[tuple[str, Held]]:
        allocation = claim.status.allocation if claim is not None else None
        if claim is None or allocation is None:
            return
        for result in allocation.devices.results:
            if result.driver == self._driver and not result.admin_access:
                yield result.pool, Held(result.device, claim.metadata.path)
