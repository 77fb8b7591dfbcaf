"""What is kept of the API server's objects: what decisions are made from, and what many have in common only once.

A version that changes while nothing else does is no news: nodes report every few seconds, claims get their status.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec

from controller.objects import (
    Allocation,
    Claim,
    ClaimSpec,
    ClaimStatus,
    Metadata,
    Node,
    NodeSelector,
    Pod,
    Results,
)
from driver.kube.claims import Result
from driver.kube.plans import GpuNodePlan
from driver.model.plan import PlanStatus

T = TypeVar("T")

MOST_SHARED = 1 << 14
"""Different specs of claims and selectors of nodes that are remembered; a node has one of its own."""


def claim(found: Claim) -> Claim:
    """Without reservations and labels."""
    allocation = found.status.allocation
    status = ClaimStatus(None if allocation is None else _allocation(allocation))
    return Claim(_metadata(found.metadata), _shared(ClaimSpec, found.spec), status)


def pod(found: Pod) -> Pod | None:
    """Pods that may want devices: those with claims, or with resources beyond what every node has."""
    common = {"cpu", "memory", "ephemeral-storage", "pods"}
    containers = (*found.spec.containers, *found.spec.init_containers)
    asked = {name for each in containers for name in (*each.resources.requests, *each.resources.limits)}
    if not found.spec.resource_claims and not asked - common:
        return None
    return Pod(_metadata(found.metadata), found.spec, found.status)


def node(found: Node) -> Node:
    """With its labels."""
    return Node(_metadata(found.metadata, _interned(found.metadata.labels)), found.spec)


def plan(found: GpuNodePlan) -> GpuNodePlan:
    """Without what is there for people."""
    status = found.status
    return GpuNodePlan(
        found.metadata, found.spec, PlanStatus(epoch=status.epoch, mode=status.mode, inventory=status.inventory)
    )


def says_more(old: GpuNodePlan | None, new: GpuNodePlan | None) -> bool:
    """Whether a plan differs from what it was in more than its version."""
    if old is None or new is None:
        return old is not new
    return (old.spec, old.status, old.metadata.paused) != (new.spec, new.status, new.metadata.paused)


def _metadata(found: Metadata, labels: Mapping[str, str] | None = None) -> Metadata:
    return Metadata(
        name=found.name,
        namespace=sys.intern(found.namespace),
        uid=found.uid,
        labels=dict(labels or {}),
        creation_timestamp=found.creation_timestamp,
        deletion_timestamp=found.deletion_timestamp,
    )


def _allocation(found: Allocation) -> Allocation:
    results = tuple(
        Result(
            sys.intern(each.request),
            sys.intern(each.driver),
            sys.intern(each.pool),
            sys.intern(each.device),
            each.admin_access,
            each.share_id,
        )
        for each in found.devices.results
    )
    selector = None if found.node_selector is None else _shared(NodeSelector, found.node_selector)
    return Allocation(Results(results), selector)


def _interned(labels: Mapping[str, str]) -> dict[str, str]:
    return {sys.intern(name): sys.intern(value) for name, value in labels.items()}


def _shared(kind: type[T], value: T) -> T:
    """The one of all values that are equal."""
    return cast("T", _one(kind, msgspec.json.encode(value)))  # type: ignore[arg-type]


@lru_cache(MOST_SHARED)
def _one(kind: Any, encoded: bytes) -> Any:
    return msgspec.json.decode(encoded, type=kind)
