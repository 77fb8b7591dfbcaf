"""Which pods can have their devices elsewhere so that a waiting pod gets full GPUs, as GpuPolicies allow it.

Nothing is taken away: whatever their priorities, pods are evicted one at a time, the next one only once a new pod of
the last one's owner is bound and there still is a place for it. Places are not reserved for the new pods.
"""

from __future__ import annotations

from controller.demand.pending_claims import IMPLICIT
from controller.eviction.preemption import Preemption, PreemptionSearch, RunningPods, VictimRules
from controller.eviction.preemption_preview import ChosenVictims
from controller.eviction.victim_search import VictimUnit, as_set
from controller.explain.sources.moves import HeldDevice, moves_text, moves_that_help, whole_gpus
from controller.explain.sources.no_free_device import Reasoning
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
        [pending, *_] = self.queue.of_pod(self.pod)
        moves = moves_that_help(Reasoning(self.queue).for_claim(pending).queue, self.pod, self._may_go)
        self.moves = moves_text(moves)
        moved = {move: unit for move in moves if (unit := self._unit_of(move.claim)) is not None}
        waited = self._clock.seconds_since(self.pod.metadata.creation_timestamp) / 3600
        victims, node = as_set(list(dict.fromkeys(moved.values()))), moves[0].source.node if moved else ""
        is_due = victims.cost.gpu_hours <= waited * whole_gpus(self.queue, self.pod)
        gone = [unit for move, unit in moved.items() if move.target.node != node]
        return Preemption(node, victims) if moved and is_due and self._lacking(node, gone) is None else None

    def _unit_of(self, claim: str) -> VictimUnit | None:
        """The pod that has ``claim``, if it can be moved."""
        if claim not in self._movable:
            claims, pods = self.running.together(claim)
            names = tuple(str(pod.metadata.key) for pod in pods)
            is_alone = len(claims) == len(pods) == 1 and claim in self._parts
            is_free = is_alone and names not in self.protected and self.rules.why_spared(claims, pods) is None
            self._movable[claim] = self._unit(self._parts[claim][0].node, names, claims, pods) if is_free else None
        return self._movable[claim]

    def _may_go(self, item: HeldDevice, node: str) -> bool:
        if (unit := self._unit_of(item.claim)) is None:
            return False
        [pod] = self.running.of_units([unit])
        names = [name for name in pod.spec.resource_names if not name.startswith(IMPLICIT)]
        return node in self.queue.eligibility.nodes_for_successor(pod) and (
            self.running.lacking(node, pod.spec, names, unit.pods) is None
        )


def goes_on(last: ChosenVictims, next_moves: Preemption | None, running: RunningPods) -> bool:
    """Whether the pod that was evicted last has ended, a new one of its owner is bound, and the next ones to move are
    those that remain."""
    moved = last.victims[0][0]
    new = (pod for key, pod in running.pods.items() if key.namespace == moved.metadata.namespace)
    owners = [pod.controller for pod in new if pod.metadata.uid not in last.running]
    remaining = {unit.pods for unit in next_moves.victims.units} if next_moves is not None else set()
    is_planned = remaining <= {unit.pods for unit in last.preemption.victims.units}
    return is_planned and moved.metadata.uid not in running.uids and moved.controller in owners
