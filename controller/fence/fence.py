"""The fence: how an offer that still fits is withdrawn without allocating its memory twice.

The scheduler decides from its own cache and writes the allocation milliseconds or minutes later. A device may be
withdrawn only if no claim holds it and no decision for it can still be written. Hence the steps of
``controller.step_names.Step``, after which the node may withdraw it:

- ``fence``: the device goes into the ConfigMap that is the parameter of the admission policy
  (the chart's ``fence.yaml``). A new allocation of it is refused from the moment an API server has seen that.
- ``settle``: wait until every API server has seen it (each watches the parameter by itself, and none reports it).
- ``probe``: verify, by server-side dry runs of such an allocation, that the connected API server has seen it. With
  a single API server this is sufficient, and ``settle_s`` may be 0.
- ``canary`` and ``catch-up``: write a claim of our own and wait until the cache of claims has processed that
  version. Proof: let an allocation of the device be written at version A. It passed admission before the fence
  was in force, so before the canary was sent, and got its version right afterwards: A < canary. The watch
  delivers the changes of one resource in the order of their versions, so with the canary the cache has processed A.
- ``check``: devices that a claim holds now are lifted from the fence and stay; the others may be withdrawn.

The gap in the proof is "right afterwards": an API server that stalls between its admission and its write to
etcd, for longer than settle, probe and canary together take, is not covered. So an allocation of a fenced
device that is seen later all the same (``fenced``) has to be treated as held; and the node plugin refuses to
prepare what overlaps. A quorum list instead of the canary costs a read of all claims and does not close that
gap either; the version it returns is the store's, not the claims', so a cache could not wait for it. The
cost of one withdrawal, for any number of devices: three writes (ConfigMap, canary, and again the ConfigMap for held
devices), one or few dry runs, and one event for every watcher of claims; it wakes no pending pod.

The ConfigMap is the state that the next leader takes over (``start``). Withdrawn devices stay fenced for ``keep_s``, by
the clock of the leader, because a decision may be that late; offering them again lifts them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from controller.cluster.cache import ClusterCache
from controller.cluster.claim_index import RESERVED, PoolDevice, gpu_of
from controller.fence.fence_probe import Canary
from controller.fence.fenced_devices import FencedDevices
from controller.step_names import Observer, Step
from driver.clock import Clock
from driver.errors import ApiError
from driver.kube.client import KubeClient
from driver.model.plan import FENCE
from driver.step_observer import observed, unobserved

log = logging.getLogger(__name__)

MIN_FENCED_SECONDS = 15.0
"""Time for which an entry is never replaced by new ones: most decisions are written within milliseconds."""

ROOM_POLL_INTERVAL_SECONDS = 1.0
"""Time between two checks for free entries."""

PROBE_INTERVAL_SECONDS = 0.005
"""Time between two dry runs; on a busy machine the fence was in force within 8 ms."""

DECISION_CATCH_UP_SECONDS = 2.0
"""Longest time that a decision waits for the cache of claims."""

MAX_RESERVED_SECONDS = 7200.0
"""No reservation lasts longer: one that seems to was made before the API server's clock was set back."""


@dataclass(frozen=True)
class FenceSettings:
    """Seconds, and the namespace of ConfigMap and canary.

    ``settle_s``: until every API server has seen the fence, 0 where there is one; ``probe_s`` and ``catch_up_s``:
    how long to wait for the policy and for the cache; ``keep_s``: how late a decision may be written.
    """

    settle_s: float = 1.0
    probe_s: float = 2.0
    catch_up_s: float = 10.0
    keep_s: float = 900.0
    namespace: str = "tessera"


@dataclass(frozen=True)
class Withdrawable:
    """The result of ``Fence.take_back``.

    ``devices`` may be withdrawn and stay fenced. ``held`` are allocated and ``undecided`` cannot be judged now: both
    stay offered, without a fence. ``in_force``: the policy refused a dry run; if not, a decision may still be written.
    """

    devices: frozenset[PoolDevice] = frozenset()
    held: frozenset[PoolDevice] = frozenset()
    undecided: frozenset[PoolDevice] = frozenset()
    in_force: bool = True


