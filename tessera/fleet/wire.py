"""What the fleet reads of claims and pods (wire types)."""

from __future__ import annotations

import msgspec

from driver.kube.claims import Allocation, Consumer
from driver.kube.objects import Key, ObjectMeta


class Metadata(ObjectMeta, frozen=True, rename="camel"):
    deletion_timestamp: str | None = None


class ClaimStatus(msgspec.Struct, frozen=True, rename="camel"):
    allocation: Allocation | None = None
    reserved_for: tuple[Consumer, ...] = ()


class Claim(msgspec.Struct, frozen=True):
    metadata: ObjectMeta
    status: ClaimStatus = ClaimStatus()


class PodClaim(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    resource_claim_name: str | None = None


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""
    resource_claims: tuple[PodClaim, ...] = ()


class PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = "Pending"
    resource_claim_statuses: tuple[PodClaim, ...] = ()


class Pod(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def claims(self) -> tuple[Key, ...]:
        """Those of its claims that have a name already."""
        made = {each.name: each.resource_claim_name for each in self.status.resource_claim_statuses}
        names = (each.resource_claim_name or made.get(each.name) for each in self.spec.resource_claims)
        return tuple(Key(self.metadata.namespace, name) for name in names if name)


class Allocated(msgspec.Struct, frozen=True):
    """A claim's devices of ours, by the name of their pool."""

    uid: str
    devices: dict[str, tuple[str, ...]]
    users: frozenset[str]
    """Uids of the pods that may use it."""


def allocated(claim: Claim, driver: str) -> Allocated | None:
    """None where the claim has no device of ``driver``."""
    found: dict[str, tuple[str, ...]] = {}
    allocation = claim.status.allocation
    for result in allocation.devices.results if allocation is not None else ():
        if result.driver == driver:
            found[result.pool] = (*found.get(result.pool, ()), result.device)
    users = frozenset(each.uid for each in claim.status.reserved_for if each.resource == "pods")
    return Allocated(claim.metadata.uid, found, users) if found else None
