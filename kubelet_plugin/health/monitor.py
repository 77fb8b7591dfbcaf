"""The health of each GPU and device of the node.

Faults come from NVML events, from recovery actions that NVML reports, and from claim preparation; operators may cordon
a GPU in addition. The rules are in ``conditions``; the monitor applies them under one lock, keeps the result on disk
and passes it to the inventory (which publishes taints), to Events of the node, and to ``on_change``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from driver.errors import RecoverableError, StateError
from driver.hardware.node_gpus import Host
from driver.model.device import Device
from driver.model.gpu import Gpu
from driver.model.gpu_health import ConditionType, DeviceCondition, EventKind, GpuEvent
from driver.model.plan import ClearedFaults, PlanSpec
from driver.model.xid import meaning_of
from kubelet_plugin.checkpoint.files import write_atomically
from kubelet_plugin.checkpoint.records import slices_of_instance
from kubelet_plugin.claims.context import PluginContext
from kubelet_plugin.health import conditions
from kubelet_plugin.health.conditions import FaultKind, HealthRecord

log = logging.getLogger(__name__)

UNHEALTHY, HEALTHY = "GpuUnhealthy", "GpuHealthy"
"""Reasons of Events on the node."""


class HealthMonitor:
    """Thread-safe. ``on_change`` is called after a visible change.

    ``boot_id`` reads the boot ID of the node, None if it is unreadable. ``send_event`` takes (reason, message, whether
    it is a warning). It and ``on_change`` are called under the lock and must return quickly.
    """

    def __init__(
        self,
        context: PluginContext,
        state_dir: Path,
        boot_id: Callable[[], str | None],
        on_change: Callable[[], None],
        send_event: Callable[[str, str, bool], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Reads the file and updates the inventory; call ``handle_scan`` before devices are published."""
        self._context = context
        self._inventory = context.inventory
        self._file = HealthFile(state_dir)
        self._boot_id = boot_id
        self._on_change = on_change
        self._send_event = send_event
        self._clock = clock
        self._lock = threading.RLock()  # keeps Events and inventory in the order of the changes
        self._record = self._file.load()
        self._device_conditions: dict[tuple[str, ConditionType], tuple[str, int]] = {}
        self._recovery_supported: set[str] = set()
        self._current: dict[str, tuple[DeviceCondition, ...]] = {}
        self._refresh()
        self._reported = {uuid: _reasons(each) for uuid, each in self._current.items()}

    def handle_event(self, event: GpuEvent) -> None:
        """Record an NVML event; events of excluded GPUs (``--exclude-gpus``) are only logged."""
        if event.kind is EventKind.XID and event.xid is not None:
            extra = {"gpu": event.gpu_uuid, "xid": event.xid, "meaning": meaning_of(event.xid).text}
            log.warning("GPU reported an XID", extra={**extra, "gpuInstance": event.gpu_instance_id})
        if event.gpu_uuid is None or self._inventory.gpu(event.gpu_uuid) is None:
            return
        slices = self._slices(event)
        with self._lock:
            supported = event.gpu_uuid in self._recovery_supported
            self._change(conditions.apply_event(self._record, event, slices, self._now(), recovery_supported=supported))

    def handle_scan(self, answering: Sequence[Gpu]) -> None:
        """Update the health after a scan; the GPUs ``answering`` responded."""
        actions = self._recovery_actions(answering)
        boot_id = self._boot_id()
        with self._lock:
            self._recovery_supported = set(actions)
            record = conditions.apply_scan(
                conditions.apply_boot(self._record, boot_id), {gpu.uuid for gpu in answering}
            )
            for uuid, action in actions.items():
                record = conditions.apply_recovery_action(record, uuid, action, self._now())
            self._change(record)
            self._report()

    def apply_plan(self, spec: PlanSpec) -> None:
        """Apply the cordons and cleared faults of a plan (``tessera cordon``, ``tessera uncordon``)."""
        cleared = {each.gpu: each.stamp for text in spec.cleared if (each := ClearedFaults.parse(text)) is not None}
        with self._lock:
            self._change(conditions.apply_operator(self._record, spec.cordons, cleared))

    def set_condition(self, device_name: str, kind: ConditionType, reason: str | None) -> None:
        """Set a condition of ``device_name``, or clear it if ``reason`` is None. Not kept over a restart."""
        with self._lock:
            _, stamp = self._device_conditions.pop((device_name, kind), ("", 0))
            if reason is not None:
                if not stamp:
                    self._record, stamp = conditions.new_stamp(self._record, self._now())
                self._device_conditions[device_name, kind] = reason, stamp
            self._publish()

    def unhealthy_reason(self, device: Device) -> str | None:
        """Why ``device`` is not healthy, or None. A cordoned device is healthy."""
        fault = self._inventory.fault(device.gpu)
        reasons = [f"its GPU can't be used at present: {fault}"] if fault else []
        # Without the lock: its holder may be waiting for the disk.
        conditions = self._current.get(device.gpu.uuid, ())
        reasons += [str(each) for each in conditions if not each.cordon and each.affects(device)]
        return "; ".join(reasons) or None

    def faults_by_kind(self) -> Mapping[str, int]:
        """The number of faults of each kind (xid, unavailable, recovery, lost, stuck) and of cordoned GPUs."""
        with self._lock:
            kinds = [fault.kind.value for fault in self._record.faults]
            kinds += [kind.value for _, kind in self._device_conditions]
            return Counter({**Counter(kinds), "cordoned": len(self._record.cordoned)})

    def describe_faults(self) -> tuple[str, ...]:
        """One line for each fault that an operator can clear: its name as in ``ClearedFaults``, and a description."""
        with self._lock:
            return tuple(f"{ClearedFaults(each.gpu, each.stamp)} {each.condition()}" for each in self._record.faults)

    def _now(self) -> int:
        return int(self._clock())

    def _slices(self, event: GpuEvent) -> int | None:
        """The memory slices of the partition of ``event``; None: the whole GPU, or unknown."""
        if event.gpu_uuid is None or event.gpu_instance_id is None:
            return None
        return slices_of_instance(self._context.checkpoint.records(), event.gpu_uuid, event.gpu_instance_id)

    def _recovery_actions(self, gpus: Iterable[Gpu]) -> dict[str, int]:
        """The recovery action of each GPU, by UUID, without the GPUs for which NVML does not report one."""
        found = {}
        for gpu in gpus:
            try:
                action = self._context.host.recovery_action(gpu)
            except RecoverableError as error:
                log.warning("can't read the recovery action of a GPU", extra={"gpu": gpu.uuid, "error": str(error)})
                continue
            if action is not None:
                found[gpu.uuid] = action
        return found

    def _change(self, record: HealthRecord) -> None:
        """The caller holds the lock."""
        if record == self._record:
            return
        self._record = record
        self._file.save(record)
        self._publish()

    def _publish(self) -> None:
        if self._refresh():
            self._report()
            self._on_change()

    def _refresh(self) -> bool:
        """Update the inventory; returns whether anything changed."""
        before, self._current = self._current, self._conditions()
        uuids = before.keys() | self._current.keys()
        changed = [self._inventory.set_conditions(uuid, self._current.get(uuid, ())) for uuid in uuids]
        return any(changed)

    def _conditions(self) -> dict[str, tuple[DeviceCondition, ...]]:
        """The conditions by GPU: faults in the order of detection, then conditions of devices, then the cordon.

        Recovery actions come after other faults: they follow from them, even if they are seen first.
        """
        found: dict[str, list[DeviceCondition]] = {}
        for fault in sorted(self._record.faults, key=lambda each: each.kind is FaultKind.RECOVERY):
            found.setdefault(fault.gpu, []).append(fault.condition())
        for (name, kind), (reason, stamp) in sorted(self._device_conditions.items()):
            device = self._inventory.device(name)
            if device is not None:
                found.setdefault(device.gpu.uuid, []).append(
                    DeviceCondition(kind.value, reason, device=name, stamp=stamp)
                )
        for uuid, reason in self._record.cordoned.items():
            found.setdefault(uuid, []).append(DeviceCondition("cordoned", reason, cordon=True))
        return {uuid: tuple(each) for uuid, each in found.items()}

    def _report(self) -> None:
        """Send an Event for each GPU that has new faults or has recovered."""
        now = {uuid: _reasons(each) for uuid, each in self._current.items()}
        for gpu in self._inventory.gpus:
            absent = self._inventory.fault(gpu)
            if absent is not None:
                now[gpu.uuid] = (*now.get(gpu.uuid, ()), f"can't be used at present: {absent}")
        for uuid in sorted(now.keys() | self._reported.keys()):
            new = [reason for reason in now.get(uuid, ()) if reason not in self._reported.get(uuid, ())]
            if new:
                self._send_event(
                    UNHEALTHY, f"{self._named(uuid)}: {'; '.join(new)}; it is not offered to new pods", True
                )
            elif self._reported.get(uuid) and not now.get(uuid):
                self._send_event(HEALTHY, f"{self._named(uuid)} is healthy again", False)
        self._reported = now

    def _named(self, uuid: str) -> str:
        gpu = self._inventory.gpu(uuid)
        return f"GPU {uuid}" if gpu is None else f"gpu-{self._inventory.number(gpu)} ({uuid})"


