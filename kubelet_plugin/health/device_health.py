"""The health of each GPU and device of the node.

The monitor applies the rules of ``device_conditions`` and ``recorded_faults`` under one lock, keeps the faults on disk,
and passes the conditions to the inventory (which publishes taints) and to Events of the node.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import pynvml

from driver.errors import HardwareError, RecoverableError
from driver.hardware.host import Host
from driver.model.device import Device
from driver.model.gpu import Gpu
from driver.model.gpu_events_and_conditions import ConditionType, DeviceCondition, GpuEvent
from driver.model.plan import ClearedFaults, NodeConditionType, PlanSpec
from kubelet_plugin.changes import ChangeNotifier, GpuChange, NodeChange, NodeEventSink
from kubelet_plugin.checkpoint.recorded_gpus import slices_of_instance
from kubelet_plugin.checkpoint.records import Checkpoint
from kubelet_plugin.health import recorded_faults
from kubelet_plugin.health.device_conditions import (
    FAILING,
    UNABLE,
    condition_of,
    conditions_by_gpu,
    failing_condition,
    fault_of_event,
)
from kubelet_plugin.health.failed_preparations import FailedPreparations
from kubelet_plugin.health.node_problems import NodeConditions
from kubelet_plugin.health.recorded_faults import HealthFile, HealthRecord, RefusedChanges
from kubelet_plugin.inventory.inventory import Inventory

log = logging.getLogger(__name__)

GPU_UNHEALTHY, GPU_HEALTHY = "GpuUnhealthy", "GpuHealthy"
"""Reasons of Events on the node."""

ABSENT = "absent"
"""Cause of Events about a GPU that does not respond."""

REQUEST_AT_FAULT = frozenset({pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NO_PERMISSION})
"""Answers of NVML to a change that say nothing about the GPU: the request or the plugin's rights are at fault."""


