"""The parts of Kubernetes objects that the controller keeps in memory; equal parts of many objects are kept once.

An object whose kept parts are unchanged is not a change: kubelets and node plugins write statuses every few seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec

from driver.kube.types import (
    Allocation,
    Claim,
    ClaimSpec,
    ClaimStatus,
    DeviceAllocation,
    GpuNodePlan,
    Metadata,
    Node,
    NodeSelector,
    Pod,
    Result,
)
from driver.model.plan import PlanStatus

T = TypeVar("T")

MAX_SHARED_VALUES = 1 << 14
"""Distinct claim specs and node selectors that are kept; each node has a selector of its own."""


def claim(found: Claim) -> Claim:
    """A claim without reservations and labels."""
    allocation = found.status.allocation
    status = ClaimStatus(None if allocation is None else _allocation(allocation))
    return Claim(_metadata(found.metadata), _shared(ClaimSpec, found.spec), status)


def pod(found: Pod) -> Pod | None:
    """A pod that may request devices: one with claims or extended resources. None for other pods."""
    common = {"cpu", "memory", "ephemeral-storage", "pods"}
    containers = (*found.spec.containers, *found.spec.init_containers)
    requested = {name for each in containers for name in (*each.resources.requests, *each.resources.limits)}
    if not found.spec.resource_claims and not requested - common:
        return None
    return Pod(_metadata(found.metadata), found.spec, found.status)


def node(found: Node) -> Node:
    """A Node with its labels."""
    return Node(_metadata(found.metadata, _interned(found.metadata.labels)), found.spec)


def plan(found: GpuNodePlan) -> GpuNodePlan:
    """A plan without the parts that only people read."""
    status = found.status
    return GpuNodePlan(
        found.metadata, found.spec, PlanStatus(epoch=status.epoch, mode=status.mode, inventory=status.inventory)
    )


def differ(old: GpuNodePlan | None, new: GpuNodePlan | None) -> bool:
    """Whether two versions of a plan differ in more than their resourceVersion."""
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
    return Allocation(DeviceAllocation(results), selector)


def _interned(labels: Mapping[str, str]) -> dict[str, str]:
    return {sys.intern(name): sys.intern(value) for name, value in labels.items()}


def _shared(kind: type[T], value: T) -> T:
    """The one kept object that equals ``value``."""
    return cast("T", _one(kind, msgspec.json.encode(value)))  # type: ignore[arg-type]


@lru_cache(MAX_SHARED_VALUES)
def _one(kind: Any, encoded: bytes) -> Any:
    return msgspec.json.decode(encoded, type=kind)
