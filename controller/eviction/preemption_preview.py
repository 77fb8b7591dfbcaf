"""What would be evicted for a waiting pod: the search of ``preemption``, and what protects the pods that it finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from controller.eviction.evictor import MOST_OF_OWNER, Evictor, Job, Trigger, owner_limit
from controller.eviction.gpu_policy import GpuPolicy
from controller.eviction.preemption import PreemptionSearch, RunningPods
from controller.eviction.victim_search import Preemption
from controller.explain.sources.moves import Move, moves_text
from driver.errors import NOT_FOUND, ApiError, accepted_status
from driver.kube.client import KubeClient
from driver.kube.get_and_list import list_claims, read_all, read_claim
from driver.kube.types import GpuNodePlan, Node, OwnerReference, Pod
from driver.model.plan import PATH

JOBS = "/apis/batch/v1/jobs"
BOUND = {"fieldSelector": "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"}

MAX_ROUNDS = 32
"""Searches after each of which pods are left out that the API server or a limit of the controller protects."""

MAX_ASKED = 200
"""Units of which it is found out after such a search whether they are protected, too, the cheapest first."""

SHOWN_PODS = 5

OTHERS = "requests for devices of other drivers"

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@dataclass(frozen=True)
class Preview:
    """What ``search`` has shown. ``obstacle``: why no pod would be evicted for its pod.

    ``unexamined``: fields of the pod that may keep it from the node, and that the search does not look at.
    """

    obstacle: str | None
    preemption: Preemption | None
    search: PreemptionSearch
    unexamined: Sequence[str]


class ChosenVictims(NamedTuple):
    """Pods that may be evicted for ``pod``, each with the policy that decides over it.

    ``idle``: the UIDs of those that may be evicted only because they are idle. ``moves``: where they can have their
    devices; then only the first one is evicted. ``running``: the UIDs of all pods that were bound.
    """

    pod: Pod
    preemption: Preemption
    victims: list[tuple[Pod, GpuPolicy]]
    idle: frozenset[str]
    moves: tuple[Move, ...]
    running: frozenset[str]

    @classmethod
    def of(cls, search: PreemptionSearch, preemption: Preemption) -> ChosenVictims:
        pods, rules = search.running.of_units(preemption.units), search.rules
        victims = [(victim, policy) for victim in pods if (policy := rules.policy(victim)) is not None]
        idle = frozenset(victim.metadata.uid for victim in pods if rules.why_busy_spared(victim) is not None)
        return cls(search.pod, preemption, victims, idle, search.moves, search.running.uids)

    @property
    def names(self) -> list[str]:
        return [str(victim.metadata.key) for victim, _ in self.victims]

    @property
    def is_active(self) -> bool:
        """Whether the policies let all be evicted, not only be reported."""
        return all(
            policy.spec.evicts_idle if self.trigger(victim) is Trigger.RECLAIM else policy.spec.mode == "Active"
            for victim, policy in self.victims
        )

    def trigger(self, victim: Pod) -> Trigger:
        by_rules = Trigger.REPACK if self.moves else Trigger.PREEMPTION
        return Trigger.RECLAIM if victim.metadata.uid in self.idle else by_rules

    def described(self) -> str:
        pod, cost, names = self.pod, self.preemption.cost, self.names
        idle = cost.pods - cost.busy
        more = f" and {len(names) - SHOWN_PODS} more" if len(names) > SHOWN_PODS else ""
        mode = "these are evicted" if self.is_active else "in the mode Active these would be evicted"
        return (
            f"for pod {pod.metadata.key} of priority {pod.spec.priority} {mode} on node {self.preemption.node}: "
            f"{', '.join(names[:SHOWN_PODS])}{more}, of priority {cost.priority} at most; "
            f"{cost.gpu_hours:g} GPU hours lost{f'; {idle} of them idle' if idle else ''}"
            f"{'; one at a time: ' if self.moves else ''}{moves_text(self.moves)}"
        )

    def named(self) -> str:
        """The victims as the waiting pod may see them: names of pods of its own namespace only."""
        namespace = self.pod.metadata.namespace
        mine = [victim.metadata.name for victim, _ in self.victims if victim.metadata.namespace == namespace]
        others = Counter(victim.metadata.namespace for victim, _ in self.victims)
        del others[namespace]
        return ", ".join([*mine, *(f"{count} of namespace {name}" for name, count in sorted(others.items()))])

    def limit(self, evictor: Evictor) -> str | None:
        """Why a limit of the controller or of a policy forbids to evict these now; None: it does not."""
        if evictor.has_lost_pods(self.pod):
            return "the owner of the waiting pod has lost a pod in this way within an hour"
        return evictor.recent.limit(self.victims, self.moves)

    def use_alone(self, client: KubeClient, victim: Pod) -> bool:
        """Whether no other pods than these use the claims of ``victim`` now. Raises ApiError."""
        uids = {pod.metadata.uid for pod, _ in self.victims}
        with accepted_status(NOT_FOUND):
            claims = [read_claim(client, *key) for key in victim.claims]
            return all(user.uid in uids for claim in claims for user in claim.status.reserved_for)
        return False

    def for_victim(self, victim: Pod) -> str:
        pod = self.pod
        is_own = victim.metadata.namespace == pod.metadata.namespace
        whom = f"pod {pod.metadata.name}" if is_own else f"a pod of namespace {pod.metadata.namespace}"
        why = ": they are idle" if victim.metadata.uid in self.idle else ""
        return f"evicted for {whom} of priority {pod.spec.priority}, which waits for its devices{why}"


def read_running(client: KubeClient) -> RunningPods:
    """What runs on the nodes now. Raises ApiError."""
    nodes, idle_since = read_all(client, "/api/v1/nodes", Node), read_idle_since(client)
    jobs = read_all(client, JOBS, Job)
    return RunningPods(read_all(client, "/api/v1/pods", Pod, BOUND), list_claims(client), nodes, jobs, idle_since)


def read_idle_since(client: KubeClient) -> dict[tuple[str, str], int]:
    """Since when claims are idle, as ``RunningPods`` takes it. Raises ApiError."""
    idle_since = dict[tuple[str, str], int]()
    with accepted_status(NOT_FOUND):  # the CustomResourceDefinition is not installed
        for plan in read_all(client, PATH, GpuNodePlan):
            reported = plan.status.idle_since(client.clock.now().timestamp())
            idle_since |= {(plan.metadata.name, claim): since for claim, since in reported.items()}
    return idle_since


def preview_of(search: PreemptionSearch, evictor: Evictor | None) -> Preview:
    """The pods that ``evictor`` would evict for that of ``search``. None is evicted. Raises ApiError.

    Units that are protected, such as by a PodDisruptionBudget, are left out; if only all units together are, the one
    that costs most. Without an ``evictor``, since there is no API server, only its limits protect pods.
    """
    obstacle, running, read = search.obstacle(), search.running, dict[str, Any]()
    fields, asked = [*_unexamined(evictor, search.pod), *_of_other_drivers(search)], set[tuple[str, ...]]()
    for _ in range(MAX_ROUNDS if obstacle is None else 0):
        preemption, protected = search.best(), dict[tuple[str, ...], str]()
        units = sorted(preemption.units, key=lambda unit: unit.cost) if preemption is not None else []
        for unit in units:
            pods = running.of_units([unit])
            if (why := protection_of(evictor, [pods], read)) is not None:
                protected[unit.pods] = why
            elif search.moves and (hidden := [field for moved in pods for field in _unexamined(evictor, moved)]):
                protected[unit.pods] = f"what {', '.join(hidden)} of it mean for another node is not examined"
        of_units = [running.of_units([unit]) for unit in units]
        if units and not protected and (why := protection_of(evictor, of_units, read)) is not None:
            others = (units[-1].pods, *_beyond_owner_limit(running, of_units))
            protected |= dict.fromkeys(others, f"{why} together with others")
        if not protected:
            return Preview(None, preemption, search, fields)
        remaining = [unit for unit in running.units.values() if unit.pods not in asked]
        for unit in sorted(remaining, key=lambda unit: unit.cost)[:MAX_ASKED]:  # else there would be a search for each
            asked.add(unit.pods)
            if (why := protection_of(evictor, [running.of_units([unit])], read)) is not None:
                protected[unit.pods] = why
        search.protected |= protected
    return Preview(obstacle, None, search, fields)


def _beyond_owner_limit(running: RunningPods, units: Iterable[Iterable[Pod]]) -> Iterator[tuple[str, ...]]:
    """Of owners of which too many are among ``units``, on each node the units beyond the cheapest ones that such an
    owner may lose; else there would be a search for each node."""
    counts = _units_by_owner(units)
    owners, counted = {owner for owner, count in counts.items() if count > MOST_OF_OWNER}, Counter[Any]()
    for (node, pods), unit in sorted(running.units.items(), key=lambda item: item[1].cost):
        for owner in owners.intersection(pod.controller for pod in running.of_units([unit])):
            counted[node, owner] += 1
            if counted[node, owner] > MOST_OF_OWNER:
                yield pods


def _units_by_owner(units: Iterable[Iterable[Pod]]) -> Counter[OwnerReference | None]:
    """How many of ``units`` have pods of each owner."""
    return Counter(owner for unit in units for owner in {pod.controller for pod in unit})


def _of_other_drivers(search: PreemptionSearch) -> Sequence[str]:
    """What the claims of its pod need, too, if no device of this driver meets one of their requests."""
    namespace, selector_of = search.pod.metadata.namespace, search.queue.reader.selector_of
    claims = (pending.claim for pending in search.queue.of_pod(search.pod))
    requests = (request for claim in claims for request in claim.spec.devices.requests)
    met = (any(selector_of(alternative, namespace) for alternative in request.alternatives) for request in requests)
    return () if all(met) else (OTHERS,)


def protection_of(
    evictor: Evictor | None, units: Sequence[Sequence[Pod]], read: dict[str, Any] | None = None
) -> str | None:
    """Why these pods must not be evicted, or None; those of a unit can only go together. ``read``: as for
    ``Evictor.protection``."""
    if evictor is None:
        counts = _units_by_owner(units).items()
        return next(filter(None, (owner_limit(owner, 0, count) for owner, count in counts if owner is not None)), None)
    pods = [pod for unit in units for pod in unit]
    unit_of = {pod.metadata.uid: unit[0].metadata.uid for unit in units for pod in unit}
    try:
        protection = evictor.protection(pods, read, unit_of)
    except ApiError as error:
        return f"what protects it can't be read: {error}"
    return None if protection is None else protection.reason


def _unexamined(evictor: Evictor | None, pod: Pod) -> list[str]:
    """The fields of ``pod`` that may keep it from a node and that are not examined."""
    namespace, name = pod.metadata.key
    written = evictor.client.find(f"/api/v1/namespaces/{namespace}/pods/{name}") if evictor is not None else None
    spec: dict[str, Any] = (written or {}).get("spec") or {}
    affinity, spread = spec.get("affinity") or {}, spec.get("topologySpreadConstraints") or ()
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    present = {
        "affinity.podAffinity": (affinity.get("podAffinity") or {}).get(REQUIRED),
        "affinity.podAntiAffinity": (affinity.get("podAntiAffinity") or {}).get(REQUIRED),
        "topologySpreadConstraints": [rule for rule in spread if rule.get("whenUnsatisfiable") != "ScheduleAnyway"],
        "persistentVolumeClaim": [volume for volume in spec.get("volumes") or () if "persistentVolumeClaim" in volume],
        "ephemeral": [volume for volume in spec.get("volumes") or () if "ephemeral" in volume],
        "hostPort": [port for container in containers for port in container.get("ports") or () if port.get("hostPort")],
    }
    return [field for field, value in present.items() if value]