class HealthMonitor:
    """Thread-safe. Reports visible changes, and Events of the node, under its lock."""

    def __init__(
        self,
        host: Host,
        inventory: Inventory,
        checkpoint: Checkpoint,
        file: HealthFile,
        changes: ChangeNotifier,
        events: NodeEventSink,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Reads the file and updates the inventory; call ``handle_scan`` before devices are published."""
        self._host, self._inventory, self._checkpoint = host, inventory, checkpoint
        self._file, self._changes, self._events = file, changes, events
        self._clock = clock
        self.failed_preparations = FailedPreparations(changes, clock)
        self.node_conditions = NodeConditions(changes, events, clock)
        self._lock = threading.RLock()  # keeps Events and inventory in the order of the changes
        self._record = self._file.load()
        self._device_conditions: dict[tuple[str, ConditionType], tuple[str, int]] = {}
        self._offered_for_trial: dict[str, int] = {}
        self._tried: set[str] = set()
        self._recovery_supported: set[str] = set()
        self._unable: str | None = None
        self._tested: dict[str, str] = {}
        """The GPUs that are cordoned for a test of the plugin's own, with the reason."""
        self._current: dict[str, tuple[DeviceCondition, ...]] = {}
        self._refresh()
        self._reported = {uuid: _reasons(of_gpu) for uuid, of_gpu in self._current.items()}

    def handle_event(self, event: GpuEvent) -> None:
        """Record an NVML event, unless settings exclude its GPU (``--exclude-gpus``)."""
        if event.gpu_uuid is None or self._inventory.gpu(event.gpu_uuid) is None:
            return
        slices = None
        if event.gpu_instance_id is not None:
            slices = slices_of_instance(self._checkpoint.records(), event.gpu_uuid, event.gpu_instance_id)
        with self._lock:
            supported = event.gpu_uuid in self._recovery_supported
            fault = fault_of_event(event, slices, self._now(), recovery_supported=supported)
            if fault is not None:
                self._change(recorded_faults.apply_fault(self._record, fault))

    def handle_scan(self, answering: Sequence[Gpu]) -> None:
        """Update the health after a scan; the GPUs ``answering`` responded."""
        actions = self._recovery_actions(answering)
        boot_id = self._host.boot_id()
        with self._lock:
            self._recovery_supported = set(actions)
            record = recorded_faults.apply_scan(
                recorded_faults.apply_boot(self._record, boot_id), {gpu.uuid for gpu in answering}
            )
            for uuid, action in actions.items():
                record = recorded_faults.apply_recovery_action(record, uuid, action, self._now())
            self._change(record)
            self._report()

    def apply_plan(self, spec: PlanSpec) -> None:
        """Apply the cordons and cleared faults of a plan (``tessera cordon``, ``tessera uncordon``)."""
        cleared = [faults for faults in map(ClearedFaults.parse, spec.cleared) if faults is not None]
        with self._lock:
            stamps = {faults.gpu: faults.stamp for faults in cleared}
            self._change(recorded_faults.apply_operator(self._record, spec.cordons, stamps))

    def set_condition(self, device_name: str, kind: ConditionType, reason: str | None) -> None:
        """Set a condition of ``device_name``, or clear it if ``reason`` is None. Not kept over a restart."""
        with self._lock:
            _, stamp = self._device_conditions.pop((device_name, kind), ("", 0))
            if reason is not None:
                if not stamp:
                    self._record, stamp = recorded_faults.new_stamp(self._record, self._now())
                self._device_conditions[device_name, kind] = reason, stamp
            self._publish()

    def change_failed(self, gpu: Gpu, change: GpuChange, error: HardwareError) -> None:
        """Count a refused change of ``gpu``, unless the request was at fault (``HardwareOutcomes``)."""
        if error.code in REQUEST_AT_FAULT:
            return
        with self._lock:
            self._change(recorded_faults.apply_refusal(self._record, gpu.uuid, change, str(error), self._now()))
            if self._offered_for_trial.pop(gpu.uuid, None) is not None:
                self._publish()

    def change_succeeded(self, gpu: Gpu, change: GpuChange) -> None:
        """End the count of refused changes, and the condition of a failing GPU (``HardwareOutcomes``)."""
        if not self._record.refused or gpu.uuid in self._tried:
            return
        with self._lock:
            self._change(recorded_faults.apply_success(self._record, gpu.uuid, change))
            if self._offered_for_trial.pop(gpu.uuid, None) is not None:
                self._publish()

    def failing(self) -> Sequence[RefusedChanges]:
        """What the hardware of failing GPUs refused, of those that may be tried: nothing else is wrong with them."""
        record = self._record
        others = record.cordoned.keys() | record.actions.keys() | {fault.gpu for fault in record.faults}
        return [refused for refused in record.failing if refused.gpu not in others]

    @contextmanager
    def trying(self, gpu: Gpu) -> Iterator[None]:
        """While the block runs, a successful change of ``gpu`` does not end its condition."""
        self._tried.add(gpu.uuid)
        try:
            yield
        finally:
            self._tried.discard(gpu.uuid)

    def offer_for_trial(self, gpu: Gpu, slices: int) -> None:
        """Offer the devices on these memory slices (bit mask) of a failing GPU: preparing one is the trial."""
        with self._lock:
            self._offered_for_trial[gpu.uuid] = slices
            self._publish()

    def set_unable(self, reason: str | None) -> None:
        """Record why the node can start no pod with a GPU; None: it can."""
        with self._lock:
            self.node_conditions.set(NodeConditionType.UNABLE, reason)
            self._unable = reason
            self._publish()

    def cordon_for_test(self, gpu: Gpu, reason: str | None) -> None:
        """Cordon ``gpu`` as long as this process runs; None: end that. The cordon of an operator is another one."""
        with self._lock:
            self._tested.pop(gpu.uuid, None)
            if reason is not None:
                self._tested[gpu.uuid] = reason
            self._publish()

    def unhealthy_reason(self, device: Device) -> str | None:
        """Why ``device`` is not healthy, or None. A cordoned device is healthy."""
        return self._reason(device, ())

    def reason_for_holders(self, device: Device) -> str | None:
        """Why pods that use ``device`` are affected, or None.

        A failing GPU only refuses to be changed; one claim of a shared device that can't be released affects no other.
        """
        return self._reason(device, (FAILING,) if device.shared is None else (FAILING, ConditionType.STUCK))

    def _reason(self, device: Device, ignored: Collection[str]) -> str | None:
        fault = self._inventory.fault(device.gpu)
        reasons = [f"its GPU can't be used at present: {fault}"] if fault else []
        # Without the lock: its holder may be waiting for the disk.
        conditions = [known for known in self._current.get(device.gpu.uuid, ()) if known.value not in ignored]
        reasons += [str(condition) for condition in conditions if not condition.cordon and condition.affects(device)]
        return "; ".join(reasons) or None

    def faults_by_kind(self) -> Mapping[str, int]:
        """The number of faults of each kind (xid, ..., failing, lost, stuck) and of cordoned GPUs."""
        with self._lock:
            kinds = [fault.kind.value for fault in self._record.faults]
            kinds += [FAILING] * len({refused.gpu for refused in self._record.failing})
            kinds += [kind.value for _, kind in self._device_conditions]
            return Counter({**Counter(kinds), "cordoned": len(self._record.cordoned)})

    def describe_faults(self) -> tuple[str, ...]:
        """One line for each fault that an operator can clear: its name as in ``ClearedFaults``, and a description."""
        with self._lock:
            conditions = [(fault.gpu, condition_of(fault)) for fault in self._record.faults]
            conditions += [(refused.gpu, failing_condition(refused)) for refused in self._record.failing]
            return tuple(f"{ClearedFaults(gpu, condition.stamp)} {condition}" for gpu, condition in conditions)

    def _now(self) -> int:
        return int(self._clock())

    def _recovery_actions(self, gpus: Iterable[Gpu]) -> dict[str, int]:
        """The recovery action of each GPU, by UUID, without the GPUs for which NVML does not report one."""
        actions = {}
        for gpu in gpus:
            try:
                action = self._host.recovery_action(gpu)
            except RecoverableError as error:
                log.warning("can't read the recovery action of a GPU", extra={"gpu": gpu.uuid, "error": str(error)})
                continue
            if action is not None:
                actions[gpu.uuid] = action
        return actions

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
            self._changes.report(NodeChange.HEALTH)

    def _refresh(self) -> bool:
        """Update the inventory; returns whether anything changed."""
        before = self._current
        cordoned = {**self._tested, **self._record.cordoned}
        self._current = conditions_by_gpu(
            msgspec.structs.replace(self._record, cordoned=cordoned),
            self._device_conditions,
            self._offered_for_trial,
            self._inventory,
            self._unable,
        )
        uuids = before.keys() | self._current.keys()
        changed = [self._inventory.set_conditions(uuid, self._current.get(uuid, ())) for uuid in uuids]
        return any(changed)

    def _report(self) -> None:
        """Send an Event for each new fault of a GPU, and for each GPU that has recovered."""
        now = {uuid: _reasons(of_gpu) for uuid, of_gpu in self._current.items()}
        for gpu in self._inventory.gpus:
            absent = self._inventory.fault(gpu)
            if absent is not None:
                now.setdefault(gpu.uuid, {})[f"can't be used at present: {absent}"] = ABSENT
        for uuid in sorted(now.keys() | self._reported.keys()):
            reasons, before = now.get(uuid, {}), self._reported.get(uuid, {})
            for reason in reasons.keys() - before.keys():
                message = f"{self._named(uuid)}: {reason}; it is not offered to new pods"
                self._events.node(GPU_UNHEALTHY, message, True, f"{uuid} {reasons[reason]}")
            if before and not reasons:
                self._events.node(GPU_HEALTHY, f"{self._named(uuid)} is healthy again", False, uuid)
        self._reported = now

    def _named(self, uuid: str) -> str:
        gpu = self._inventory.gpu(uuid)
        return f"GPU {uuid}" if gpu is None else f"gpu-{self._inventory.number(gpu)} ({uuid})"


def _reasons(conditions: Iterable[DeviceCondition]) -> dict[str, str]:
    """Descriptions of the conditions without cordons and what is wrong with the node as a whole,
    each with its cause, such as ``xid-48``."""
    return {
        f"{condition.device}: {condition}" if condition.device else str(condition): " ".join(
            filter(None, (condition.device, condition.value))
        )
        for condition in conditions
        if not condition.cordon and condition.value != UNABLE
    }
