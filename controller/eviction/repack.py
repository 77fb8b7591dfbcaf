"""Which pods can have their devices elsewhere so that a waiting pod gets full GPUs, as GpuPolicies allow it.

Nothing is taken away: whatever their priorities, pods are evicted one at a time, the next one only once a new pod of
the last one's owner is bound and there still is a place for it. The GPU of the place is reserved for the new pod.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from controller.cluster.claim_index import PoolDevice
from controller.curation.reservation import whole_gpu
from controller.demand.pending_claims import IMPLICIT, Queue
from controller.eviction.preemption import PreemptionSearch, RunningPods, VictimRules
from controller.eviction.preemption_preview import ChosenVictims
from controller.eviction.victim_search import Preemption, VictimUnit, cost_of
from controller.explain.sources.moves import HeldDevice, moves_that_help, whole_gpus
from driver.kube.types import Pod


class MoveRules(VictimRules):
    """Who may be moved: pods of any priority, idle or not."""

    def reclaims(self, pod: Pod) -> bool:
        return False

    def why_busy_spared(self, pod: Pod) -> str | None:
        policy = self.policy(pod)
        return None if policy is not None and policy.spec.repack.movable else "no GpuPolicy lets it be moved"


class RepackSearch(PreemptionSearch):
    """The search for moves after which one pod has room. What they cost is at most what it has waited.

    Only a pod that goes without others and has one claim can be moved, to nodes with enough CPU and memory.
    """

    _rules = MoveRules

    def best(self) -> Preemption | None:
        self._movable: dict[str, VictimUnit | None] = {}
        self.moves = moves_that_help(self.queue, self.pod, self._may_go)
        moved = {move: unit for move in self.moves if (unit := self._unit_of(move.claim)) is not None}
        waited = self._clock.seconds_since(self.pod.metadata.creation_timestamp) / 3600
        units, node = tuple(dict.fromkeys(moved.values())), self.moves[0].source.node if moved else ""
        cost, gone = cost_of(units), [unit for move, unit in moved.items() if move.target.node != node]
        is_due = cost.gpu_hours <= waited * whole_gpus(self.queue, self.pod)
        return Preemption(node, units, cost) if moved and is_due and self._lacking(node, gone) is None else None

    def _unit_of(self, claim: str) -> VictimUnit | None:
        """The pod that has ``claim``, if it can be moved."""
        if claim not in self._movable:
            claims, pods = self.running.together(claim)
            names = tuple(str(pod.metadata.key) for pod in pods)
            is_alone = len(claims) == len(pods) == 1 and claim in self._parts
            is_free = is_alone and names not in self.protected and self.rules.why_spared(claims, pods) is None
            self._movable[claim] = self._unit(self._parts[claim][0][0].node, names, claims, pods) if is_free else None
        return self._movable[claim]

    def _may_go(self, item: HeldDevice, node: str) -> bool:
        if (unit := self._unit_of(item.claim)) is None:
            return False
        [pod] = self.running.of_units([unit])
        names = [name for name in pod.spec.resource_names if not name.startswith(IMPLICIT)]
        return node in self.queue.eligibility.nodes_for_successor(pod) and (
            self.running.lacking(node, pod, names, unit.pods) is None
        )


def gpus_of(chosen: ChosenVictims, queue: Queue) -> list[PoolDevice]:
    """The GPUs of the victims, or those that moves make whole; for a pod that needs several devices the unheld ones of
    the node, too."""
    node, units = chosen.preemption.node, chosen.preemption.units
    freed = {move.source.gpu.uuid for move in chosen.moves} or set[str]().union(*(unit.gpus for unit in units))
    counts = [request.count for needed in queue.combinations(chosen.pod) for request in needed.requests]
    takes_unheld = len(counts) != 1 or counts[0] != 1
    gpus, driver = queue.feasibility.fleet.nodes[node], queue.feasibility.matching.driver
    return [whole_gpu(gpu, driver) for gpu in gpus if gpu.gpu.uuid in freed or (takes_unheld and not gpu.held)]


def place_of(chosen: ChosenVictims, queue: Queue) -> dict[frozenset[str], list[PoolDevice]]:
    """By a hash of the first victim's owner, the GPUs where its next pod can have the devices of that victim; empty if
    no pod is moved. A tenant may write any UID of an owner: that of a claim, or a text that forges entries of the
    fence."""
    moved, units = chosen.victims[0][0], chosen.preemption.units
    if not chosen.moves or moved.controller is None:
        return {}
    claims, sources = set(map(str, moved.claims)), {move.source.gpu.uuid for move in chosen.moves}
    remaining = frozenset[str]().union(*(unit.gpus for unit in units if unit.claims <= claims)) - sources
    targets = {move.target.gpu.uuid for move in chosen.moves if move.claim in claims}
    owner = sha256(f"{moved.metadata.namespace}/{moved.controller.uid}".encode()).hexdigest()
    fleet, driver = queue.feasibility.fleet, queue.feasibility.matching.driver
    return {frozenset({owner}): [whole_gpu(fleet.gpus[uuid], driver) for uuid in sorted(targets | remaining)]}


def next_pods(last: ChosenVictims, pods: Iterable[Pod]) -> list[Pod]:
    """Those of ``pods`` that the owner of the pod that was evicted last has created since."""
    moved = last.victims[0][0]
    of_namespace = (pod for pod in pods if pod.metadata.namespace == moved.metadata.namespace)
    new = (pod for pod in of_namespace if pod.metadata.uid not in last.running)
    return [pod for pod in new if pod.controller == moved.controller]


def goes_on(last: ChosenVictims, next_moves: Preemption | None, running: RunningPods) -> bool:
    """Whether the pod that was evicted last has ended, a new one of its owner is bound, and the next ones to move are
    those that remain."""
    remaining = {unit.pods for unit in next_moves.units} if next_moves is not None else set()
    is_planned = remaining <= {unit.pods for unit in last.preemption.units}
    has_ended = last.victims[0][0].metadata.uid not in running.uids
    return is_planned and has_ended and bool(next_pods(last, running.pods.values()))
