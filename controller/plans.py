"""The plan of each node, from what shall be offered and what is held (pure), and writing those that changed."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from controller.fenced import PoolDevice
from controller.fleet import Fleet, FleetGpu
from controller.picture import NodeView
from controller.steps import Observer, Step
from driver.errors import CONFLICT, ApiError
from driver.kube.plans import GpuNodePlan
from driver.kube.transport import KubeClient, Object
from driver.model.plan import API_VERSION, KIND, OPERATORS, PATH, Offer, PlanSpec
from driver.steps import observed, unobserved

log = logging.getLogger(__name__)

LAZY_S = 1.0
"""How long a change may wait that no claim waits for; every write of a plan costs the API server milliseconds."""

RETRY_S = 3.0
"""After how long a plan that could not be written is tried again; the others don't wait for it."""

MOST_WRITES = 48
"""In one go: what a claim waits for must not stand behind the news of a thousand nodes."""

WRITES_AT_ONCE = 8
"""One change of the cluster changes several plans; claims wait for the last of them."""


@dataclass
class Planned:
    """The specs by node as found last, and from what; ``special`` nodes had offers, or something to let go."""

    specs: dict[str, PlanSpec] = field(default_factory=dict)
    special: frozenset[str] = frozenset()
    changed: set[str] = field(default_factory=set)
    """Nodes that got another spec since somebody emptied this."""
    owners: dict[str, str] = field(default_factory=dict)
    """The uids of the Nodes."""
    _views: Sequence[NodeView] = ()
    _by_name: dict[str, NodeView] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)
    """Of the nodes, by pool."""
    _dedicated: set[str] = field(default_factory=set)

    def take_over(self, views: Sequence[NodeView]) -> set[str]:
        """The nodes of which something has changed since the last time."""
        before, self._views = self._views, views
        changed: Sequence[NodeView] = [now for was, now in zip(before, views, strict=False) if was is not now]
        if len(before) != len(views) or any(view.name not in self._by_name for view in changed):
            self.specs, self.owners, self._by_name, self._names, self._dedicated = {}, {}, {}, {}, set()
            changed = views
        for view in changed:
            self._by_name[view.name], self._names[view.pool], self.owners[view.name] = view, view.name, view.uid
            (self._dedicated.add if view.dedication.gpus else self._dedicated.discard)(view.name)
        return {view.name for view in changed}

    def special_with(self, offered: Iterable[str], pools: Iterable[str]) -> frozenset[str]:
        """Nodes whose plans may change though they don't: with offers, uses of their own, devices to let go."""
        return frozenset([*offered, *self._dedicated, *(self._names[pool] for pool in pools if pool in self._names)])

    def view(self, name: str) -> NodeView:
        return self._by_name[name]

    def put(self, name: str, spec: PlanSpec) -> None:
        """An equal one stays the same object."""
        if spec != self.specs.get(name):
            self.specs[name] = spec
            self.changed.add(name)


def plan_specs(
    nodes: Sequence[NodeView],
    fleet: Fleet,
    offers: Collection[Offer],
    withdrawn: Collection[PoolDevice],
    known: Planned | None = None,
) -> Mapping[str, PlanSpec]:
    """What every node shall do, by node. ``known`` is what was found before, and is brought up to date."""
    known = known or Planned()
    by_node: dict[str, list[Offer]] = defaultdict(list)
    for offer in offers:
        by_node[fleet.gpus[offer.gpu].node].append(offer)
    gone: dict[str, list[str]] = defaultdict(list)
    for device in withdrawn:
        gone[device.pool].append(device.device)
    changed = known.take_over(nodes)
    special = known.special_with(by_node, gone)
    for name in changed | (known.special & known.owners.keys()) | special:
        view = known.view(name)
        known.put(name, _spec(view, fleet.nodes.get(name, ()), by_node.get(name, ()), gone.get(view.pool, ())))
    known.special = special
    return known.specs


def _spec(node: NodeView, gpus: tuple[FleetGpu, ...], offers: Sequence[Offer], gone: Sequence[str]) -> PlanSpec:
    return PlanSpec(
        epoch=node.status.epoch,
        held=tuple(sorted(map(str, node.held.values()))),
        offers=tuple(sorted(map(str, offers))),
        withdrawn=tuple(sorted(gone)),
        dedicated_to=node.dedication.node,
        dedicated_gpus=_dedicated_gpus(node, gpus),
    )


def _dedicated_gpus(node: NodeView, gpus: tuple[FleetGpu, ...]) -> tuple[str, ...]:
    """The GPUs that have a use of their own, and which."""
    uses = node.dedication.gpus
    return tuple(f"{entry.gpu.uuid}={uses[entry.number]}" for entry in gpus if entry.number in uses)


Due = tuple[str, GpuNodePlan | None, str, PlanSpec]
"""A node, its plan, the uid of its Node, what the plan shall say."""