def _reasons(conditions: Iterable[DeviceCondition]) -> tuple[str, ...]:
    """Descriptions of the conditions, without cordons."""
    return tuple(f"{each.device}: {each}" if each.device else str(each) for each in conditions if not each.cordon)


FILE_VERSION = 1
"""Version of the file format. A file of another version is renamed and not read."""

FILE_NAME = "health.json"


class HealthFileContent(msgspec.Struct, frozen=True):
    version: int
    record: HealthRecord


HEALTH_FILE = msgspec.json.Decoder(HealthFileContent)


class HealthFile:
    """``<state-dir>/health.json``."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE_NAME

    def load(self) -> HealthRecord:
        """The saved record; an empty one if there is no file. An unreadable file is renamed and logged."""
        try:
            content = HEALTH_FILE.decode(self._path.read_bytes())
        except FileNotFoundError:
            return HealthRecord()
        except (OSError, msgspec.MsgspecError) as error:
            self._set_aside(str(error))
            return HealthRecord()
        if content.version != FILE_VERSION:
            self._set_aside(f"version {content.version}, this plugin reads {FILE_VERSION}")
            return HealthRecord()
        return content.record

    def save(self, record: HealthRecord) -> None:
        """Write ``record`` durably. A failure is logged only: the record in memory stays in force."""
        try:
            write_atomically(self._path, msgspec.json.encode(HealthFileContent(FILE_VERSION, record)), durable=True)
        except StateError as error:
            log.error("can't save the health of GPUs; a restart would lose it", extra={"error": str(error)})

    def _set_aside(self, why: str) -> None:
        aside = self._path.with_name(f"{FILE_NAME}.damaged-{time.time_ns()}")
        extra = {"path": str(self._path), "keptAs": str(aside), "error": why}
        log.error("can't read the saved health of GPUs; starting without it", extra=extra)
        try:
            self._path.rename(aside)
        except OSError as error:
            log.error("can't rename a damaged file", extra={"path": str(self._path), "error": str(error)})


EVENT_TIMEOUT_SECONDS = 5.0
"""Longest wait in NVML. Afterwards GPUs that were added meanwhile are included, and ``stop`` is checked."""


class NvmlEventListener:
    """Calls each of ``handlers`` with every NVML event, in a thread of its own; they must return quickly."""

    def __init__(self, host: Host, *handlers: Callable[[GpuEvent], None]) -> None:
        self._host = host
        self._handlers = handlers

    def run(self, stop: threading.Event) -> None:
        """Receive events until ``stop`` is set."""
        while not stop.is_set():
            try:
                event = self._host.wait_for_event(EVENT_TIMEOUT_SECONDS)
            except Exception:
                if stop.is_set():  # the hardware may be closed by then
                    return
                log.exception("internal error while waiting for NVML events")
                stop.wait(EVENT_TIMEOUT_SECONDS)
                continue
            if event is not None:
                self._dispatch(event)

    def _dispatch(self, event: GpuEvent) -> None:
        for handle in self._handlers:
            try:
                handle(event)
            except Exception:
                # A defect in one handler must not keep the event from the others, nor end the thread.
                log.exception(
                    "internal error while handling an NVML event",
                    extra={"gpu": event.gpu_uuid, "kind": event.kind.value},
                )
