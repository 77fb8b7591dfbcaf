"""The plan of each node, from what is to be offered and what is held, and the writer of changed plans."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from controller.cluster.claim_index import PoolDevice
from controller.cluster.fleet import Fleet, FleetGpu
from controller.cluster.node_views import Changes, NodeView
from controller.steps import Observer, Step
from driver.errors import CONFLICT, ApiError
from driver.kube.client import KubeClient, Object
from driver.kube.types import GpuNodePlan
from driver.model.plan import API_VERSION, KIND, OPERATORS, PATH, Offer, OfferMode, PlanSpec, PublishHeld
from driver.steps import observed, unobserved

log = logging.getLogger(__name__)

LAZY_WRITE_DELAY_SECONDS = 1.0
"""Longest delay of a change that no pending claim depends on: a write of a plan costs the API server milliseconds."""

RETRY_INTERVAL_SECONDS = 3.0
"""Time until a failed write of a plan is repeated; other plans are written meanwhile."""

MAX_WRITES = 48
"""Plans written per decision: an urgent plan must not wait for the updates of a thousand nodes."""

PARALLEL_WRITES = 8
"""One change of the cluster changes several plans, and claims wait for the last of them."""


class PlanSpecs:
    """The spec of each node's plan, brought up to date at every decision for the nodes that it concerns.

    ``owners`` are the uids of the Nodes. ``changed`` are nodes whose spec is another than when ``changed`` was cleared.
    """

    def __init__(self) -> None:
        self.specs: dict[str, PlanSpec] = {}
        self.owners: dict[str, str] = {}
        self.changed: set[str] = set()
        self._views: dict[str, NodeView] = {}
        self._node_of_pool: dict[str, str] = {}
        self._dedicated: set[str] = set()
        """Nodes with a use for single GPUs: their specs depend on the fleet, too."""
        self._special: set[str] = set()
        """Nodes that had offers or withdrawn devices last time."""
        self._publish_held: Mapping[str, PublishHeld] = {}
        self._offer_mode = OfferMode.COUNTERS

    def update(
        self,
        views: Sequence[NodeView],
        changes: Changes,
        fleet: Fleet,
        offers: Collection[Offer],
        withdrawn: Collection[PoolDevice],
        publish_held: Mapping[str, PublishHeld],
        offer_mode: OfferMode = OfferMode.COUNTERS,
        listed: Collection[Offer] = (),
    ) -> Mapping[str, PlanSpec]:
        """The specs by node, given what is to be offered and withdrawn, and what each node does with held devices.

        ``listed`` are to be published whether they are offered or not.
        """
        offers_of, listed_of = _by_node(fleet, offers), _by_node(fleet, listed)
        withdrawn_of: dict[str, list[str]] = defaultdict(list)
        for device in withdrawn:
            withdrawn_of[device.pool].append(device.device)
        renewed = self._take_over(views, changes)
        nodes_of_withdrawn = {self._node_of_pool[pool] for pool in withdrawn_of if pool in self._node_of_pool}
        special = offers_of.keys() | listed_of.keys() | self._dedicated | nodes_of_withdrawn
        turned = {name for name, each in publish_held.items() if self._publish_held.get(name) is not each}
        if offer_mode is not self._offer_mode:
            turned = {*self._views}
        self._publish_held, self._offer_mode = dict(publish_held), offer_mode
        for name in renewed | ((self._special | turned) & self._views.keys()) | special:
            view = self._views[name]
            gpus, gone = fleet.nodes.get(name, ()), withdrawn_of.get(view.pool, ())
            wanted, published = offers_of.get(name, ()), listed_of.get(name, ())
            self._put(name, _spec(view, gpus, wanted, published, gone, publish_held[name], offer_mode))
        self._special = special
        return self.specs

    def _take_over(self, views: Sequence[NodeView], changes: Changes) -> set[str]:
        """Returns the nodes whose views are new."""
        renewed = changes.views
        if changes.membership:
            self.specs, self.owners, self._views, self._node_of_pool, self._dedicated = {}, {}, {}, {}, set()
            renewed = views
        for view in renewed:
            self._views[view.name], self._node_of_pool[view.pool], self.owners[view.name] = view, view.name, view.uid
            (self._dedicated.add if view.dedication.gpus else self._dedicated.discard)(view.name)
        return {view.name for view in renewed}

    def _put(self, name: str, spec: PlanSpec) -> None:
        """Store ``spec``; an equal one stays the same object."""
        if spec != self.specs.get(name):
            self.specs[name] = spec
            self.changed.add(name)


def _by_node(fleet: Fleet, offers: Iterable[Offer]) -> dict[str, list[Offer]]:
    found: dict[str, list[Offer]] = defaultdict(list)
    for offer in offers:
        found[fleet.gpus[offer.gpu].node].append(offer)
    return found


def _spec(
    node: NodeView,
    gpus: tuple[FleetGpu, ...],
    offers: Iterable[Offer],
    listed: Iterable[Offer],
    gone: Sequence[str],
    publish_held: PublishHeld,
    offer_mode: OfferMode,
) -> PlanSpec:
    return PlanSpec(
        epoch=node.status.epoch,
        held=tuple(sorted(map(str, node.held.values()))),
        offers=tuple(sorted(map(str, offers))),
        listed=tuple(sorted(map(str, listed))),
        withdrawn=tuple(sorted(gone)),
        publish_held=publish_held,
        offer_mode=offer_mode,
        dedicated_to=node.dedication.node,
        dedicated_gpus=_dedicated_gpus(node, gpus),
    )


def _dedicated_gpus(node: NodeView, gpus: tuple[FleetGpu, ...]) -> tuple[str, ...]:
    """``UUID=USE`` of the GPUs that have a use of their own."""
    uses = node.dedication.gpus
    return tuple(f"{entry.gpu.uuid}={uses[entry.number]}" for entry in gpus if entry.number in uses)


Due = tuple[str, GpuNodePlan | None, str, PlanSpec]
"""A node, its plan, the uid of its Node, and the spec to be written."""


class PlanWriter:
    """Writes the plans whose spec is to be changed, except paused ones.

    Urgent changes are written at once, others after ``LAZY_WRITE_DELAY_SECONDS`` or together with an urgent one.
    ``stored`` is called with each plan as the API server returns it.
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
        """Nodes whose plans differed from the wanted spec at the last call."""
        self._failed: dict[str, float] = {}

    def write(
        self,
        wanted: Mapping[str, PlanSpec],
        existing: Mapping[str, GpuNodePlan],
        owners: Mapping[str, str],
        changed: Collection[str] | None = None,
    ) -> int:
        """Write what differs from ``existing``. Returns the number of written plans; failed writes are repeated later.

        ``owners`` are the uids of the Nodes: a plan is deleted with its Node. ``changed`` are the nodes whose spec or
        plan changed since the last call; None: any.
        """
        now = self._clock()
        due = self._due(wanted, existing, owners, changed, now)
        if not due:
            return 0
        with ThreadPoolExecutor(min(len(due), PARALLEL_WRITES)) as pool:
            pending = [pool.submit(self._write, *each) for each in due]
        failures = {node: str(error) for (node, *_), each in zip(due, pending, strict=True) if (error := each.result())}
        if failures:
            self._failed |= dict.fromkeys(failures, now + RETRY_INTERVAL_SECONDS)
            first, why = next(iter(failures.items()))
            log.error("writing plans failed", extra={"plans": len(failures), "first": first, "error": why})
        return len(due) - len(failures)

    def _due(
        self,
        wanted: Mapping[str, PlanSpec],
        existing: Mapping[str, GpuNodePlan],
        owners: Mapping[str, str],
        changed: Collection[str] | None,
        now: float,
    ) -> list[Due]:
        """The plans to be written now; other differences are remembered for later."""
        before, self._differs_since = self._differs_since, {}
        self._failed = {node: until for node, until in self._failed.items() if until > now}
        differ: set[str] = set()
        due: list[Due] = []
        for node in wanted.keys() & (wanted if changed is None else self._differ | {*changed}):
            plan, spec = existing.get(node), wanted[node]
            if plan is not None and (plan.metadata.paused or _is_current(plan.spec, spec)):
                continue
            differ.add(node)
            if node in self._failed:
                continue
            since = before.get(node, now)
            if plan is None or _is_urgent(plan.spec, spec) or now - since >= LAZY_WRITE_DELAY_SECONDS:
                due.append((node, plan, owners.get(node, ""), spec))
            else:
                self._differs_since[node] = since
        self._differ = differ
        if len(due) > MAX_WRITES:
            due.sort(key=lambda each: _priority(each[1], each[3]))
            self._differs_since |= dict.fromkeys(
                (node for node, *_ in due[MAX_WRITES:]), now - LAZY_WRITE_DELAY_SECONDS
            )
        return due[:MAX_WRITES]

    def due_in_s(self) -> float | None:
        """Seconds until a delayed or failed write is due; None if there is none."""
        times = [*(since + LAZY_WRITE_DELAY_SECONDS for since in self._differs_since.values()), *self._failed.values()]
        return max(0.0, min(times) - self._clock()) if times else None

    def _write(self, node: str, plan: GpuNodePlan | None, owner: str, spec: PlanSpec) -> ApiError | None:
        """Write one plan, unless it changed meanwhile: another controller may lead by now."""
        body = {"spec": {key: value for key, value in msgspec.to_builtins(spec).items() if key not in OPERATORS}}
        with observed(self._observer, Step.WRITE_PLAN):
            try:
                if plan is None:
                    reference = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": owner}
                    metadata = {"name": node, "ownerReferences": [reference]}
                    whole = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, **body}
                    stored = self._client.create(PATH, whole)
                else:
                    precondition = {"metadata": {"resourceVersion": plan.metadata.resource_version}}
                    stored = self._client.patch(f"{PATH}/{node}", {**precondition, **body})
            except ApiError as error:
                if error.status != CONFLICT:
                    return error
                log.debug("plan changed meanwhile: not written", extra={"node": node})
                return None
            self._stored(stored)
            return None


