"""Which pods would have to end so that a waiting pod of higher priority gets its devices (pure).

The kube-scheduler does not preempt for devices. A set of victims is looked for on each node where the pod could run if
nothing were held there: see ``victim_search``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial
from math import inf, isfinite
from typing import NamedTuple

from controller.cluster.fleet import FleetGpu
from controller.demand.device_search import slices_of
from controller.demand.feasibility import Feasibility
from controller.demand.node_eligibility import AntiAffinity
from controller.demand.pending_claims import IMPLICIT, Queue, classes_by_resource, held_with_claims, without_claims
from controller.demand.pod_requests import RequestedAmount, requested, total
from controller.eviction.evictor import ADMIN_ACCESS, Job, own_protection
from controller.eviction.gpu_policy import GpuPolicies, GpuPolicy, ReclaimRules, seconds_of
from controller.eviction.victim_search import EvictionCost, Preemption, Tries, VictimUnit, beats, cheapest_set, cost_of
from controller.explain.sources.moves import Move
from controller.explain.sources.no_free_device import Reasoning
from driver.clock import Clock, read_time
from driver.kube.types import Claim, Key, Node, Pod

KUEUE_LABELS = "kueue.x-k8s.io/"
GANG_LABEL = "leaderworkerset.sigs.k8s.io/group-key"
"""Of the pods of one group of a LeaderWorkerSet, which restarts them together."""

MAX_GRACE_SECONDS = 3600
"""Longest grace period of a victim. Tenants choose it, and the GPU stays reserved until all victims have ended."""

MAX_CLAIMS = 16
"""Claims of the waiting pod whose tolerations are looked at. Tenants choose how many claims a pod has."""

ENDING_SECONDS = 60.0
"""No pod is evicted if pods that must have ended by then make room."""

MONTH_SECONDS, HAS_ENDED = 30 * 24 * 3600, {"Succeeded", "Failed"}
PODS = "pods"
"""The resource of a node that each pod takes one of."""


class SparedPods(NamedTuple):
    """Pods with devices on ``node`` that may not be evicted together, and why."""

    node: str
    pods: tuple[str, ...]
    reason: str


class RunningPods:
    """The pods of the cluster that are bound to nodes, the claims that they use, and what each node can give to pods.

    The controller's caches have none of these. ``idle_since``: in seconds since 1970, by node and name of a claim.
    """

    def __init__(
        self,
        pods: Iterable[Pod],
        claims: Iterable[Claim],
        nodes: Iterable[Node],
        jobs: Iterable[Job],
        idle_since: Mapping[tuple[str, str], int],
    ) -> None:
        self.pods = {pod.metadata.key: pod for pod in pods if pod.status.phase not in HAS_ENDED}
        self.uids = frozenset(pod.metadata.uid for pod in self.pods.values())
        self.claims = {str(claim.metadata.key): claim for claim in claims}
        nodes = list(nodes)
        self._allocatable = {node.metadata.name: node.status.allocatable for node in nodes}
        self._jobs = {job.metadata.uid: job.unfinished for job in jobs if job.is_gang}
        self._idle_since = idle_since
        self._anti_affinity = AntiAffinity(self.pods.values(), nodes)
        self._gangs: dict[tuple[str, str], list[Pod]] = {}
        self._on_nodes: dict[str, list[Pod]] = {}
        self._amounts: dict[tuple[Key, str], Fraction] = {}
        self.units: dict[tuple[str, tuple[str, ...]], VictimUnit] = {}
        """Of searches of one turn, with the same queue and policies: by node and pods."""
        for pod in self.pods.values():
            self._on_nodes.setdefault(pod.spec.node_name, []).append(pod)
            if (gang := self.gang_of(pod)) is not None:
                self._gangs.setdefault(gang, []).append(pod)

    def gang_of(self, pod: Pod) -> tuple[str, str] | None:
        """Names the gang of a pod, which is of no use without one of its pods."""
        owner, of_set = pod.controller, pod.metadata.labels.get(GANG_LABEL)
        if pod.pod_group is not None:
            return (pod.metadata.namespace, f"PodGroup {pod.pod_group.name}")
        if of_set is not None:
            return (pod.metadata.namespace, f"LeaderWorkerSet {of_set}")
        return (pod.metadata.namespace, f"Job {owner.name}") if owner is not None and owner.uid in self._jobs else None

    def waiting_of_gang(self, gang: tuple[str, str], pod: Pod, pods: Iterable[Pod]) -> int:
        """How many of the ``gang`` of ``pod`` wait: those among ``pods``, and of a Job those that do not exist yet."""
        of_job = self._jobs.get(pod.controller.uid, 0) if pod.controller is not None else 0
        waiting = sum(self.gang_of(other) == gang for other in pods)
        return max(waiting, of_job - len(self._gangs.get(gang, ())))

    def ties(self, pod: Pod) -> frozenset[object]:
        """What ``pod`` has in common with those that it works with: its owner, gang and claims."""
        return frozenset({(pod.metadata.namespace, pod.controller), self.gang_of(pod), *pod.claims}) - {None}

    def consumers(self, name: str) -> Iterator[Pod]:
        """The pods that a claim is reserved for."""
        claim = self.claims.get(name)
        for consumer in claim.pod_consumers if claim is not None else ():
            pod = self.pods.get(Key(name.partition("/")[0], consumer.name))
            if pod is not None and pod.metadata.uid == consumer.uid:
                yield pod

    def of_units(self, units: Iterable[VictimUnit]) -> list[Pod]:
        """The pods of ``units``, by namespace and name."""
        keys = (Key(*name.split("/")) for unit in units for name in unit.pods)
        return [self.pods[key] for key in sorted(keys)]

    def classes(self, pod: Pod) -> frozenset[str]:
        """The DeviceClasses of a pod's claims."""
        claims = (self.claims.get(str(key)) for key in pod.claims)
        return frozenset(name for claim in claims if claim is not None for name in claim.class_names)

    def idle_since(self, pod: Pod) -> int | None:
        """Since when all claims of ``pod`` are idle, at the earliest since it became Ready; None: not, or unknown."""
        begun = [condition.last_transition_time for condition in pod.status.conditions if condition.type == "Ready"]
        times = [read_time(time or "") for time in (pod.status.start_time, *begun)]
        times += [self._idle_since.get((pod.spec.node_name, str(key))) for key in pod.claims]
        reported = [time for time in times if time is not None]
        is_complete = bool(pod.claims) and len(reported) == len(times)
        return max(reported) if is_complete and pod.status.phase == "Running" else None

    def together(self, claim: str) -> tuple[frozenset[str], list[Pod]]:
        """The claims and pods that can only go together: those of a pod, the pods of a claim, those of a gang."""
        claims, pods, waiting = set[str](), dict[Key, Pod](), [claim]
        while waiting:
            name = waiting.pop()
            if name in claims:
                continue
            claims.add(name)
            for pod in self.consumers(name):
                gang = self.gang_of(pod)
                for member in [pod] if gang is None else self._gangs[gang] if pod.metadata.key not in pods else ():
                    pods[member.metadata.key] = member
                    waiting += map(str, member.claims)
        return frozenset(claims), list(pods.values())

    def lacking(self, node: str, pod: Pod, names: Iterable[str], gone: Collection[str]) -> str | None:
        """Which of these resources the node is short of for ``pod``, without the pods ``gone``; or None."""
        staying = [pod for pod in self._on_nodes.get(node, ()) if str(pod.metadata.key) not in gone]
        for name in (PODS, *names):
            has = total([RequestedAmount(self._allocatable.get(node, {}).get(name, "0"))])
            if sum((self._amount(name, other) for other in staying), self._amount(name, pod)) > has:
                return name
        against = self._anti_affinity.pod_against(pod, node, gone)
        return None if against is None else f"room next to pod {against} (required podAntiAffinity)"

    def _amount(self, resource: str, pod: Pod) -> Fraction:
        """Remembered: a search asks again for each set of pods."""
        key = (pod.metadata.key, resource)
        if key not in self._amounts:
            self._amounts[key] = Fraction(1) if resource == PODS else total(requested(pod.spec, resource))
        return self._amounts[key]


