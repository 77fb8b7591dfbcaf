"""Gangs: pending pods of one PodGroup, of which the scheduler places ``minCount`` together or none (pure).

Offers for a gang without room for all are useless to it, and pods of others would be placed on them instead of on the
best places. Whether there is room is answered by upper limits, in time linear in pods and nodes: a gang is held back
only if it is certain that the scheduler can not place it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from controller.demand.device_search import ROUNDING, SearchOutcome, most_devices, slices_of
from controller.demand.feasibility import Feasibility, Nodes
from controller.demand.requirements import ClaimRequirements
from driver.kube.types import Key, Pod, PodGroup

Wanted = tuple[tuple[ClaimRequirements, ...], Nodes]
"""The alternatives of a pod, of which one must be satisfied on one of the nodes."""


@dataclass(frozen=True, eq=False)
class Gang:
    """``pods`` have pending claims; the scheduler places at least ``needed`` of them together, or none."""

    group: PodGroup
    pods: tuple[Pod, ...]
    needed: int

    @property
    def missing(self) -> int:
        """The number of pods that are still to be created: until then the scheduler does not try to place any."""
        return max(0, self.needed - len(self.pods))


def gangs_of(pods: Iterable[Pod], pending: Collection[str], groups: Mapping[Key, PodGroup]) -> list[Gang]:
    """The gangs with pods in ``pending``, which are ``namespace/name`` of pods with pending claims.

    Of Volcano only those all of whose pods wait: it writes a moment later than the pods run that it has placed a gang.
    """
    members: dict[Key, list[Pod]] = {}
    for pod in pods:
        group = pod.pod_group
        if (
            group is not None
            and group in groups
            and not pod.metadata.deletion_timestamp
            and not pod.spec.scheduling_gates
        ):
            members.setdefault(group, []).append(pod)
    gangs = []
    for key, pods_of_group in members.items():
        waiting = tuple(
            pod
            for pod in pods_of_group
            if str(pod.metadata.key) in pending and not pod.spec.node_name and not groups[key].places_alone(pod)
        )
        needed = groups[key].min_count - (len(pods_of_group) - len(waiting))
        gang = Gang(groups[key], waiting, needed)
        is_placed = groups[key].is_of_volcano and (gang.missing or any(pod.spec.node_name for pod in pods_of_group))
        if waiting and needed > 0 and not is_placed:
            gangs.append(gang)
    return gangs


@dataclass(frozen=True)
class Room:
    """``pods``: how many pods of a gang the free devices are enough for at most, and on how many nodes."""

    pods: int
    nodes: int


class GangRoom:
    """Upper limits of the room for gangs in one fleet; the answer for a node is worked out once."""

    def __init__(self, feasibility: Feasibility) -> None:
        self._feasibility = feasibility
        self._rooms: dict[tuple[ClaimRequirements, str], tuple[int, float]] = {}

    def of(self, pods: Mapping[Wanted, int]) -> Room:
        """``pods``: how many are alike."""
        total = 0
        used: set[str] = set()
        by_size: list[tuple[float, int]] = []
        """Memory slices that a pod takes at least, and how many such pods there are: a tenant sets the number."""
        for (alternatives, nodes), count in pods.items():
            least, most = math.inf, 0
            for requirements in alternatives:
                for node, outcome in self._feasibility.outcomes(requirements, nodes):
                    if outcome is SearchOutcome.NO_ROOM:
                        continue
                    fitting_pods, size = self._on(requirements, node)
                    most, least = most + fitting_pods, min(least, size)
                    used.add(node)
                    if most >= count:
                        break
            total += min(most, count)
            if most:
                by_size.append((least, min(most, count)))
        free = sum(state.free for node in self._feasibility.nodes for state in self._feasibility.states(node))
        fitting = 0
        for size, count in sorted(by_size):
            room = int((free + ROUNDING) // size) if size else count
            free -= min(count, room) * size
            fitting += min(count, room)
            if room < count:
                break
        return Room(min(total, fitting), len(used))

    def _on(self, requirements: ClaimRequirements, node: str) -> tuple[int, float]:
        """The number of such pods that one node has room for at most, and the memory slices of one at least."""
        query = (requirements, node)
        if query in self._rooms:
            return self._rooms[query]
        gpus, states = self._feasibility.fleet.nodes[node], self._feasibility.states(node)
        most, size = math.inf, 0.0
        for request in requirements.requests:
            matches = [request.selector.on(gpu) for gpu in gpus]
            pairs = list(zip(states, matches, strict=True))
            count = request.count or 1
            most = min(most, sum(most_devices(*pair) for pair in pairs) // count if request.count else 1)
            size += count * min(
                (slices_of(state, kind, matches.gib) for state, matches in pairs for kind in matches.starts_by_kind),
                default=0.0,
            )
        if size:
            most = min(most, (sum(state.free for state in states) + ROUNDING) // size)
        # No limit: devices of other drivers only.
        self._rooms[query] = (sys.maxsize if most == math.inf else int(most), size)
        return self._rooms[query]