def _is_current(current: PlanSpec, wanted: PlanSpec) -> bool:
    """Whether a plan needs no write. Withdrawn devices that have left the slices need not be removed from it."""
    if not set(wanted.withdrawn) <= set(current.withdrawn):
        return False
    return msgspec.structs.replace(current.decided, withdrawn=()) == msgspec.structs.replace(wanted, withdrawn=())


def _is_urgent(current: PlanSpec, wanted: PlanSpec) -> bool:
    """Whether a pending claim may depend on the change, or the node is about to withdraw an allocated device."""
    return current.epoch != wanted.epoch or _adds_offers(current, wanted) or _keeps_withdrawn(current, wanted)


def _adds_offers(current: PlanSpec, wanted: PlanSpec) -> bool:
    return not set(wanted.offers) <= set(current.offers)


def _keeps_withdrawn(current: PlanSpec, wanted: PlanSpec) -> bool:
    """Whether a device that the plan withdraws is allocated: the node must keep it."""
    return not wanted.held_devices.isdisjoint(current.withdrawn)


def _priority(current: GpuNodePlan | None, wanted: PlanSpec) -> int:
    """Sort key: the lowest is written first."""
    before = current.spec if current is not None else PlanSpec()
    if _keeps_withdrawn(before, wanted):
        return 0
    return 1 if _adds_offers(before, wanted) else 2