class VictimRules:
    """Who may be evicted for ``contender``: pods of lower priority, and idle ones. Without a contender these are the
    idle pods of policies that reclaim ``Always``."""

    def __init__(self, running: RunningPods, policies: GpuPolicies, clock: Clock, contender: Pod | None) -> None:
        self._running, self._policies, self._clock, self._contender = running, policies, clock, contender
        self._ties = frozenset[object]() if contender is None else running.ties(contender)

    def policy(self, pod: Pod) -> GpuPolicy | None:
        return self._policies.of_pod(pod.metadata.namespace, self._running.classes(pod))

    def idle_seconds(self, pod: Pod, part: float = 1.0) -> int | None:
        """None: less than the time that the policy says, or than a ``part`` of it; unknown; or it is to be kept."""
        since, policy = self._running.idle_since(pod), self.policy(pod)
        if since is None:
            return None
        rules, idle = (policy and policy.spec.reclaim) or ReclaimRules(), int(self._clock.now().timestamp()) - since
        with suppress(ValueError, TypeError):
            is_kept = self._clock.seconds_since(pod.metadata.annotations.keep_until or None) < 0
            if is_kept and idle < seconds_of(rules.keep_at_most):
                return None
        return None if idle < part * seconds_of(rules.idle_after) else idle

    def reclaims(self, pod: Pod) -> bool:
        """Whether ``pod`` may be evicted because it is idle."""
        rules = policy.spec.reclaim if (policy := self.policy(pod)) is not None else None
        if rules is None or (self._contender is None and (rules.when, rules.action) != ("Always", "Evict")):
            return False
        return self.idle_seconds(pod) is not None

    def why_spared(self, names: Iterable[str], pods: Sequence[Pod]) -> str | None:
        """Why these pods are not evicted together; None: they may be."""
        for name in sorted(names):
            claim = self._running.claims.get(name)
            if claim is not None and claim.has_admin_access:
                return ADMIN_ACCESS.reason
            if claim is not None and len(list(self._running.consumers(name))) < len(claim.status.reserved_for):
                return f"claim {name} is reserved for something that is no running pod"
        if not pods:
            return "no pod uses it: its claim holds the devices until it is deleted"
        return next(filter(None, map(self._why_pod_spared, pods)), None)

    def _why_pod_spared(self, pod: Pod) -> str | None:
        if (protection := own_protection(pod)) is not None:
            return protection.reason
        if pod.metadata.deletion_timestamp is not None:
            return "it is ending already"
        if (grace := pod.spec.termination_grace_period_seconds) > MAX_GRACE_SECONDS:
            return f"its terminationGracePeriodSeconds {grace} is above {MAX_GRACE_SECONDS}"
        if any(label.startswith(KUEUE_LABELS) for label in pod.metadata.labels):
            return "Kueue admits it, and takes back its quota itself"
        why, is_tied = self.why_busy_spared(pod), not self._ties.isdisjoint(self._running.ties(pod))
        tied = "it has an owner, a gang or a claim in common with the waiting pod" if is_tied else None
        return tied if why is None or self.reclaims(pod) else why

    def why_busy_spared(self, pod: Pod) -> str | None:
        """Why it is not evicted for a pod of higher priority, whether it is idle or not; None: it may be."""
        if self._contender is None:
            return "no pod waits for its devices"
        if pod.spec.priority >= self._contender.spec.priority:
            return f"its priority {pod.spec.priority} is not below {self._contender.spec.priority}"
        classes = self._running.classes(pod)
        return self._policies.refusal(pod.metadata.namespace, classes, self._contender.metadata.namespace)