class PlanWriter:
    """Writes the specs that differ from what the plans say; plans that a person has paused stay as they are.

    What adds an offer is written at once, the rest when it is ``LAZY_S`` old or goes along. ``stored`` is called with
    each plan as it was stored.
    """

    def __init__(
        self,
        client: KubeClient,
        stored: Callable[[Object], None],
        clock: Callable[[], float] = time.monotonic,
        observer: Observer = unobserved,
    ) -> None:
        self._client = client
        self._stored = stored
        self._clock = clock
        self._observer = observer
        self._differs_since: dict[str, float] = {}
        self._differ: set[str] = set()
        """Nodes whose plans did not say what is wanted when they were looked at last."""
        self._failed: dict[str, float] = {}

    def write(
        self,
        wanted: Mapping[str, PlanSpec],
        existing: Mapping[str, GpuNodePlan],
        owners: Mapping[str, str],
        changed: Collection[str] | None = None,
    ) -> int:
        """Bring ``existing`` in line; says how many were written. What can't be is logged and tried again later.

        ``owners`` are the uids of the Nodes: a plan goes with its node. ``changed`` are those of which spec or plan is
        another than at the last call; None: all may be.
        """
        now = self._clock()
        due = self._due(wanted, existing, owners, changed, now)
        if not due:
            return 0
        with ThreadPoolExecutor(min(len(due), WRITES_AT_ONCE)) as pool:
            pending = [pool.submit(self._observed, *each) for each in due]
        failures = {node: str(error) for (node, *_), each in zip(due, pending, strict=True) if (error := each.result())}
        if failures:
            self._failed |= dict.fromkeys(failures, now + RETRY_S)
            first, why = next(iter(failures.items()))
            log.error("plans can't be written", extra={"plans": len(failures), "first": first, "error": why})
        return len(due) - len(failures)

    def _due(
        self,
        wanted: Mapping[str, PlanSpec],
        existing: Mapping[str, GpuNodePlan],
        owners: Mapping[str, str],
        changed: Collection[str] | None,
        now: float,
    ) -> list[Due]:
        """What is to be written now; what differs besides is remembered."""
        before, self._differs_since = self._differs_since, {}
        self._failed = {node: until for node, until in self._failed.items() if until > now}
        differ: set[str] = set()
        due: list[Due] = []
        for node in wanted.keys() & (wanted if changed is None else self._differ | {*changed}):
            plan, spec = existing.get(node), wanted[node]
            if plan is not None and (plan.metadata.paused or _says(plan.spec, spec)):
                continue
            differ.add(node)
            if node in self._failed:
                continue
            since = before.get(node, now)
            if plan is None or _is_urgent(plan.spec, spec) or now - since >= LAZY_S:
                due.append((node, plan, owners.get(node, ""), spec))
            else:
                self._differs_since[node] = since
        self._differ = differ
        if len(due) > MOST_WRITES:
            due.sort(key=lambda each: _priority(each[1], each[3]))
            self._differs_since |= dict.fromkeys((node for node, *_ in due[MOST_WRITES:]), now - LAZY_S)
        return due[:MOST_WRITES]

    def due_in_s(self) -> float | None:
        """After how many seconds to write what can wait; None: nothing waits."""
        times = [*(since + LAZY_S for since in self._differs_since.values()), *self._failed.values()]
        return max(0.0, min(times) - self._clock()) if times else None

    def _observed(self, node: str, plan: GpuNodePlan | None, owner: str, spec: PlanSpec) -> ApiError | None:
        with observed(self._observer, Step.WRITE_PLAN):
            return self._write(node, plan, owner, spec)

    def _write(self, node: str, plan: GpuNodePlan | None, owner: str, spec: PlanSpec) -> ApiError | None:
        """A plan that has changed since it was seen is left for the next decision: another may lead by now."""
        body = {"spec": {key: value for key, value in msgspec.to_builtins(spec).items() if key not in OPERATORS}}
        try:
            if plan is None:
                metadata = {"name": node, "ownerReferences": [_reference(node, owner)]}
                stored = self._client.create(
                    PATH, {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, **body}
                )
            else:
                precondition = {"metadata": {"resourceVersion": plan.metadata.resource_version}}
                stored = self._client.patch(f"{PATH}/{node}", {**precondition, **body})
        except ApiError as error:
            if error.status != CONFLICT:
                return error
            log.debug("a plan has changed meanwhile", extra={"node": node})
            return None
        self._stored(stored)
        return None


def _reference(node: str, uid: str) -> Object:
    return {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}


def _says(current: PlanSpec, wanted: PlanSpec) -> bool:
    """Whether a plan needs no writing. That a device has gone from the slices is no news to the node."""
    if not set(wanted.withdrawn) <= set(current.withdrawn):
        return False
    return msgspec.structs.replace(current.decided, withdrawn=()) == msgspec.structs.replace(wanted, withdrawn=())


def _is_urgent(current: PlanSpec, wanted: PlanSpec) -> bool:
    """Whether a claim may be waiting for it, or the node about to take away what somebody was given after all."""
    return current.epoch != wanted.epoch or _adds_offers(current, wanted) or _gives_back(current, wanted)


def _adds_offers(current: PlanSpec, wanted: PlanSpec) -> bool:
    return not set(wanted.offers) <= set(current.offers)


def _gives_back(current: PlanSpec, wanted: PlanSpec) -> bool:
    """Whether somebody was given what the node is told to take away."""
    return not wanted.held_devices.isdisjoint(current.withdrawn)


def _priority(current: GpuNodePlan | None, wanted: PlanSpec) -> int:
    """The least is written first."""
    before = current.spec if current is not None else PlanSpec()
    if _gives_back(before, wanted):
        return 0
    return 1 if _adds_offers(before, wanted) else 2
