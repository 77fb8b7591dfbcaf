"""Evictions for waiting pods of higher priority, as GpuPolicies allow them; the mode DryRun only reports them.

Without a policy that enables preemption, reclaim or repacking, one list of the policies is all that is read. Otherwise
a turn reads all pods, claims and plans, so pauses grow with the time that a turn takes.

The GPUs of the victims are reserved for the waiting pod before the first eviction, in the fence's ConfigMap: for its
claims, and for the pod itself if the scheduler makes its claim only when it has chosen devices (extended resources). As
long as there is a reservation no other pod is evicted for that pod, and no other pod gets devices of these GPUs: a new
leader finds it there, too. It ends once those do not wait any more, or ``RESERVATION_SECONDS`` after the longest grace
period of the victims.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from random import sample

from controller.cluster.claim_index import PoolDevice
from controller.cluster.fleet import Fleet
from controller.curation.reservation import reserved_gpus
from controller.demand.pending_claims import Queue
from controller.eviction.evictor import Evictor, Outcome, Trigger, pod_reference
from controller.eviction.gpu_policy import GpuPolicies, GpuPolicy, parse_policy, policy_reference, read_policies
from controller.eviction.preemption import HAS_ENDED, PreemptionSearch
from controller.eviction.preemption_preview import ChosenVictims, Preview, preview_of, read_running
from controller.eviction.recent_evictions import EvictionCause
from controller.eviction.reclaim import RECLAIMED, IdlePods
from controller.eviction.repack import RepackSearch, goes_on, gpus_of, next_pods, place_of
from controller.explain.sources.moves import whole_gpus
from controller.fence.fence import Fence
from controller.fence.fence_probe import try_again
from driver.errors import CONFLICT, NOT_FOUND, ApiError, UsageError, accepted_status
from driver.kube.client import KubeClient
from driver.kube.events import Recorder, Type
from driver.kube.get_and_list import find_pod, read_claim
from driver.kube.types import Pod
from driver.kube.work_loop import Loop

log = logging.getLogger(__name__)

INTERVAL_SECONDS, REST_FACTOR = 10.0, 5.0
"""Between two turns, or this multiple of what a turn took if that is longer."""

RESERVED_INTERVAL_SECONDS = 0.25
"""Between two turns while there is a reservation."""

WAKE_INTERVAL_SECONDS, MAX_WAKE_SECONDS, WAKE_SECONDS_PER_POD = 0.25, 4.0, 0.00125
"""Between two times that a pod is tried again, twice as long each time; or that all parked ones are, which costs the
scheduler an attempt for every pod that waits."""

MAX_WOKEN = 8
"""Pods of one claim that are woken at once, by several requests each: tenants choose how many pods share a claim."""

MAX_RESERVATIONS = 20
"""Waiting pods for which GPUs are reserved at once."""

RESERVATION_SECONDS = 300.0
"""Longest time that victims may take to end after their grace periods, and the scheduler to bind the waiting pod."""

MAX_RESERVED_CLAIMS = 8
"""Tenants choose how many claims a pod has: beyond, the pod is named in their place, so that the fence stays small."""

FIRST_PODS, PODS_PER_TURN = 3, 5
"""Waiting pods whose victims are looked for in a turn: those of the highest priority first, and others by chance."""

WOULD_EVICT, EVICTING = {False: "WouldEvict", True: "WouldMove"}, {False: "Preempting", True: "Repacking"}
EVICTED_FOR = {Trigger.PREEMPTION: "PreemptedFor", Trigger.RECLAIM: RECLAIMED, Trigger.REPACK: "MovedFor"}
BLOCKED, INVALID = "PreemptionBlocked", "InvalidPolicy"
"""Reasons of Events: by whether pods are moved, or by the trigger."""


class Preemptions:
    """``queue`` returns the pending claims of the last decision, for another thread; None: none has been made yet.

    ``failure`` says why the caches that this came from are out of date; None: they are not.
    """

    def __init__(
        self,
        client: KubeClient,
        queue: Callable[[], Queue | None],
        failure: Callable[[], str | None],
        evictor: Evictor,
        recorder: Recorder,
        reservations: Fence,
    ) -> None:
        self._client, self._queue, self._failure = client, queue, failure
        self._evictor, self._recorder, self._reservations = evictor, recorder, reservations
        self._idle_pods = IdlePods(evictor, recorder, client.clock)
        self._counted: dict[tuple[str, bool], frozenset[str]] = {}
        """By UID of a waiting pod and whether they would be moved, the victims that were counted last."""
        self._evicted: dict[frozenset[str], ChosenVictims] = {}
        """By the UIDs for which GPUs are reserved, the pods that were evicted."""
        self._places: dict[frozenset[str], ChosenVictims] = {}
        """By a hash of the owner for whose next pod GPUs are reserved, the pod that was moved."""
        self._inherited = set[frozenset[str]]()
        """The UIDs for which earlier leaders have reserved GPUs, as they were at the last look."""
        self._look_at = self._wake_at = self._wake_seconds = 0.0
        self._woken = set[str]()
        self.loop = Loop("evicting pods for others", self.turn, 0.0)

    def turn(self) -> float:
        """Look once. Returns after how many seconds to look again. Raises ApiError."""
        began, decided = time.monotonic(), self._queue()
        if decided is None or self._failure() is not None:
            return INTERVAL_SECONDS
        queue = decided.on(decided.feasibility.fleet)
        self._end_reservations(queue)
        reserved = self._reservations.reservations()
        if reserved and began >= self._wake_at:
            self._wake(frozenset[str]().union(*reserved.values()), queue)
        rest = max(RESERVED_INTERVAL_SECONDS, REST_FACTOR * (time.monotonic() - began))
        if not reserved or began >= self._look_at:
            policies, waiting = self._read_policies(), set(reserved.values()) - self._places.keys()
            if policies and (
                self._move_next(policies, queue)
                or self._go_on(policies, queue, reserved)
                or (len(waiting) < MAX_RESERVATIONS and self._look(policies, _without(queue, reserved), reserved))
            ):
                return RESERVED_INTERVAL_SECONDS
            self._look_at = time.monotonic() + max(INTERVAL_SECONDS, REST_FACTOR * (time.monotonic() - began))
        return rest if reserved else max(0.0, self._look_at - time.monotonic())

    def _end_reservations(self, queue: Queue) -> None:
        """Enter next pods of owners; lift reservations of which nothing waits, and those that have lasted too long."""
        for owner, last in self._places.items():
            if pods := next_pods(last, queue.pods):
                self._reservations.hand_over(owner, pods[0].metadata.uid)
                self._evicted[frozenset({pods[0].metadata.uid})] = last._replace(pod=pods[0], victims=[], moves=())
        waiting = frozenset[str]().union(*(item.uids for item in queue.pending), *self._places)
        reservations = self._reservations.reservations()
        ended = [uids for uids in set(reservations.values()) if not uids & waiting and not self._is_tried_again(uids)]
        self._reservations.lift([entry for entry, uids in reservations.items() if uids in ended])
        for uids in self._reservations.lift_overdue_reservations() & self._evicted.keys():
            self._tell_hanging(self._evicted[uids])
        remaining = set(self._reservations.reservations().values())
        self._evicted = {uids: chosen for uids, chosen in self._evicted.items() if uids in remaining}
        self._places = {owner: last for owner, last in self._places.items() if owner in remaining}

    def _wake(self, uids: frozenset[str], queue: Queue) -> None:
        """If devices are free for these pods, or pods with these claims: the scheduler may have tried them while it
        wanted to give these to another pod, which the fence then refused. Of many pods that share a claim some are
        tried, by chance: once one of them has the devices, the scheduler tries the others by itself."""
        items = [item for item in queue.pending if uids & item.uids]
        pods = {pod.metadata.uid: pod for item in items for pod in sample(item.pods, min(MAX_WOKEN, len(item.pods)))}
        needs = ((pod, needed) for pod in pods.values() for needed in queue.combinations(pod))
        able = {pod.metadata.uid for pod, needed in needs if queue.feasibility.may_fit(needed, queue.nodes_for(pod))}
        waiting = [pods[uid] for uid in able if self._still_waits(pods[uid])]
        is_first = not able <= self._woken
        self._woken = able
        if waiting:
            seconds = WAKE_INTERVAL_SECONDS if is_first else min(2 * self._wake_seconds, MAX_WAKE_SECONDS)
            self._wake_seconds = seconds
            if False in [try_again(self._client, pod) for pod in waiting]:
                self._reservations.wake_parked_pods()
                # The scheduler tries them in the order of their last attempts; each time some at the front are refused.
                seconds = max(WAKE_INTERVAL_SECONDS, WAKE_SECONDS_PER_POD * len(queue.pods))
            self._wake_at = time.monotonic() + seconds

    def _is_tried_again(self, uids: frozenset[str]) -> bool:
        """Whether the pod with these claims waits though its status named none of them during the last decision."""
        return uids in self._evicted and self._still_waits(self._evicted[uids].pod)

    def _read_policies(self) -> list[GpuPolicy]:
        """The policies of the cluster; none if one of them is not valid: it might forbid what another allows."""
        policies, is_valid = [], True
        with accepted_status(NOT_FOUND):  # the CustomResourceDefinition is not installed
            for manifest in read_policies(self._client):
                try:
                    policies.append(parse_policy(manifest, "no policy counts: this one"))
                except UsageError as error:
                    is_valid = False
                    about = policy_reference(manifest["metadata"]["name"], manifest["metadata"]["uid"])
                    self._recorder.event(about, INVALID, str(error), "Warning", lasting=True)
        return policies if is_valid else []

    def _look(self, policies: Sequence[GpuPolicy], queue: Queue, reserved: Mapping[PoolDevice, frozenset[str]]) -> bool:
        """Look for pods to move and for victims, for the pods that wait and have no GPUs reserved; evict for one.

        Returns whether there were evictions.
        """
        served = frozenset[str]().union(*reserved.values())
        enabled = [policy.spec.preemption for policy in policies if policy.spec.preemption.enabled]
        namespaces = {name for rules in enabled for name in rules.by_namespaces}
        reclaims = any(policy.spec.reclaim is not None for policy in policies)
        served |= {pod.metadata.uid for item in queue.pending if served & item.uids for pod in item.pods}
        lacking = [pod for pod in queue.pods if pod.lacks_devices and pod.metadata.uid not in served]
        waiting = [pod for pod in lacking if reclaims or pod.metadata.namespace in namespaces]
        moves = any(policy.spec.repack.movable for policy in policies)
        moves = moves and not any(chosen.moves for chosen in self._evicted.values())
        for_whole = [pod for pod in lacking if moves and whole_gpus(queue, pod)]
        present = {pod.metadata.uid for pod in lacking}
        self._counted = {key: names for key, names in self._counted.items() if key[0] in present}
        if not waiting and not reclaims and not for_whole:
            return False
        self._evictor.recent.refresh()
        running, by_policy = read_running(self._client), GpuPolicies(policies)
        for kind, pods in ((RepackSearch, for_whole), (PreemptionSearch, waiting)):
            pods.sort(key=self._evictor.has_lost_pods)  # the others first: no pod is evicted for these
            pods[FIRST_PODS:] = sample(pods[FIRST_PODS:], len(pods[FIRST_PODS:]))
            for pod, rules in product(pods[:PODS_PER_TURN], [by_policy, *by_policy.acting]):
                search = kind(queue, pod, running, rules, self._client.clock)
                preview = preview_of(search, self._evictor)
                if self._serve(preview):
                    return True
                if kind is PreemptionSearch and pod.metadata.namespace in namespaces and rules is by_policy:
                    self._tell_blocked(preview)
        self._idle_pods.turn(by_policy, running)
        return False

    def _move_next(self, policies: Sequence[GpuPolicy], queue: Queue) -> bool:
        """Lift places of owners whose next pods run; go on with moves. Returns whether there was an eviction."""
        moves = [(uids, last) for uids, last in self._evicted.items() if last.moves]
        if not moves and not self._places:
            return False
        running, clock = read_running(self._client), self._client.clock
        for owner, last in self._places.items():
            if next_pods(last, running.pods.values()):
                self._lift(owner)
        for uids, last in moves:
            self._evictor.recent.refresh()
            seen = _without(queue, self._reservations.reservations(), uids)
            search = RepackSearch(seen, last.pod, running, GpuPolicies(policies), clock)
            preview = preview_of(search, self._evictor)
            return goes_on(last, preview.preemption, running) and self._serve(preview)
        return False

    def _go_on(
        self, policies: Sequence[GpuPolicy], queue: Queue, reserved: Mapping[PoolDevice, frozenset[str]]
    ) -> bool:
        """Evict those that hold GPUs which an earlier leader has reserved, if it was killed before it had evicted all
        of them; if it had evicted none yet, or has moved pods, lift the reservation. Not at the first look: such a
        leader may still be at it. Returns whether something was done.
        """
        before, self._inherited = self._inherited, set(reserved.values()) - self._evicted.keys() - self._places.keys()
        pods = {uids: pod for pod in queue.pods if (uids := _reserved_uids(queue, pod)) in before & self._inherited}
        if not pods:
            return False
        self._evictor.recent.refresh()
        running, by_policy = read_running(self._client), GpuPolicies(policies)
        gpus, fleet = reserved_gpus(queue, reserved), queue.feasibility.fleet.gpus
        for uids, pod in pods.items():
            seen = queue.on(Fleet.of(fleet[gpu] for gpu, of in gpus.items() if of == uids))
            search = PreemptionSearch(seen, pod, running, by_policy, self._client.clock)
            search.count_ending()
            preview = preview_of(search, self._evictor)
            past = (past for past in self._evictor.recent.record.evictions if past.contender == str(pod.metadata.key))
            if preview.obstacle is None and {eviction.trigger for eviction in past} <= {Trigger.REPACK}:
                self._lift(uids)
                return True
            if self._serve(preview, is_begun=True):
                return True
        return False

    def _serve(self, preview: Preview, *, is_begun: bool = False) -> bool:
        """Evict those that were found, or say that they would be; ``is_begun``: an earlier leader has reserved their
        GPUs. Returns whether there is a reservation."""
        if preview.preemption is None or preview.unexamined:
            return False
        chosen = ChosenVictims.of(preview.search, preview.preemption)
        if chosen.is_active:
            return self._evict(chosen, preview.search.queue, is_begun=is_begun)
        self._tell(chosen)
        return False

    def _tell_blocked(self, preview: Preview) -> None:
        """Say on a pod for which room could be made that no pod is evicted for it."""
        if preview.obstacle is None and (preview.preemption is None or preview.unexamined):
            why = "no set of pods that may be evicted makes room for it (tessera preempt)"
            if preview.unexamined:
                why = f"what {', '.join(preview.unexamined)} of it mean for a node is not examined"
            about = pod_reference(preview.search.pod)
            self._recorder.event(about, BLOCKED, f"no pod is evicted for it: {why}", "Warning", lasting=True)

    def _tell(self, chosen: ChosenVictims) -> None:
        """Say on the policies of the victims that these would be evicted, and count them once."""
        key, names = (chosen.pod.metadata.uid, bool(chosen.moves)), frozenset(chosen.names)
        limit = self._evictor.recent.limit(chosen.victims, chosen.moves)
        self._tell_policies(chosen, WOULD_EVICT[bool(chosen.moves)], limit or "")
        if limit is None and self._counted.get(key) != names:
            self._counted[key] = names
            for victim, _ in chosen.victims:
                self._evictor.count(chosen.trigger(victim), Outcome.DRY_RUN)

    def _tell_hanging(self, chosen: ChosenVictims) -> None:
        """Say which victims have not ended, if there are any. The next search leaves them out. Raises ApiError."""
        pods = (find_pod(self._client, victim.metadata.key) for victim, _ in chosen.victims)
        present = {pod.metadata.uid for pod in pods if pod is not None and pod.status.phase not in HAS_ENDED}
        chosen = chosen._replace(victims=[pair for pair in chosen.victims if pair[0].metadata.uid in present])
        if not chosen.victims:
            return
        obstacle = f"have not ended {RESERVATION_SECONDS:.0f} s after the longest grace period"
        series = f"{chosen.pod.metadata.uid} hanging"  # what the next search finds does not replace it
        self._tell_policies(chosen, BLOCKED, obstacle, series)
        message = f"pods that were evicted for it have not ended, so that others are looked for: {chosen.named()}"
        self._recorder.event(pod_reference(chosen.pod), BLOCKED, message, "Warning", series)

    def _evict(self, chosen: ChosenVictims, queue: Queue, *, is_begun: bool) -> bool:
        """Reserve the GPUs of the victims and evict them, all or none; of pods that are moved only the first.

        Returns whether there is a reservation.
        """
        uids = _reserved_uids(queue, chosen.pod)
        is_reserved = is_begun or uids in self._evicted
        if (obstacle := self._obstacle(chosen, is_reserved=is_reserved)) is not None:
            self._tell_policies(chosen, BLOCKED, obstacle)
            self._lift(uids)
            return False
        grace = max(victim.spec.termination_grace_period_seconds for victim, _ in chosen.victims)
        seconds, place = grace + RESERVATION_SECONDS, place_of(chosen, queue)
        needed = place | ({} if is_reserved else {uids: gpus_of(chosen, queue)})
        if not all(self._reservations.reserve(gpus, of, seconds) for of, gpus in needed.items()):
            self._tell_policies(chosen, BLOCKED, "the fence, which reserves their devices, is not in force or full")
            return False
        self._tell_policies(chosen, EVICTING[bool(chosen.moves)])
        preemption, evicted = chosen.preemption, chosen.victims[: 1 if chosen.moves else None]
        message = f"its devices are taken back on node {preemption.node}; pods that are evicted: {chosen.named()}"
        self._recorder.event(pod_reference(chosen.pod), EVICTING[bool(chosen.moves)], message)
        unit_of = {pod: unit for unit in preemption.units for pod in unit.pods}
        try:
            for victim, policy in evicted:
                cause = EvictionCause(policy=policy.metadata.name, contender=str(chosen.pod.metadata.key))
                unit = unit_of[str(victim.metadata.key)]
                cause["gpu_hours"] = round(unit.cost.gpu_hours / len(unit.pods), 3)
                cause["unit"] = unit.pods[0] if unit.pods[1:] else ""
                trigger, text = chosen.trigger(victim), chosen.for_victim(victim)
                if not self._still_waits(chosen.pod):
                    break
                if chosen.use_alone(self._client, victim) and self._evictor.evict(victim, trigger, **cause):
                    self._places |= dict.fromkeys(place, chosen)
                    self._recorder.event(pod_reference(victim), EVICTED_FOR[trigger], text, "Warning")
                elif victim is evicted[0][0] and not is_reserved:  # the next look finds who still has to go
                    self._lift(uids)
                    return True
        except ApiError as error:
            log.warning("evictions end early", extra={"pod": str(chosen.pod.metadata.key), "error": str(error)})
            self._tell_policies(chosen, BLOCKED, f"an eviction failed: {error}")
            if error.status != CONFLICT:  # otherwise another leader goes on with them
                self._lift(uids)
            return False
        self._evicted[uids] = chosen._replace(victims=evicted)
        return True

    def _lift(self, uids: frozenset[str]) -> None:
        reservations = self._reservations.reservations()
        self._reservations.lift([entry for entry, of in reservations.items() if of == uids])

    def _obstacle(self, chosen: ChosenVictims, *, is_reserved: bool) -> str | None:
        """Why these are not evicted now; None: the API server agrees to each eviction. Raises ApiError."""
        if (limit := chosen.limit(self._evictor)) is not None:
            return limit
        try:
            for victim, _ in chosen.victims:
                if not self._evictor.evict(victim, chosen.trigger(victim), is_rehearsal=True) and not is_reserved:
                    return f"pod {victim.metadata.key} has ended meanwhile"
        except ApiError as error:
            return f"the API server refuses an eviction: {error}"
        return None if self._still_waits(chosen.pod) else "the pod does not wait any more"

    def _still_waits(self, pod: Pod) -> bool:
        """Whether the API server has no devices for ``pod`` yet. Raises ApiError."""
        present = find_pod(self._client, pod.metadata.key)
        if present is None or present.metadata.uid != pod.metadata.uid or present.spec.node_name:
            return False
        with accepted_status(NOT_FOUND):
            claims = [read_claim(self._client, *key) for key in present.claims]
            is_allocated = bool(claims) and all(claim.status.allocation is not None for claim in claims)
            return present.metadata.deletion_timestamp is None and not is_allocated
        return False

    def _tell_policies(self, chosen: ChosenVictims, reason: str, obstacle: str = "", series: str = "") -> None:
        text = chosen.described() + (f", but {obstacle}" if obstacle else "")
        series = series or chosen.pod.metadata.uid + (" moves" if chosen.moves else "")
        level: Type = "Warning" if obstacle else "Normal"
        for policy in {policy.metadata.name: policy for _, policy in chosen.victims}.values():
            self._recorder.event(policy.reference, reason, text, level, series, lasting=True)


def _reserved_uids(queue: Queue, pod: Pod) -> frozenset[str]:
    """Those for which the GPUs of victims are reserved for ``pod``."""
    uids = frozenset(pending.uid for pending in queue.of_pod(pod))
    return uids if len(uids) <= MAX_RESERVED_CLAIMS else frozenset({pod.metadata.uid})


def _without(
    queue: Queue, reservations: Mapping[PoolDevice, frozenset[str]], uids: frozenset[str] = frozenset()
) -> Queue:
    """``queue`` without the GPUs that are reserved for others than ``uids``, who get nothing of them."""
    others = {gpu for gpu, of in reserved_gpus(queue, reservations).items() if of != uids}
    return queue.on(Fleet.of(gpu for gpu in queue.feasibility.fleet if gpu.gpu.uuid not in others)) if others else queue
