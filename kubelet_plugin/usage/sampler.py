"""Samples the usage of every prepared claim, apart from preparing: a GPU that hangs costs a gap in its metrics only.

``driver.model.usage`` computes the figures, ``kubelet_plugin.metrics.usage`` exports them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from driver.clock import Clock, read_time, seconds_time
from driver.errors import ApiError, HardwareError
from driver.hardware.host import TimeoutRunner
from driver.hardware.usage import UsageReader
from driver.model.offer import WITHOUT_OWN_ACTIVITY, compute_instances
from driver.model.plan import IDLE_REPORT_SECONDS, MOST_IDLE
from driver.model.shared_memory import GIB
from driver.model.usage import UsageReading, UsageTarget, UsageTotals
from kubelet_plugin.checkpoint.records import ClaimRecord, DeviceRecord
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.usage.labels import ClaimLabels, ClaimsAndPods, reading_of_share
from kubelet_plugin.usage.totals_file import TotalsFile

log = logging.getLogger(__name__)

GPU_READ_TIMEOUT_SECONDS = 5.0
"""How long one GPU may take for one reading of all its claims' devices; it takes milliseconds."""

FIRST_INTERVAL_SECONDS = 1.0
"""A GPU with a new claim is sampled again after this time, then after twice as long, up to the usual interval: a pod
that lives for seconds is measured, too."""

KNOWN_INTERVALS, IDLE_SECONDS = 2, 60.0
"""Intervals without a reading after which activity is unknown; idle time from which on a claim is reported."""

LINGER_SECONDS = 300.0
"""How long the totals of a claim stay after its end, so that every scraper reads their last values."""


def since_boot() -> float:
    """Seconds since boot; goes on while the plugin restarts."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """One device of a claim, first seen at ``since``.

    ``labels`` is None until the claim was read, ``reading`` while nothing is known and after the claim's end
    (``ended_at``). ``activity_at`` is the time of the last reading with activity.
    """

    record: ClaimRecord
    device: DeviceRecord
    totals: UsageTotals
    since: float
    labels: ClaimLabels | None = None
    reading: UsageReading | None = None
    activity_at: float | None = None
    ended_at: float | None = None

    @property
    def series(self) -> tuple[str, str, str]:
        """What distinguishes its series from others."""
        return self.record.namespace, self.record.name, self.device.device

    @property
    def idle_seconds(self) -> float:
        """At the last round; 0 if it was active, or if that is unknown."""
        is_unknown = self.ended_at is not None or self.activity_at is None
        return 0.0 if is_unknown else self.totals.counted_at - self.totals.active_at

    def measured(self, reading: UsageReading, now: float) -> MeasuredDevice:
        activity = reading.activity
        totals = self.totals if activity is None else self.totals.with_activity(activity, now)
        return replace(self, reading=reading, totals=totals, activity_at=now if activity else self.activity_at)

    def ended(self, now: float, most_seconds: float) -> MeasuredDevice:
        """After the claim's end; for up to ``most_seconds`` before, it counts as active as in its last sample."""
        totals, activity = self.totals.counted(now), self.reading.activity if self.reading is not None else None
        if activity is not None and self.activity_at is not None:
            seconds = min(max(0.0, now - self.activity_at), most_seconds)
            totals = totals.with_activity(replace(activity, seconds=seconds), totals.active_at)
        return replace(self, totals=totals, reading=None, ended_at=now)


Key = tuple[str, str]
"""Uid of a claim and name of one of its devices."""


UsageFollower = Callable[[Mapping[Key, MeasuredDevice]], float | None]
"""Handles the devices of one round of samples. Returns the seconds until the next check; None: none is needed."""


class IdleClaims:
    """The prepared claims that use none of their devices; ``check`` is a ``UsageFollower``.

    ``report``: what the plan's status says of them, and when. What claims that are in use do changes nothing in it.
    """

    def __init__(self, clock: Clock, changed: Callable[[], None]) -> None:
        self._clock, self._changed, self._reported_at = clock, changed, 0.0
        self._since = dict[tuple[str, float], str]()
        """By claim, and when it was active last, in seconds since boot."""
        self.report: tuple[tuple[str, ...], str] = (), ""

    def check(self, devices: Mapping[Key, MeasuredDevice]) -> None:
        busiest_of, now = dict[str, MeasuredDevice](), self._clock.now()
        since = dict[tuple[str, float], str]()
        for usage in sorted(devices.values(), key=lambda usage: -usage.idle_seconds):
            busiest_of[str(usage.record)] = usage
        for claim, busiest in busiest_of.items():
            if busiest.idle_seconds >= IDLE_SECONDS:
                key, began = (claim, busiest.totals.active_at), now - timedelta(seconds=busiest.idle_seconds)
                is_same = abs((read_time(self._since.get(key, "")) or 0) - began.timestamp()) < IDLE_SECONDS
                since[key] = self._since[key] if is_same else seconds_time(began)  # a clock may have been set
        is_due = bool(since) and self._clock.monotonic() - self._reported_at >= IDLE_REPORT_SECONDS
        if is_due or since != self._since:
            self._since, self._reported_at = since, self._clock.monotonic()
            longest = sorted((time, claim) for (claim, _), time in since.items())[:MOST_IDLE]
            self.report = tuple(f"{claim} {time}" for time, claim in longest), seconds_time(now)
            self._changed()


