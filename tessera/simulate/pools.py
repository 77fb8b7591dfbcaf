"""The pools of devices that a node can use, from the ResourceSlices of the cluster (pure).

Order decides: of all solutions the allocator takes the first. Pools are ordered by driver and name, those with devices
that have to be bound after allocation last; slices by name; devices as they are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from controller.demand.node_eligibility import selects
from driver.kube.slice_types import DetailedDevice, DetailedSlice, DetailedSliceSpec, newest_generation
from driver.kube.types import Expression, Node, NodeSelector, NodeTerm
from tessera.simulate.allocatable_devices import (
    AllocatableDevice,
    AllocationError,
    Counters,
    DeviceId,
    FailureKind,
    counters_of,
)


class PoolId(NamedTuple):
    driver: str
    pool: str

    def __str__(self) -> str:
        return "/".join(self)


@dataclass(frozen=True)
class DevicePool:
    """``candidates`` are usable on the node, ``elsewhere`` are the other devices of the pool: they consume counters.

    ``incomplete`` pools, whose slices have not all been published, and ``invalid`` ones, for the reason given, have no
    candidates.
    """

    id: PoolId
    candidates: tuple[AllocatableDevice, ...] = ()
    elsewhere: tuple[AllocatableDevice, ...] = ()
    counters: Counters = field(default_factory=dict)
    incomplete: bool = False
    invalid: str | None = None
    needs_binding: bool = False


class SliceIndex:
    """The ResourceSlices of a cluster, by node and by pool."""

    def __init__(self, slices: Iterable[DetailedSlice]) -> None:
        self._of_node: dict[str, list[DetailedSlice]] = {}
        self._of_pool: dict[PoolId, list[DetailedSlice]] = {}
        for item in slices:
            self._of_node.setdefault(item.spec.node_name, []).append(item)
            self._of_pool.setdefault(_pool_id(item), []).append(item)

    def near(self, node: str) -> list[DetailedSlice]:
        """The slices of ``node``, and those that are of no single one."""
        return [*self._of_node.get(node, ()), *self._of_node.get("", ())]

    def of_pool(self, pool: PoolId) -> Sequence[DetailedSlice]:
        return self._of_pool[pool]


def pools_of(slices: SliceIndex, node: Node) -> list[DevicePool]:
    """The pools with devices for ``node``, in the order in which devices are tried."""
    concerned = (item for item in slices.near(node.metadata.name) if _concerns(item, node))
    newest = newest_generation(concerned, lambda item: (_pool_id(item), item.spec.pool.generation))
    pools = (_pool(pool, own, slices.of_pool(pool)) for pool, own in newest.items())
    return sorted((pool for pool in pools if pool is not None), key=lambda pool: (pool.needs_binding, pool.id))


def _is_for(node: Node, part: DetailedSliceSpec | DetailedDevice) -> bool:
    """Whether the devices of a slice, or one device, can be used on ``node``."""
    if part.node_name:
        return part.node_name == node.metadata.name
    return part.all_nodes or (part.node_selector is not None and selects(part.node_selector, node))


def _concerns(item: DetailedSlice, node: Node) -> bool:
    spec = item.spec
    return any(_is_for(node, part) for part in (spec.devices if spec.per_device_node_selection else [spec]))


def usable_on(node: Node, device: AllocatableDevice) -> bool:
    """Whether a device of a slice that has one for ``node`` is usable there itself."""
    return not device.spec.per_device_node_selection or _is_for(node, device.entry)


def _pool_id(item: DetailedSlice) -> PoolId:
    return PoolId(item.spec.driver, item.spec.pool.name)


def _pool(pool: PoolId, own: list[DetailedSlice], slices: Sequence[DetailedSlice]) -> DevicePool | None:
    """The pool of ``own`` slices, which concern the node, among its ``slices``; None if they are out of date.

    As upstream, slices of other nodes are looked at only if ``own`` are not as many as the pool shall have.
    """
    generation, count = own[0].spec.pool.generation, own[0].spec.pool.resource_slice_count
    others: list[DetailedSlice] = []
    if len(own) != count:
        if any(item.spec.pool.generation > generation for item in slices):
            return None
        names = {item.metadata.name for item in own}
        current = [item for item in slices if item.spec.pool.generation == generation]
        if len(current) != count:
            return DevicePool(pool, incomplete=True)
        others = [item for item in current if item.metadata.name not in names]
    return _built(pool, sorted(own, key=lambda item: item.metadata.name), others)


def _built(pool: PoolId, own: Sequence[DetailedSlice], others: Sequence[DetailedSlice]) -> DevicePool:
    # A slice has either counter sets or devices: the API server refuses one with both.
    sets = [counter_set for item in (*own, *others) for counter_set in item.spec.shared_counters]
    counters = counters_of((counter_set.name, counter_set.counters) for counter_set in sets)
    candidates, elsewhere = _candidates(own), _candidates(others)
    problem = (
        _twice("device", [device.id.device for device in candidates])
        or _twice("counter set", [counter_set.name for counter_set in sets])
        or _unknown_counter((*candidates, *elsewhere), {counter_set.name for counter_set in sets}, counters)
    )
    if problem is not None:
        return DevicePool(pool, invalid=problem)
    needs_binding = any(device.entry.binding_conditions for device in candidates)
    return DevicePool(pool, candidates, elsewhere, counters, needs_binding=needs_binding)


def _candidates(slices: Iterable[DetailedSlice]) -> tuple[AllocatableDevice, ...]:
    return tuple(
        AllocatableDevice(DeviceId(item.spec.driver, item.spec.pool.name, entry.name), entry, item.spec)
        for item in slices
        if not item.spec.shared_counters
        for entry in item.spec.devices
    )


def _twice(what: str, names: Sequence[str]) -> str | None:
    repeated = (name for name, count in Counter(names).items() if count > 1)
    return next((f"two of its {what}s are called {name}" for name in repeated), None)


def _unknown_counter(devices: Iterable[AllocatableDevice], sets: Collection[str], counters: Counters) -> str | None:
    for device in devices:
        for consumed in device.entry.consumes_counters:
            if consumed.counter_set not in sets:
                return f"device {device.id.device} consumes counters of {consumed.counter_set}, which does not exist"
            for name in consumed.counters:
                if (consumed.counter_set, name) not in counters:
                    return f"device {device.id.device} consumes {consumed.counter_set}/{name}, which does not exist"
    return None


def nodes_of(devices: Iterable[AllocatableDevice], node: str) -> NodeSelector | None:
    """The nodes on which an allocation of these devices on ``node`` can be used; None: all. Raises AllocationError."""
    fields: list[Expression] = []
    expressions: list[Expression] = []
    for device in devices:
        where = device.entry if device.spec.per_device_node_selection else device.spec
        if where.node_name or device.entry.binds_to_node:
            return NodeSelector((NodeTerm(match_fields=(Expression("metadata.name", "In", (node,)),)),))
        terms = where.node_selector.node_selector_terms if where.node_selector is not None else ()
        if len(terms) > 1:
            message = f"device {device.id.device} has a node selector of {len(terms)} terms; the scheduler knows one"
            raise AllocationError(FailureKind.NODE_SELECTOR, message)
        for term in terms:
            fields += [new for new in term.match_fields if new not in fields]
            expressions += [new for new in term.match_expressions if new not in expressions]
    if not fields and not expressions:
        return None
    return NodeSelector((NodeTerm(tuple(expressions), tuple(fields)),))
