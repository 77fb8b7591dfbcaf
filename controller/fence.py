"""How an offer that still fits is taken back without giving its memory away twice.

The scheduler decides by what it last saw and writes the allocation later: milliseconds, or minutes. A device
may be withdrawn only when nobody has it and no decision for it can still be written. Hence the steps of
``controller.steps.Step``, after which the node may withdraw it:

- ``fence``: the device goes into the ConfigMap that is the parameter of the admission policy
  (the chart's ``fence.yaml``). A new allocation of it is refused from the moment an API server has seen that.
- ``settle``: wait until every API server has (each watches the parameter by itself; nothing says when).
- ``probe``: see, by server-side dry runs of such an allocation, that the one we talk to has. With one API
  server that is all of them, and ``settle_s`` may be 0.
- ``canary`` and ``catch-up``: write a claim of our own and wait until the cache of claims has told of that very
  version. Proof: let an allocation of the device be written at version A. It passed admission before the fence
  was in force, so before the canary was sent, and got its version right afterwards: A < canary. The cache hears
  of one resource's changes in the order of their versions, in one watch, so with the canary it has heard of A.
- ``check``: what somebody holds now is let go again (``lift``) and stays; the rest may be withdrawn.

The gap in the proof is "right afterwards": an API server that stalls between its admission and its write to
etcd, for longer than settle, probe and canary together take, is not covered. So an allocation of a fenced
device that is seen later all the same (``is_fenced``) has to be treated as held; and the node plugin refuses to
prepare what overlaps. A quorum list instead of the canary costs a read of all claims and does not close that
gap either; the version it returns is the store's, not the claims', so a cache could not wait for it. Cost of
one taking back, for any number of devices: three writes (ConfigMap, canary; once more the ConfigMap for what is
held), one dry run or few, one event for everybody who watches claims; it wakes no waiting pod.

The ConfigMap is the state, so that another leader goes on with it (``start``). What was withdrawn stays fenced
for ``keep_s``, by the clock of whoever leads, because a decision may be that late; offering it again lifts it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Protocol

from controller.canary import Canary
from controller.fenced import FencedDevices, PoolDevice
from controller.steps import Observer, Step
from driver.errors import ApiError
from driver.kube.clock import Clock, SystemClock
from driver.kube.transport import KubeClient
from driver.model.plan import FENCE
from driver.steps import observed, unobserved

log = logging.getLogger(__name__)

SPARED_S = 15.0
"""How long an entry stays, whatever else is to be fenced: decisions are late by milliseconds, seldom by seconds."""

ROOM_PAUSE_S = 1.0
"""Between two looks for room among the entries."""

PROBE_PAUSE_S = 0.005
"""Between two dry runs; the fence has been seen in force within 8 ms on a busy machine."""


class Claims(Protocol):
    """The cache of all claims, as far as the fence needs it (``WatchCache.wait_for_version`` is the first)."""

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        """Whether every change of a claim up to that version was processed within ``timeout_s`` seconds."""
        ...

    def held(self) -> Collection[PoolDevice]:
        """What is allocated by all that was processed."""
        ...


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
    """What became of devices that were to be taken back.

    ``devices`` may be withdrawn and stay fenced; ``held`` is somebody's and ``undecided`` can't be judged now: both
    stay offered, without a fence. ``in_force`` says whether the policy was seen refusing: if not, a decision that
    is on its way may still be written.
    """

    devices: frozenset[PoolDevice] = frozenset()
    held: frozenset[PoolDevice] = frozenset()
    undecided: frozenset[PoolDevice] = frozenset()
    in_force: bool = True


class Fence:
    """The fence around devices that are taken back. For the leader alone, one for each term; thread-safe."""

    def __init__(
        self,
        client: KubeClient,
        claims: Claims,
        settings: FenceSettings | None = None,
        clock: Clock | None = None,
        observer: Observer = unobserved,
    ) -> None:
        self._claims = claims
        self._settings = settings or FenceSettings()
        self._clock = clock or SystemClock()
        self._observer = observer
        self._fenced = FencedDevices(client, self._settings.namespace, self._clock)
        self._canary = Canary(client, self._settings.namespace)
        self._ended = threading.Event()
        self._to_lift: set[PoolDevice] = set()

    def start(self, offered: Collection[PoolDevice]) -> None:
        """Go on with what the leader before left: ``offered`` is lifted, the rest stays for ``keep_s`` from now.

        ``offered``: what the plans offer. A leader that ended half-way through taking back left them fenced.
        Raises ApiError; call it again then, before anything else.
        """
        self._fenced.load()
        self.lift(offered)

    def end(self) -> None:
        """Another leads by now: whatever is under way here changes nothing any more."""
        self._ended.set()

    def is_fenced(self, device: PoolDevice) -> bool:
        """Whether it is. Allocated all the same, it is held, and must be published again; asking costs no request."""
        return device in self._fenced

    def take_back(self, devices: Collection[PoolDevice]) -> Withdrawable:
        """Find out which of these offers the nodes may withdraw; takes about ``settle_s``.

        What there is no room for among the entries is undecided; waits until there is room for one at least.
        Raises ApiError where the API server fails; then nothing may be withdrawn, and what was fenced is lifted, if
        not now then by ``expire``.
        """
        if not devices:
            return Withdrawable()
        wanted = frozenset(sorted(devices)[: self._room()])
        if self._ended.is_set():
            return Withdrawable(undecided=frozenset(devices))
        try:
            result = self._steps(wanted)
            self.lift(wanted - result.devices)
        except ApiError:
            self._lift_later(wanted)
            raise
        return replace(result, undecided=result.undecided | (frozenset(devices) - wanted))

    def lift(self, devices: Collection[PoolDevice]) -> None:
        """Let them be allocated again; to be called before they are offered. Raises ApiError."""
        self._remove(set(devices))

    def expire(self) -> None:
        """Lift what was withdrawn ``keep_s`` ago, and what could not be lifted before. Raises ApiError."""
        self._remove(self._fenced.older_than(self._settings.keep_s) | self._to_lift)

    def _room(self) -> int:
        while (room := self._fenced.room(SPARED_S)) == 0 and not self._ended.is_set():
            self._clock.wait(self._ended, ROOM_PAUSE_S)
        return room

    def _steps(self, devices: frozenset[PoolDevice]) -> Withdrawable:
        with observed(self._observer, Step.FENCE):
            self._to_lift -= devices
            self._fenced.add(devices)
        with observed(self._observer, Step.SETTLE):
            self._clock.wait(self._ended, self._settings.settle_s)
        with observed(self._observer, Step.PROBE):
            in_force = self._probe(devices)
        with observed(self._observer, Step.CANARY):
            version = self._canary.touch()
        with observed(self._observer, Step.CATCH_UP):
            if not self._claims.wait_for_version(version, self._settings.catch_up_s):
                log.warning("the cache of claims lags behind: nothing is taken back", extra={"version": version})
                return Withdrawable(undecided=devices, in_force=in_force)
        with observed(self._observer, Step.CHECK):
            held = devices.intersection(self._claims.held())
        return Withdrawable(devices - held, held, in_force=in_force)

    def _probe(self, devices: Collection[PoolDevice]) -> bool:
        """Whether an allocation of one comes to be refused; all of one ``fence`` are in one object.

        What was let go meanwhile is not asked about; where that is all of them there is nothing to ask.
        """
        ends = self._clock.monotonic() + self._settings.probe_s
        while fenced := [device for device in devices if self.is_fenced(device)]:
            if FENCE in (answer := self._canary.refusal(min(fenced))):
                break
            if self._clock.monotonic() >= ends:
                log.error(
                    "the fence is not in force: is the admission policy installed?",
                    extra={"policy": FENCE, "dryRun": answer or "an allocation passes"},
                )
                return False
            self._clock.wait(self._ended, PROBE_PAUSE_S)
        return True

    def _remove(self, devices: set[PoolDevice]) -> None:
        if self._ended.is_set():
            return
        with observed(self._observer, Step.LIFT):
            self._fenced.remove(devices)
        self._to_lift -= devices

    def _lift_later(self, devices: frozenset[PoolDevice]) -> None:
        """They are offered still, so they must not stay fenced: now, or when ``expire`` is called."""
        self._to_lift |= devices
        try:
            self.lift(devices)
        except ApiError as error:
            log.warning("offered devices stay fenced for now", extra={"count": len(devices), "error": str(error)})