class UsageSampler:
    """``run`` samples; all other methods only read memory."""

    def __init__(
        self,
        stores: ClaimStores,
        reader: UsageReader,
        claims: ClaimsAndPods,
        totals_file: TotalsFile,
        interval_seconds: float,
        followers: Sequence[UsageFollower],
        clock: Callable[[], float] = since_boot,
    ) -> None:
        self._stores, self._reader, self._claims = stores, reader, claims
        self._file, self._interval, self._followers, self._clock = totals_file, interval_seconds, followers, clock
        self._timeouts = TimeoutRunner(GPU_READ_TIMEOUT_SECONDS)
        self._saved = totals_file.load(clock())
        self._due: dict[str, float] = {}
        self._changed = threading.Event()
        self.devices: Mapping[Key, MeasuredDevice] = {}
        """Replaced as a whole after each round."""

    def notify(self) -> None:
        """A claim was prepared or released."""
        self._changed.set()

    def run(self, stop: threading.Event) -> None:
        """Sample until ``stop`` is set (then call ``notify``)."""
        while not stop.is_set():
            self._changed.clear()
            try:
                wait = self.sample()
            except Exception:  # an end of this thread would end the plugin, which metrics must not do
                log.exception("usage was not sampled")
                wait = self._interval
            self._changed.wait(wait)
        self._file.save({key: usage.totals for key, usage in self.devices.items()})

    def sample(self) -> float:
        """Sample what is due. Returns the seconds until something is due again."""
        now = self._clock()
        devices = self._current(now)
        self._read_missing_labels(devices)
        live = {key: usage for key, usage in devices.items() if usage.ended_at is None}
        due = {usage.device.gpu_uuid for usage in live.values()}
        to_sample = [uuid for uuid in due if self._due.get(uuid, now) <= now]
        for uuid in to_sample:
            on_gpu = {key: usage for key, usage in live.items() if usage.device.gpu_uuid == uuid}
            self._sample_gpu(uuid, devices, on_gpu)
            # A new claim is sampled again soon; the time doubles with each sample.
            youngest = min(now - usage.since for usage in on_gpu.values())
            # All GPUs are sampled at multiples of the interval, together.
            until_next = self._interval - now % self._interval
            self._due[uuid] = now + min(until_next, max(FIRST_INTERVAL_SECONDS, youngest))
        self._due = {uuid: at for uuid, at in self._due.items() if uuid in due}
        self.devices = devices
        self._reader.keep([target_of(usage.device) for usage in live.values()])
        if to_sample:
            self._file.save({key: usage.totals for key, usage in devices.items()})
        due_in = min(self._due.values(), default=now + self._interval) - self._clock()
        return max(0.0, min(due_in, *(follow(devices) or due_in for follow in self._followers)))

    def _current(self, now: float) -> dict[Key, MeasuredDevice]:
        """The devices of all prepared claims and of those that ended lately, with the time until ``now`` counted."""
        boot = self._stores.boot
        current: dict[Key, MeasuredDevice] = {}
        for record in self._stores.checkpoint.records():
            if not record.prepared_in_this_boot(boot):
                continue
            for device in record.devices:
                key = (record.uid, device.key)
                usage = self.devices.get(key)
                if usage is None or usage.ended_at is not None or usage.device != device:
                    usage = self._begun(record, device, now)
                labels = usage.labels if usage.record.pods == record.pods else None  # later pods use it
                totals = usage.totals.counted(now)
                if now - (usage.activity_at or usage.since) > KNOWN_INTERVALS * self._interval:
                    totals = totals.resumed(now)  # it may have been active
                current[key] = replace(usage, record=record, labels=labels, totals=totals)
        continued = {usage.series for usage in current.values()}
        for key, usage in self.devices.items():
            ended = usage if usage.ended_at is not None else usage.ended(now, self._interval)
            lingers = now - (ended.ended_at or now) < LINGER_SECONDS
            if lingers and key not in current and usage.series not in continued:
                current[key] = ended
        return current

    def _begun(self, record: ClaimRecord, device: DeviceRecord, now: float) -> MeasuredDevice:
        """A device that is new, or that is another one than before: its partition was cut again."""
        self._due.pop(device.gpu_uuid, None)
        totals = self._saved.pop((record.uid, device.key), None)
        if totals is None:
            gpu = self._stores.inventory.gpu(device.gpu_uuid)
            slices = (device.size or 0) / compute_instances(device.profile)
            slices = slices or (1 if gpu is None else gpu.memory_slices) / device.shares
            if device.gib and gpu is not None:
                slices *= device.gib * GIB / gpu.memory_bytes
            totals = UsageTotals(slices=float(slices), counted_at=now, active_at=now)
        elif now - totals.counted_at > KNOWN_INTERVALS * self._interval:
            totals = totals.counted(now).resumed(now)
        begun = MeasuredDevice(record, device, totals, since=now)
        for earlier in self.devices.values():
            # A claim may be created again under its name: its series go on.
            if earlier.series == begun.series:
                totals = earlier.totals if earlier.ended_at is None else earlier.totals.resumed(now)
                is_same_claim = earlier.record.uid == record.uid
                return replace(begun, totals=totals, labels=earlier.labels if is_same_claim else None)
        return begun

    def _read_missing_labels(self, devices: dict[Key, MeasuredDevice]) -> None:
        """Read the claims that were not read yet; an API server that does not answer is asked again next time."""
        read: dict[str, ClaimLabels] = {}
        for key, usage in devices.items():
            if usage.labels is not None or usage.ended_at is not None:
                continue
            try:
                labels = read.get(usage.record.uid) or self._claims.read_labels(usage.record)
            except ApiError as error:
                log.debug("claim of a usage metric was not read", extra={"error": str(error)})
                if error.status is None:
                    return
                continue
            read[usage.record.uid] = labels
            devices[key] = replace(usage, labels=labels)

    def _sample_gpu(self, uuid: str, devices: dict[Key, MeasuredDevice], on_gpu: Mapping[Key, MeasuredDevice]) -> None:
        """Read every device of claims on one GPU, and set it in ``devices``."""
        targets = {target_of(usage.device) for usage in on_gpu.values()}
        try:
            readings = self._timeouts.run(uuid, partial(self._read, targets))
        except HardwareError as error:
            log.debug("usage of a GPU is unknown", extra={"gpu": uuid, "error": str(error)})
            readings = {}
        now = self._clock()
        for key, usage in on_gpu.items():
            reading = readings.get(target_of(usage.device))
            if reading is None:
                devices[key] = replace(usage, reading=None)
                continue
            if usage.device.kind in WITHOUT_OWN_ACTIVITY:
                gib = usage.record.shared_gib(uuid)
                reading = reading_of_share(reading, usage.labels, self._claims.pod_of_process, gib)
            devices[key] = usage.measured(reading, now)

    def _read(self, targets: Iterable[UsageTarget]) -> Mapping[UsageTarget, UsageReading]:
        """Devices that cannot be read are left out."""
        readings: dict[UsageTarget, UsageReading] = {}
        for target in targets:
            try:
                readings[target] = self._reader.read(target)
            except HardwareError as error:
                log.debug("usage of a device is unknown", extra={"gpu": target.gpu_uuid, "error": str(error)})
        return readings

    def memory_used(self, uid: str, device: str) -> int | None:
        """Bytes that the pods of a claim used of the GPU of its ``device`` in the last sample; None: unknown."""
        usage = self.devices.get((uid, device))
        return usage.reading.memory_used if usage is not None and usage.reading is not None else None

    def has_activity(self, gpu_uuid: str) -> bool:
        """Whether the GPU is known to have activity counters."""
        return bool(self._reader.has_activity(gpu_uuid))

    def unknown(self) -> Mapping[str, str]:
        """Why claims on a GPU have no activity, by the UUIDs of the GPUs that claims hold."""
        reasons: dict[str, str] = {}
        for usage in self.devices.values():
            gpu = self._stores.inventory.gpu(usage.device.gpu_uuid)
            if gpu is None or usage.ended_at is not None:
                continue
            if usage.reading is None:
                reasons[gpu.uuid] = "the GPU does not answer"
            elif self._reader.has_activity(gpu.uuid) is False:
                reasons[gpu.uuid] = f"no activity counters on {gpu.product_name}"
        return reasons


def target_of(device: DeviceRecord) -> UsageTarget:
    return UsageTarget(device.gpu_uuid, device.gpu_instance_id, device.uuid)
