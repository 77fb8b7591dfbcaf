"""What makes a device unfit for new pods: the one place where that is decided.

    cause                                            condition of            ends when
    fatal XID (``driver.model.xid``)                 partition or GPU        an operator clears it, the node reboots
    NVML reports the GPU unavailable                 GPU                     the GPU responds again
    NVML reports a recovery action                   GPU                     NVML reports none any more
    the hardware refused three changes in a row      GPU                     such a change succeeds (``Trials``)
    no pod with a GPU can start (``NodeChecks``)     every GPU               a pod can start
    partition lost, release stuck (``reconcile``)    devices of the claim    the claim is repaired or released
    an MPS daemon or server ended (``reconcile``)    shared device           another one has the limits of all claims
    ``tessera cordon``                               GPU                     ``tessera uncordon``

A device with a condition is published with a taint (``driver.slices.build``), and the controller does not offer it
(``FleetGpu`` in ``controller.cluster.fleet``). In addition no device is offered of a GPU that does not respond or that
another driver owns (``Inventory``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from driver.model.gpu_events_and_conditions import RECOVERY_ACTIONS, ConditionType, DeviceCondition, EventKind, GpuEvent
from driver.model.xid import is_fatal, meaning_of
from kubelet_plugin.changes import GpuChange
from kubelet_plugin.health.recorded_faults import FaultSource, HardwareFault, HealthRecord, RefusedChanges
from kubelet_plugin.inventory.inventory import Inventory

FAILING = "failing"
"""Taint value of a failing GPU, and its kind in metrics."""

UNABLE = "unable"
"""Taint value of all GPUs of a node that can start no pod with a GPU."""

ReportedConditions = Mapping[tuple[str, ConditionType], tuple[str, int]]
"""Conditions that other parts have reported: (device name, type) -> (reason, stamp)."""


def fault_of_event(event: GpuEvent, slices: int | None, now: int, *, recovery_supported: bool) -> HardwareFault | None:
    """The fault that an NVML event means, or None; ``slices`` are those of the partition it concerns."""
    if event.gpu_uuid is None:
        return None
    if event.kind is EventKind.UNAVAILABLE:
        return HardwareFault(event.gpu_uuid, FaultSource.UNAVAILABLE, now)
    if event.xid is None or not is_fatal(event.xid, recovery_supported=recovery_supported):
        return None
    return HardwareFault(event.gpu_uuid, FaultSource.XID, now, event.xid, slices)


def condition_of(fault: HardwareFault) -> DeviceCondition:
    if fault.kind is FaultSource.XID:
        value, reason = f"xid-{fault.number}", f"XID {fault.number}, {meaning_of(fault.number).text}"
    elif fault.kind is FaultSource.UNAVAILABLE:
        value, reason = "unavailable", "NVML reported it unavailable"
    else:
        value, need = RECOVERY_ACTIONS.get(fault.number, ("needs-action", f"recovery action {fault.number}"))
        reason = f"NVML says it needs {need}"
    return DeviceCondition(value, reason, slices=fault.slices, stamp=fault.stamp)


def failing_condition(refused: RefusedChanges, slices: int | None = None) -> DeviceCondition:
    """The condition of a failing GPU, on ``slices`` of its memory (bit mask; None: all of it)."""
    what = "partitions" if refused.change is GpuChange.CUT else "switches of its MIG mode"
    reason = f"its hardware refused {refused.count} {what} in a row, the last one: {refused.error}"
    return DeviceCondition(FAILING, reason, slices=slices, stamp=refused.stamp)


def conditions_by_gpu(
    record: HealthRecord,
    reported: ReportedConditions,
    offered_for_trial: Mapping[str, int],
    inventory: Inventory,
    unable: str | None = None,
) -> dict[str, tuple[DeviceCondition, ...]]:
    """All conditions: faults in the order of detection, then conditions of devices, then ``unable``, then the cordon.

    Recovery actions come after other faults: they follow from them, even if they are seen first. A failing GPU is
    unhealthy but for the memory slices (bit mask by GPU) that are ``offered_for_trial``.
    """
    conditions: dict[str, list[DeviceCondition]] = defaultdict(list)
    for fault in sorted(record.faults, key=lambda fault: fault.kind is FaultSource.RECOVERY):
        conditions[fault.gpu].append(condition_of(fault))
    for refused in record.failing:
        gpu, offered = inventory.gpu(refused.gpu), offered_for_trial.get(refused.gpu, 0)
        slices = gpu.all_slices & ~offered if gpu is not None and offered else None
        conditions[refused.gpu].append(failing_condition(refused, slices))
    for (name, kind), (reason, stamp) in sorted(reported.items()):
        device = inventory.device(name)
        if device is not None:
            conditions[device.gpu.uuid].append(DeviceCondition(kind.value, reason, device=name, stamp=stamp))
    for gpu in inventory.gpus if unable is not None else ():
        conditions[gpu.uuid].append(DeviceCondition(UNABLE, unable or ""))
    for uuid, reason in record.cordoned.items():
        conditions[uuid].append(DeviceCondition("cordoned", reason, cordon=True))
    return {uuid: tuple(of_gpu) for uuid, of_gpu in conditions.items()}
