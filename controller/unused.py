"""Claims that wait though offers that would do stand for a while: something outside the offers is wrong (pure).

A pod is scheduled within a second of an offer that fits. Where it is not, the scheduler lacks a feature gate, does not
take the pool for complete, waits for something else, or isn't there at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from controller.assignment import Assignment, Standing
from controller.claim_queue import Queue
from controller.fenced import PoolDevice
from controller.objects import Pod
from controller.reasons import Code, Reason
from controller.survey import Nodes
from controller.waiting import Waiting
from controller.wishes import Wish
from driver.kube.clock import Clock, seconds_time
from driver.model.plan import Offer

SHOWN = 3
"""Devices that a sentence names."""

GATES = (
    "check that it has the feature gates that the API server has: DynamicResourceAllocation, DRAPartitionableDevices"
)


class Since(NamedTuple):
    """When something was first seen: ``at`` by the monotonic clock, ``told`` for people."""

    at: float
    told: str


@dataclass(frozen=True)
class Idle:
    """The devices that have stood long enough, by node, and what is wrong with pools (``controller.pools``)."""

    by_node: Mapping[str, list[Standing]]
    incomplete: Mapping[str, str]

    def fitting(self, queue: Queue, wish: Wish, nodes: Nodes) -> tuple[Standing, ...]:
        """Devices on one of ``nodes`` that would meet ``wish``, if possible of a complete pool."""
        names = sorted(self.by_node.keys() & nodes, key=lambda node: (self._is_broken(node), node))
        tried = (Assignment(wish, self.by_node[node], queue.survey.matching.value).found() for node in names)
        return next(filter(None, tried), ())

    def _is_broken(self, node: str) -> bool:
        return self.by_node[node][0].name.pool in self.incomplete


class Unused:
    """Remembers since when claims wait and offers stand; both must be ``patience_s`` long."""

    def __init__(self, patience_s: float, clock: Clock) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._claims: dict[str, Since] = {}
        self._devices: dict[PoolDevice, Since] = {}

    def look(self, queue: Queue, standing: Mapping[Offer, PoolDevice], incomplete: Mapping[str, str]) -> list[Reason]:
        """What to tell of claims that wait beside ``standing``, the published devices that nobody holds."""
        claims = {_uid(each) for each in queue.waiting if queue.wishes(each)}
        self._claims = {uid: self._claims.get(uid) or self._now() for uid in claims}
        self._devices = {name: self._devices.get(name) or self._now() for name in standing.values()}
        late = [each for each in queue.waiting if (since := self._claims.get(_uid(each))) and self._is_over(since)]
        if not late:
            return []
        idle = Idle(self._by_node(queue, standing), incomplete)
        known: dict[tuple[Wish, Nodes], tuple[Standing, ...]] = {}
        found = (self._reason(queue, each, idle, known) for each in late)
        return [reason for reason in found if reason is not None]

    @property
    def next_s(self) -> float | None:
        """In how many seconds the next claim or offer will have been there long enough; None if none will."""
        if not self._claims:
            return None
        now = self._clock.monotonic()
        times = (since.at + self._patience_s - now for since in (*self._claims.values(), *self._devices.values()))
        return min((seconds for seconds in times if seconds > 0), default=None)

    def _now(self) -> Since:
        return Since(self._clock.monotonic(), seconds_time(self._clock.now()))

    def _is_over(self, since: Since) -> bool:
        return self._clock.monotonic() >= since.at + self._patience_s

    def _by_node(self, queue: Queue, standing: Mapping[Offer, PoolDevice]) -> dict[str, list[Standing]]:
        found: dict[str, list[Standing]] = {}
        for offer, name in standing.items():
            if self._is_over(self._devices[name]):
                entry = queue.survey.fleet.gpus[offer.gpu]
                if (device := entry.device(name.device)) is not None:
                    found.setdefault(entry.node, []).append(Standing(entry, device, name))
        return found

    def _reason(
        self, queue: Queue, waiting: Waiting, idle: Idle, known: dict[tuple[Wish, Nodes], tuple[Standing, ...]]
    ) -> Reason | None:
        for pod, wish, nodes in _pods_wishes(queue, waiting):
            if (wish, nodes) not in known:
                known[wish, nodes] = idle.fitting(queue, wish, nodes)
            if devices := known[wish, nodes]:
                return self._told(waiting, pod, devices, idle.incomplete)
        return None

    def _told(self, waiting: Waiting, pod: Pod, devices: tuple[Standing, ...], incomplete: Mapping[str, str]) -> Reason:
        pool, names = devices[0].name.pool, [each.name.device for each in devices]
        since = max(self._devices[each.name] for each in devices).told
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        sentence = (
            f"{', '.join(names[:SHOWN])}{more} of node {devices[0].entry.node} would do and "
            f"{'are' if len(names) > 1 else 'is'} offered since {since}, but nothing is allocated: "
        )
        wrong = incomplete.get(pool)
        cause = f"the scheduler takes nothing from the pool {pool}, which {wrong}" if wrong else cause_of(pod)
        data = {
            "devices": names,
            "node": devices[0].entry.node,
            "pool": pool,
            "since": since,
            "incomplete": bool(wrong),
        }
        return Reason(waiting.key, Code.UNUSED, sentence + cause, data, waiting.made_up)


def cause_of(pod: Pod) -> str:
    """What is known of why a pod isn't scheduled that devices are there for."""
    condition = next((each for each in pod.status.conditions if each.keeps_from_scheduling and each.message), None)
    if condition is None:
        name = pod.spec.scheduler_name or "default-scheduler"
        return f"no scheduler has said anything of pod {pod.metadata.name}; does one run that is called {name}?"
    said = f"the scheduler says of pod {pod.metadata.name}: {condition.message}"
    return f"{said.rstrip('. ')}; {GATES}" if condition.lacks_devices else said


def _uid(waiting: Waiting) -> str:
    return waiting.pods[0].metadata.uid if waiting.made_up else waiting.claim.metadata.uid


def _pods_wishes(queue: Queue, waiting: Waiting) -> Iterator[tuple[Pod, Wish, Nodes]]:
    for pod in waiting.pods:
        nodes = queue.nodes_for(pod)
        yield from ((pod, wish, nodes) for wish in queue.combinations(pod))