class Fence:
    """The fence around devices that are to be withdrawn. Only for the leader, one per term. Thread-safe.

    ``fenced``: the devices; to ask for one makes no request. One that is allocated anyway must be published again.
    """

    def __init__(
        self,
        client: KubeClient,
        claims: ClusterCache,
        settings: FenceSettings | None = None,
        clock: Clock | None = None,
        observer: Observer = unobserved,
    ) -> None:
        self._claims = claims
        self._settings = settings or FenceSettings()
        self._clock = clock or client.clock
        self._observer = observer
        self.fenced = FencedDevices(client, self._settings.namespace, self._clock)
        self._canary = Canary(client, self._settings.namespace)
        self._ended = threading.Event()
        self._to_lift: set[PoolDevice] = set()

    def start(self, offered: Collection[PoolDevice]) -> None:
        """Take over the fence of the previous leader: lift ``offered``, keep the rest for ``keep_s`` from now.

        ``offered`` are the devices that the plans offer; a leader that ended during a withdrawal left them fenced.
        Raises ApiError; then it must be called again before any other method.
        """
        self.fenced.load()
        self._canary.deallocate()
        self.lift(offered)

    def end(self) -> None:
        """Stop: another controller leads by now, and steps in progress must change nothing any more."""
        self._ended.set()

    def take_back(self, devices: Collection[PoolDevice]) -> Withdrawable:
        """Determine which of these offers the nodes may withdraw; takes about ``settle_s``.

        Waits until there is room for at least one entry; devices without room are undecided. Raises ApiError if the
        API server fails: then nothing may be withdrawn, and the fence is lifted, if not now then by ``expire``.
        """
        if not devices:
            return Withdrawable()
        chosen = frozenset(sorted(devices)[: self._room()])
        if self._ended.is_set():
            return Withdrawable(undecided=frozenset(devices))
        try:
            result = self._steps(chosen)
            self.lift(chosen - result.devices)
        except ApiError:
            self._lift_later(chosen)
            raise
        return replace(result, undecided=result.undecided | (frozenset(devices) - chosen))

    def reserve(self, gpus: Iterable[PoolDevice], uids: Collection[str], seconds: float) -> bool:
        """Let only claims with these UIDs, or of pods with these UIDs, be allocated anything of whole GPUs (``gpu-N``
        of a pool) for so long. Takes ``settle_s``.

        False: the fence is not in force or full, or another leader has reserved some of these GPUs, or others for one
        of ``uids``; then nothing is reserved.
        Raises ApiError: as for ``take_back``.
        """
        deadline = int(self._clock.now().timestamp() + seconds)
        entries = frozenset(_reservation(gpu, uids, deadline) for gpu in gpus)
        if self._ended.is_set() or self.fenced.room(MIN_FENCED_SECONDS) < len(entries):
            return False
        try:
            # Of two leaders at once, the second one to write sees both.
            is_closed, gpus = self._close(entries, min(uids)), set(map(gpu_of, entries))
            others = [(gpu_of(entry), of) for entry, of in self.reservations().items() if entry not in entries]
            if is_closed and not any(gpu in gpus or not of.isdisjoint(uids) for gpu, of in others):
                return True
            self.lift(entries)
        except ApiError:
            self._lift_later(entries)
            raise
        return False

    def hand_over(self, uids: frozenset[str], pod: str) -> None:
        """Let claims of the pod with this UID be allocated what is reserved for ``uids``, until the same time, in one
        write. Raises ApiError."""
        entries = [entry for entry, of in self.reservations().items() if of == uids and not self._ended.is_set()]
        self.fenced.remove(entries, {_reservation(gpu_of(entry), [pod], _deadline_of(entry)) for entry in entries})

    def reservations(self) -> dict[PoolDevice, frozenset[str]]:
        """The UIDs of the claims and pods for which GPUs are reserved, by entry of the fence."""
        return self.fenced.reservations

    def wake_parked_pods(self) -> None:
        """Let the scheduler try again the pods that it found no devices for. Raises ApiError."""
        if not self._ended.is_set():
            self._canary.wake_parked_pods()

    def lift_overdue_reservations(self) -> set[frozenset[str]]:
        """Lift those whose time has passed. Returns their UIDs. Raises ApiError."""
        now, present = self._clock.now().timestamp(), self.reservations()
        latest = now + MAX_RESERVED_SECONDS
        overdue = {entry: uids for entry, uids in present.items() if not now < _deadline_of(entry) <= latest}
        self.lift(overdue)
        return set(overdue.values())

    def lift(self, devices: Collection[PoolDevice]) -> None:
        """Allow allocation of ``devices`` again; to be called before they are offered. Raises ApiError."""
        if self._ended.is_set():
            return
        with observed(self._observer, Step.LIFT):
            self.fenced.remove(devices)
        self._to_lift.difference_update(devices)

    def expire(self) -> None:
        """Lift devices withdrawn ``keep_s`` ago, and those whose lift failed before. Raises ApiError."""
        self.lift(self.fenced.older_than(self._settings.keep_s) | self._to_lift)

    def catch_up(self) -> bool:
        """Wait until the cache of claims has processed every change up to now; False if that takes long or fails."""
        try:
            return self._catch_up(DECISION_CATCH_UP_SECONDS)
        except ApiError as error:
            log.warning("can't verify what claims hold", extra={"error": str(error)})
            return False

    def _catch_up(self, seconds: float) -> bool:
        with observed(self._observer, Step.CANARY):
            version = self._canary.touch()
        with observed(self._observer, Step.CATCH_UP):
            if self._claims.wait_for_version(version, seconds):
                return True
            log.warning("the cache of claims lags behind: nothing is withdrawn", extra={"version": version})
            return False

    def _room(self) -> int:
        while (room := self.fenced.room(MIN_FENCED_SECONDS)) == 0 and not self._ended.is_set():
            self._clock.wait(self._ended, ROOM_POLL_INTERVAL_SECONDS)
        return room

    def _steps(self, devices: frozenset[PoolDevice]) -> Withdrawable:
        in_force = self._close(devices)
        if not self._catch_up(self._settings.catch_up_s):
            return Withdrawable(undecided=devices, in_force=in_force)
        with observed(self._observer, Step.CHECK):
            held = devices.intersection(self._claims.held())
        return Withdrawable(devices - held, held, in_force=in_force)

    def _close(self, entries: frozenset[PoolDevice], pod: str = "") -> bool:
        """Add ``entries``; returns whether they are in force. ``pod``: as for ``_probe``."""
        with observed(self._observer, Step.FENCE):
            self._to_lift -= entries
            self.fenced.add(entries)
        with observed(self._observer, Step.SETTLE):
            self._clock.wait(self._ended, self._settings.settle_s)
        with observed(self._observer, Step.PROBE):
            return self._probe(entries, pod)

    def _probe(self, devices: Collection[PoolDevice], pod: str) -> bool:
        """Whether an allocation of one of ``devices`` is refused in time; one suffices, since all are in one object.

        ``pod``: a UID, for which it must not be refused. A policy of an earlier version admits no pods.
        Devices that were lifted meanwhile are left out; if none is left, there is nothing to probe.
        """
        ends = self._clock.monotonic() + self._settings.probe_s
        while fenced := [device for device in devices if device in self.fenced.devices]:
            device = _device_of(min(fenced))
            if FENCE in (answer := self._canary.refusal(device)) and not (pod and self._canary.refusal(device, pod)):
                break
            if self._clock.monotonic() >= ends:
                log.error(
                    "the fence is not in force: is the admission policy installed?",
                    extra={"policy": FENCE, "dryRun": answer or "an allocation passes"},
                )
                return False
            self._clock.wait(self._ended, PROBE_INTERVAL_SECONDS)
        return True

    def _lift_later(self, devices: frozenset[PoolDevice]) -> None:
        """Lift devices that are still offered: now, or when ``expire`` is called."""
        self._to_lift |= devices
        try:
            self.lift(devices)
        except ApiError as error:
            log.warning("offered devices stay fenced for now", extra={"count": len(devices), "error": str(error)})


def _reservation(gpu: PoolDevice, uids: Collection[str], deadline: int) -> PoolDevice:
    return gpu._replace(device=RESERVED.join([gpu.device, ",".join(sorted(uids)), str(deadline)]))


def _deadline_of(reservation: PoolDevice) -> int:
    deadline = reservation.device.rpartition(RESERVED)[2]
    return int(deadline) if deadline.isdecimal() else 0


def _device_of(entry: PoolDevice) -> PoolDevice:
    """A device that ``entry`` closes: it itself, or one of the reserved GPU that nothing else closes."""
    return gpu._replace(device=f"{gpu.device}-probe") if (gpu := gpu_of(entry)) != entry else entry