class PreemptionSearch:
    """The search for one waiting pod.

    ``protected``: why units, by their pods, are left out, such as by a PodDisruptionBudget; the caller adds them.
    ``spared``: all that was left out on the nodes that were searched. ``short_of``: by node, the resource of which it
    would have too little for the pod even without all victims. ``moves``: of the victims' devices, if they are moved.
    """

    moves: tuple[Move, ...] = ()
    _rules = VictimRules

    def __init__(self, queue: Queue, pod: Pod, running: RunningPods, policies: GpuPolicies, clock: Clock) -> None:
        self.protected: dict[tuple[str, ...], str] = {}
        self.spared, self.short_of = list[SparedPods](), dict[str, str]()
        self._going: dict[str, list[VictimUnit]] = {}
        self.rules = self._rules(running, policies, clock, pod)
        for pending in queue.of_pod(pod)[:MAX_CLAIMS]:
            queue = Reasoning(queue).for_claim(pending).queue  # without devices whose taints it does not tolerate
        self.queue, self.pod, self.running, self._clock = queue, pod, running, clock
        by_class = classes_by_resource(queue.cluster.classes).keys()
        self._resources = sorted(name for name in pod.spec.resource_names - by_class if not name.startswith(IMPLICIT))
        self._parts: dict[str, list[tuple[FleetGpu, float]]] = {}
        """By claim, the GPUs of which it has something, and how many memory slices."""
        for entry in queue.feasibility.fleet:
            for device, claims in held_with_claims(entry, queue.holders):
                slices = slices_of(entry.state, device.spot.kind, device.spot.at)
                for claim in claims:
                    self._parts.setdefault(claim, []).append((entry, slices))
        self._alternatives, self._tries = list(queue.combinations(pod)), Tries()
        self._free, self._candidates = self._able(queue.feasibility), sorted(self._able(queue.feasibility.unheld))

    def count_ending(self) -> None:
        """Pods of the set have been evicted before: those that are ending make room, for however long they do."""
        self._going = {node: list(self._ending(node, inf)) for node in self._candidates}

    def obstacle(self) -> str | None:
        """Why no pod is evicted for this one, whatever the policies say; None: nothing prevents it."""
        pod, queue = self.pod, self.queue
        if not self._alternatives or not any(needed.requests for needed in self._alternatives):
            return "it waits for no device that this driver has"
        if pod.spec.preemption_policy == "Never":
            return "its preemptionPolicy is Never"
        if pod.status.nominated_node_name:
            return f"the scheduler makes room for it on node {pod.status.nominated_node_name}"
        gang = self.running.gang_of(pod)
        if gang is not None and (waiting := self.running.waiting_of_gang(gang, pod, queue.pods)) > 1:
            return f"it is one of {waiting} waiting pods of {gang[1]}: room for one of them serves none"
        if any(self._lacking(node, ()) is None for node in self._free):
            return "devices for it are free, so no eviction is needed"
        ending = self._going or {node: list(self._ending(node, ENDING_SECONDS)) for node in self._candidates}
        if any(units and self._is_enough(node, units, checks_resources=True) for node, units in ending.items()):
            return "pods that are ending make room for it"
        return None

    def best(self) -> Preemption | None:
        """The cheapest victims on any node; None: no set of pods that may be evicted makes room."""
        self.spared = []
        self._units_of = {node: list(self._units(node)) for node in self._candidates if node not in self._free}
        self.short_of = {node: lack for node, units in self._units_of.items() if (lack := self._lacking(node, units))}
        return self._cheapest_of(self._units_of.items())

    def second(self, best: Preemption) -> Preemption | None:
        """The cheapest set that is found next to ``best``, the last one's result, on its node one without one of its
        units; None: there is none."""
        node, units = best.node, self._units_of[best.node]
        others = [(name, of_node) for name, of_node in self._units_of.items() if name != node]
        others += [(node, [other for other in units if other is not unit]) for unit in best.units]
        return self._cheapest_of(others)

    def _able(self, feasibility: Feasibility) -> set[str]:
        """The nodes with devices for the pod. One that has them free and lacks CPU is the scheduler's."""
        nodes = self.queue.nodes_for(self.pod)
        return set[str]().union(*(feasibility.nodes_that_may_fit(needed, nodes) for needed in self._alternatives))

    def _cheapest_of(self, nodes: Iterable[tuple[str, Sequence[VictimUnit]]]) -> Preemption | None:
        """The cheapest set of the units of one of these nodes; of equal ones that of the first node by name."""
        every, best = len(self.queue.feasibility.fleet.gpus), None
        counts = [[request.count or every for request in needed.requests] for needed in self._alternatives]
        # The nodes on which even all units cost little come first: on most of the others one alone costs more, then.
        for node, units in sorted(nodes, key=lambda pair: cost_of(pair[1])):
            if any(beats(unit.cost, node, best) for unit in units):
                is_short = self._lacking(node, ()) is not None
                is_enough = partial(self._is_enough, node, checks_resources=is_short)
                devices = 0 if is_short else max(map(sum, counts))
                best = cheapest_set(node, units, devices, is_enough, self._tries, best)
        return None if best is None else best._replace(is_cheapest=self._tries.remaining > 0)

    def _is_enough(self, node: str, gone: Collection[VictimUnit], *, checks_resources: bool) -> bool:
        gone = (*gone, *self._going.get(node, ()))
        claims = frozenset[str]().union(*(unit.claims for unit in gone))
        gpus = frozenset[str]().union(*(unit.gpus for unit in gone))
        holders, feasibility = self.queue.holders, self.queue.feasibility
        remaining = [
            without_claims(entry, holders, claims) if entry.gpu.uuid in gpus else entry
            for entry in feasibility.fleet.nodes[node]
        ]
        return any(feasibility.fits_on(remaining, needed) for needed in self._alternatives) and (
            not checks_resources or self._lacking(node, gone) is None
        )

    def _lacking(self, node: str, gone: Collection[VictimUnit]) -> str | None:
        """The resource, such as cpu, of which the node is short for the pod without ``gone``, or None."""
        ended = {pod for unit in gone for pod in unit.pods}
        return self.running.lacking(node, self.pod, self._resources, ended)

    def _units(self, node: str) -> Iterator[VictimUnit]:
        """The units of pods that can be evicted on ``node``; a unit may have pods and claims on other nodes, too."""
        remaining = self.queue.claims_on(node)
        while remaining:
            claims, pods = self.running.together(min(remaining))
            remaining -= claims
            names = tuple(sorted(str(pod.metadata.key) for pod in pods))
            if (reason := self.protected.get(names) or self.rules.why_spared(claims, pods)) is not None:
                self.spared.append(SparedPods(node, names, reason))
                continue
            if (node, names) not in self.running.units:
                self.running.units[node, names] = self._unit(node, names, claims, pods)
            yield self.running.units[node, names]

    def _ending(self, node: str, seconds: float) -> Iterator[VictimUnit]:
        """The claims of ``node`` that are deallocated once their pods have ended, within so many seconds at most."""
        for name in self.queue.claims_on(node):
            claim, pods = self.running.claims.get(name), list(self.running.consumers(name))
            ends = [abs(self._clock.seconds_since(pod.metadata.deletion_timestamp)) for pod in pods]
            users = claim.status.reserved_for if claim is not None and claim.status.allocation is not None else None
            by_pods = users and all(user.resource == "pods" for user in users)
            if users is None or (by_pods and max(ends, default=0) < seconds):
                gpus = frozenset(gpu.gpu.uuid for gpu, _ in self._parts.get(name, ()) if gpu.node == node)
                yield VictimUnit(tuple(str(pod.metadata.key) for pod in pods), frozenset({name}), gpus, EvictionCost())

    def _unit(self, node: str, names: tuple[str, ...], claims: frozenset[str], pods: Sequence[Pod]) -> VictimUnit:
        parts = [(claim, gpu, slices) for claim in claims for gpu, slices in self._parts.get(claim, ())]
        hours = dict.fromkeys(claims, 0.0)
        for pod in pods:
            saved = self._hours_since_saved(pod)
            hours |= {claim: max(saved, hours.get(claim, 0.0)) for claim in map(str, pod.claims)}
        idle = [seconds for pod in pods if (seconds := self.rules.idle_seconds(pod)) is not None]
        cost = EvictionCost(
            priority=max(pod.spec.priority for pod in pods),
            busy=len(pods) - len(idle),
            pods=len(pods),
            recency=sum(max(0, MONTH_SECONDS - seconds) for seconds in idle),
            gpu_hours=round(sum(slices / gpu.state.geometry.slices * hours[claim] for claim, gpu, slices in parts), 3),
            slices=sum(slices for _, _, slices in parts),
        )
        return VictimUnit(names, claims, frozenset(gpu.gpu.uuid for _, gpu, _ in parts if gpu.node == node), cost)

    def _hours_since_saved(self, pod: Pod) -> float:
        """Hours since the pod started or, if that was later, since it says that its work was saved."""
        ages = [self._clock.seconds_since(pod.status.start_time or pod.metadata.creation_timestamp)]
        with suppress(ValueError, TypeError):
            ages.append(self._clock.seconds_since(pod.metadata.annotations.checkpointed_at or None))
        return max(0.0, seconds) / 3600 if isfinite(seconds := min(ages)) else 0.0
