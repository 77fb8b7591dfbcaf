"""The writer of changed plans: urgent ones first, no more at a time than the API server can take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import NamedTuple

import msgspec

from controller.step_names import Observer, Step
from driver.errors import CONFLICT, ApiError
from driver.kube.client import KubeClient, Object
from driver.kube.types import GpuNodePlan
from driver.model.plan import API_VERSION, KIND, PATH, SEPARATE_FIELDS, WITHOUT_SEPARATE_FIELDS, PlanSpec
from driver.step_observer import observed, unobserved

log = logging.getLogger(__name__)

LAZY_WRITE_DELAY_SECONDS = 1.0
"""Longest delay of a change that no pending claim depends on: a write of a plan costs the API server milliseconds, and
the scheduler tries every waiting pod again when the node changes its slices."""

RETRY_INTERVAL_SECONDS = 3.0
"""Time until a failed write of a plan is repeated; other plans are written meanwhile."""

CONFLICT_RETRY_SECONDS = 0.1
"""Delay before a conflicting write is tried again, once the watch has the new version: a change of status numbers alone
triggers no decision that would do it."""

MAX_WRITES = 48
"""Plans written per decision: an urgent plan must not wait for the updates of a thousand nodes."""

PARALLEL_WRITES = 8
"""One change of the cluster changes several plans, and claims wait for the last of them."""


class Priority(IntEnum):
    """Why a plan is written; the first is written first."""

    KEEP = 0
    """A device that the node is about to withdraw is allocated."""
    OFFER = 1
    """The plan gets offers of a kind that pending claims ask for; or any offers, if no claim is pending."""
    EPOCH = 2
    LAZY = 3


class Due(NamedTuple):
    """A plan to be written. ``owner`` is the uid of the Node."""

    priority: Priority
    node: str
    plan: GpuNodePlan | None
    owner: str
    spec: PlanSpec


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
        """Nodes whose plans differed from ``specs`` at the last call of ``write``."""
        self._failed: dict[str, float] = {}
        self._outdated: dict[str, GpuNodePlan | None] = {}
        """By node, what the API server refused to change because it is not the newest version."""

    def write(
        self,
        specs: Mapping[str, PlanSpec],
        existing: Mapping[str, GpuNodePlan],
        owners: Mapping[str, str],
        requested: Collection[str] | None,
        changed: Collection[str] | None = None,
    ) -> int:
        """Write those of ``specs`` that differ from ``existing`` plans, and return their number; failures are repeated.

        ``owners`` are the uids of the Nodes: a plan is deleted with its Node. ``requested`` are the offers, as plans
        have them, that pending claims ask for; None: no claim is pending. ``changed`` are the nodes whose spec or plan
        changed since the last call; None: any.
        """
        now = self._clock()
        due = self._due(specs, existing, owners, requested, changed, now)
        if not due:
            return 0
        with ThreadPoolExecutor(min(len(due), PARALLEL_WRITES)) as pool:
            run = pool.map if len(due) > 1 else map  # a thread costs more than its switch is worth for one plan
            errors = {write.node: error for write, error in zip(due, run(self._write, due), strict=True)}
        failed = {node: error for node, error in errors.items() if error is not None}
        conflicts = [node for node, error in failed.items() if error.status == CONFLICT]
        if conflicts:
            log.debug("plans changed meanwhile: not written", extra={"nodes": ",".join(conflicts)})
        self._outdated |= {node: existing.get(node) for node in conflicts}
        self._differs_since |= dict.fromkeys(conflicts, now + CONFLICT_RETRY_SECONDS - LAZY_WRITE_DELAY_SECONDS)
        failures = {node: str(error) for node, error in failed.items() if error.status != CONFLICT}
        if failures:
            self._failed |= dict.fromkeys(failures, now + RETRY_INTERVAL_SECONDS)
            first, why = next(iter(failures.items()))
            log.error("writing plans failed", extra={"plans": len(failures), "first": first, "error": why})
        return len(due) - len(failed)

    def _due(
        self,
        specs: Mapping[str, PlanSpec],
        existing: Mapping[str, GpuNodePlan],
        owners: Mapping[str, str],
        requested: Collection[str] | None,
        changed: Collection[str] | None,
        now: float,
    ) -> list[Due]:
        """The plans to be written now; other differences are remembered for later."""
        before, self._differs_since = self._differs_since, {}
        self._failed = {node: until for node, until in self._failed.items() if until > now}
        self._outdated = {node: plan for node, plan in self._outdated.items() if existing.get(node) is plan}
        differ: set[str] = set()
        due: list[Due] = []
        for node in specs.keys() & (specs if changed is None else self._differ | {*changed}):
            plan, spec = existing.get(node), specs[node]
            if plan is not None and (plan.metadata.paused or _is_current(plan.spec, spec)):
                continue
            differ.add(node)
            if node in self._failed:
                continue
            if node in self._outdated:
                self._differs_since[node] = now
                continue
            since = before.get(node, now)
            priority = _priority(plan.spec if plan is not None else PlanSpec(), spec, requested)
            if plan is None or priority < Priority.LAZY or now - since >= LAZY_WRITE_DELAY_SECONDS:
                due.append(Due(priority, node, plan, owners.get(node, ""), spec))
            else:
                self._differs_since[node] = since
        self._differ = differ
        if len(due) > MAX_WRITES:
            due.sort(key=lambda write: write.priority)
            late = (write.node for write in due[MAX_WRITES:])
            self._differs_since |= dict.fromkeys(late, now - LAZY_WRITE_DELAY_SECONDS)
        return due[:MAX_WRITES]

    @property
    def next_s(self) -> float | None:
        """Seconds until a delayed or failed write is due; None if there is none."""
        times = [*(since + LAZY_WRITE_DELAY_SECONDS for since in self._differs_since.values()), *self._failed.values()]
        return max(0.0, min(times) - self._clock()) if times else None

    def _write(self, due: Due) -> ApiError | None:
        """Write one plan, unless it changed meanwhile (CONFLICT): another controller may lead by now."""
        _, node, plan, owner, spec = due
        body = {"spec": {key: value for key, value in msgspec.to_builtins(spec).items() if key not in SEPARATE_FIELDS}}
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
                return error
            self._stored(stored)
            return None


def _is_current(current: PlanSpec, spec: PlanSpec) -> bool:
    """Whether a plan needs no write. Withdrawn devices that have left the slices need not be removed from it."""
    present = msgspec.structs.replace(current, withdrawn=spec.withdrawn, **WITHOUT_SEPARATE_FIELDS)
    return set(spec.withdrawn) <= set(current.withdrawn) and present == spec


def _priority(current: PlanSpec, spec: PlanSpec, requested: Collection[str] | None) -> Priority:
    if current.withdrawn and not spec.held_devices.isdisjoint(current.withdrawn):
        return Priority.KEEP
    new = {*spec.offers} - {*current.offers}
    if new and (requested is None or not new.isdisjoint(requested)):
        return Priority.OFFER
    return Priority.LAZY if current.epoch == spec.epoch else Priority.EPOCH
