"""Idle devices that no pod waits for: warnings on their pods, and evictions by policies that reclaim ``Always``.

Idle pods that are evicted for a waiting pod are victims like others (``preemptions``).
"""

from __future__ import annotations

from collections.abc import Sequence

from controller.eviction.evictor import Evictor, Outcome, Trigger, own_protection, pod_reference
from controller.eviction.gpu_policy import GpuPolicies, GpuPolicy, seconds_of
from controller.eviction.preemption import RunningPods, VictimRules
from controller.eviction.preemption_preview import protection_of
from controller.eviction.recent_evictions import EvictionCause
from driver.clock import Clock, written_time
from driver.errors import ApiError
from driver.kube.events import Recorder
from driver.kube.types import Pod

SOON_RATIO = 2 / 3
"""The part of ``idleAfter`` after which a pod is warned."""

RECLAIMED = "Reclaimed"
"""Reason of Events on evicted pods."""


class IdlePods:
    """For one thread. ``turn`` looks once at all pods that run."""

    def __init__(self, evictor: Evictor, recorder: Recorder, clock: Clock) -> None:
        self._evictor, self._recorder, self._clock = evictor, recorder, clock
        self._spared = set[str]()
        """The UIDs of the pods that only the mode DryRun has spared in the last turn."""

    def turn(self, policies: GpuPolicies, running: RunningPods) -> None:
        """Raises ApiError."""
        rules, done, spared = VictimRules(running, policies, self._clock, None), set[str](), set[str]()
        idle = {key: since for key, pod in running.pods.items() if (since := running.idle_since(pod)) is not None}
        for key in sorted(idle, key=lambda key: (idle[key], key)):
            pod, policy = running.pods[key], rules.policy(running.pods[key])
            if policy is None or pod.metadata.uid in done:
                continue
            if not rules.reclaims(pod):
                self._warn(pod, policy, idle[key], rules)
                continue
            claims, pods = running.together(str(pod.claims[0]))
            done |= {member.metadata.uid for member in pods}
            if rules.why_spared(claims, pods) is None:
                decided = ((member, rules.policy(member)) for member in pods)
                spared |= self._evict([(member, decides) for member, decides in decided if decides is not None])
        self._spared = spared

    def _warn(self, pod: Pod, policy: GpuPolicy, since: int, rules: VictimRules) -> None:
        """Say on ``pod`` that it is idle, before it may be evicted for that."""
        reclaim, text = policy.spec.reclaim, f"its devices are idle since {written_time(since)}"
        part = SOON_RATIO if policy.spec.evicts_idle else 1.0
        is_due = own_protection(pod) is None and rules.idle_seconds(pod, part) is not None
        if reclaim is None or policy.spec.mode == "DryRun" or not is_due:
            return
        if policy.spec.evicts_idle:
            due, most = (written_time(since + seconds_of(time)) for time in (reclaim.idle_after, reclaim.keep_at_most))
            whom = " for a pod that waits for them" if reclaim.when == "Contended" else ""
            text += f"; from {due} on it may be evicted{whom}, unless you annotate it with "
            text += f"gpu.tessera.dev/keep-until and a later time, {most} at most"
        reason = "IdleSoon" if policy.spec.evicts_idle else "Idle"
        self._recorder.event(pod_reference(pod), reason, text, "Warning", lasting=True)

    def _evict(self, victims: Sequence[tuple[Pod, GpuPolicy]]) -> set[str]:
        """Evict all or none. Returns the UIDs of those that only the mode DryRun spares."""
        is_active = all(policy.spec.evicts_idle for _, policy in victims)
        obstacle = self._evictor.recent.limit(victims) if is_active else None
        # What protects them is read from the API server, so only if they would go otherwise.
        if obstacle is None and protection_of(self._evictor, [[pod for pod, _ in victims]]) is not None:
            return set()
        if not is_active:
            for pod, policy in victims:
                text = f"in the mode Active pod {pod.metadata.key} would be evicted: its devices are idle"
                self._recorder.event(policy.reference, "WouldEvict", text, series=pod.metadata.uid, lasting=True)
                if pod.metadata.uid not in self._spared:
                    self._evictor.count(Trigger.RECLAIM, Outcome.DRY_RUN)
            return {pod.metadata.uid for pod, _ in victims}
        unit = str(victims[0][0].metadata.key) if victims[1:] else ""
        try:
            for is_rehearsal in (True, False):
                for pod, policy in victims if obstacle is None else ():
                    name = policy.metadata.name
                    cause = EvictionCause(policy=name, unit=unit)
                    is_there = self._evictor.evict(pod, Trigger.RECLAIM, is_rehearsal=is_rehearsal, **cause)
                    if is_there and not is_rehearsal:
                        text = f"evicted by GpuPolicy {name}: its devices are idle"
                        self._recorder.event(pod_reference(pod), RECLAIMED, text, "Warning")
        except ApiError as error:
            obstacle = f"an eviction failed: {error}"
        for _, policy in victims if obstacle is not None else ():
            text = f"idle pods are not evicted: {obstacle}"
            self._recorder.event(policy.reference, "ReclaimBlocked", text, "Warning", lasting=True)
        return set()
