"""The pools of devices that a node can use, from the ResourceSlices of the cluster (pure).

Order decides: of all solutions the allocator takes the first. Pools are ordered by driver and name, those with devices
that have to be bound after allocation last; slices by name; devices as they are written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from controller.demand.eligibility import selects
from driver.kube.slice_types import DetailedSlice
from driver.kube.types import Expression, Node, NodeSelector, NodeTerm
from tessera.simulate.failures import AllocationError, Failure
from tessera.simulate.slices import Candidate, Counters, DeviceId, counters_of


class PoolId(NamedTuple):
    driver: str
    pool: str


@dataclass(frozen=True)
class Pool:
    """``candidates`` are usable on the node, ``elsewhere`` are the other devices of the pool: they consume counters.

    ``incomplete`` pools, whose slices have not all been published, and ``invalid`` ones, for the reason given, have no
    candidates.
    """

    id: PoolId
    candidates: tuple[Candidate, ...] = ()
    elsewhere: tuple[Candidate, ...] = ()
    counters: Counters = field(default_factory=dict)
    incomplete: bool = False
    invalid: str | None = None
    needs_binding: bool = False


class SliceIndex:
    """The ResourceSlices of a cluster, by node and by pool."""

    def __init__(self, slices: Iterable[DetailedSlice]) -> None:
        self._of_node: dict[str, list[DetailedSlice]] = {}
        self._of_pool: dict[PoolId, list[DetailedSlice]] = {}
        for each in slices:
            self._of_node.setdefault(each.spec.node_name, []).append(each)
            self._of_pool.setdefault(PoolId(each.spec.driver, each.spec.pool.name), []).append(each)

    def near(self, node: str) -> list[DetailedSlice]:
        """The slices of ``node``, and those that are of no single one."""
        return [*self._of_node.get(node, ()), *self._of_node.get("", ())]

    def of_pool(self, pool: PoolId) -> Sequence[DetailedSlice]:
        return self._of_pool[pool]


def pools_of(slices: SliceIndex, node: Node) -> list[Pool]:
    """The pools with devices for ``node``, in the order in which devices are tried."""
    newest: dict[PoolId, list[DetailedSlice]] = {}
    for each in slices.near(node.metadata.name):
        if _concerns(each, node):
            _add(newest, each)
    found = (_pool(pool, own, slices.of_pool(pool)) for pool, own in newest.items())
    return sorted((pool for pool in found if pool is not None), key=lambda pool: (pool.needs_binding, pool.id))


def available_on(node: Node, name: str, selector: NodeSelector | None, *, everywhere: bool) -> bool:
    """Whether devices with this node name, or else selector, can be used on ``node``."""
    if name:
        return name == node.metadata.name
    return everywhere or (selector is not None and selects(selector, node))


def _concerns(found: DetailedSlice, node: Node) -> bool:
    spec = found.spec
    if spec.per_device_node_selection:
        return any(usable_on(node, Candidate(DeviceId("", "", ""), each, spec)) for each in spec.devices)
    return available_on(node, spec.node_name, spec.node_selector, everywhere=spec.all_nodes)


def usable_on(node: Node, device: Candidate) -> bool:
    """Whether a device of a slice that has one for ``node`` is usable there itself."""
    entry = device.entry
    return not device.spec.per_device_node_selection or available_on(
        node, entry.node_name, entry.node_selector, everywhere=entry.all_nodes
    )


def _add(newest: dict[PoolId, list[DetailedSlice]], found: DetailedSlice) -> None:
    """Keep the slices of the newest generation of each pool."""
    pool = found.spec.pool
    known = newest.setdefault(PoolId(found.spec.driver, pool.name), [])
    if known and pool.generation > known[0].spec.pool.generation:
        known.clear()
    if not known or pool.generation == known[0].spec.pool.generation:
        known.append(found)


def _pool(pool: PoolId, own: list[DetailedSlice], slices: Sequence[DetailedSlice]) -> Pool | None:
    """The pool of ``own`` slices, which concern the node, among its ``slices``; None if they are out of date.

    As upstream, slices of other nodes are looked at only if ``own`` are not as many as the pool shall have.
    """
    generation, count = own[0].spec.pool.generation, own[0].spec.pool.resource_slice_count
    others: list[DetailedSlice] = []
    if len(own) != count:
        if any(each.spec.pool.generation > generation for each in slices):
            return None
        names = {each.metadata.name for each in own}
        current = [each for each in slices if each.spec.pool.generation == generation]
        if len(current) != count:
            return Pool(pool, incomplete=True)
        others = [each for each in current if each.metadata.name not in names]
    return _built(pool, sorted(own, key=lambda each: each.metadata.name), others)


def _built(pool: PoolId, own: Sequence[DetailedSlice], others: Sequence[DetailedSlice]) -> Pool:
    # A slice has either counter sets or devices: the API server refuses one with both.
    sets = [each for found in (*own, *others) for each in found.spec.shared_counters]
    counters = counters_of((each.name, each.counters) for each in sets)
    candidates, elsewhere = _candidates(own), _candidates(others)
    problem = (
        _twice("device", [each.id.device for each in candidates])
        or _twice("counter set", [each.name for each in sets])
        or _unknown_counter((*candidates, *elsewhere), {each.name for each in sets}, counters)
    )
    if problem is not None:
        return Pool(pool, invalid=problem)
    needs_binding = any(each.entry.binding_conditions for each in candidates)
    return Pool(pool, candidates, elsewhere, counters, needs_binding=needs_binding)


def _candidates(slices: Iterable[DetailedSlice]) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(DeviceId(each.spec.driver, each.spec.pool.name, entry.name), entry, each.spec)
        for each in slices
        if not each.spec.shared_counters
        for entry in each.spec.devices
    )


def _twice(what: str, names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return f"two of its {what}s are called {name}"
        seen.add(name)
    return None


def _unknown_counter(devices: Iterable[Candidate], sets: Collection[str], counters: Counters) -> str | None:
    for device in devices:
        for consumed in device.entry.consumes_counters:
            if consumed.counter_set not in sets:
                return f"device {device.id.device} consumes counters of {consumed.counter_set}, which does not exist"
            for name in consumed.counters:
                if (consumed.counter_set, name) not in counters:
                    return f"device {device.id.device} consumes {consumed.counter_set}/{name}, which does not exist"
    return None


def nodes_of(devices: Iterable[Candidate], node: str) -> NodeSelector | None:
    """The nodes on which an allocation of these devices on ``node`` can be used; None: all. Raises AllocationError."""
    fields: list[Expression] = []
    expressions: list[Expression] = []
    for each in devices:
        where = each.entry if each.spec.per_device_node_selection else each.spec
        if where.node_name or each.entry.binds_to_node:
            return NodeSelector((NodeTerm(match_fields=(Expression("metadata.name", "In", (node,)),)),))
        terms = where.node_selector.node_selector_terms if where.node_selector is not None else ()
        if len(terms) > 1:
            message = f"device {each.id.device} has a node selector of {len(terms)} terms; the scheduler knows one"
            raise AllocationError(Failure.NODE_SELECTOR, message)
        for term in terms:
            fields += [new for new in term.match_fields if new not in fields]
            expressions += [new for new in term.match_expressions if new not in expressions]
    if not fields and not expressions:
        return None
    return NodeSelector((NodeTerm(tuple(expressions), tuple(fields)),))
