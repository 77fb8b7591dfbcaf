"""Periodic scans of the hardware, so that changes made outside Tessera are published within seconds.

A timer and NVML events start a scan. A separate thread receives the events, so that a GPU that hangs during a scan
delays no event. A scan only reads, except that it requests MIG mode on the GPUs that settings name
for MIG.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from driver.errors import RecoverableError
from driver.hardware.host import GpuFault, Host
from driver.kube.work_loop import GiveWay, at_once
from driver.model.gpu import Gpu, MigMode, Partition, Placement
from driver.model.gpu_events_and_conditions import EventKind, GpuEvent
from driver.model.offer import OF_SEVERAL
from driver.model.xid import meaning_of
from kubelet_plugin.changes import ChangeNotifier, NodeChange, NodeEventSink
from kubelet_plugin.inventory.inventory import Inventory
from kubelet_plugin.inventory.published_devices import ForeignPartitions
from kubelet_plugin.settings import NodeSettings

log = logging.getLogger(__name__)

SCAN_INTERVAL_SECONDS = 5.0
"""Maximum time between two scans: slices show a change within 10 s."""

MIN_SCAN_INTERVAL_SECONDS = 1.0
"""Minimum time between two scans: creating partitions causes events, too."""

EVENT_TIMEOUT_SECONDS = 5.0
"""Longest wait in NVML. Afterwards GPUs that were added meanwhile are included, and ``stop`` is checked."""

RESET_PENDING = {
    mode: f"waits for a reset: MIG mode {mode}" for mode in (MigMode.RESET_TO_ENABLE, MigMode.RESET_TO_DISABLE)
}
"""What is wrong with a GPU in such a mode."""


class ScanFollower(Protocol):
    """A part that acts on every scan."""

    def handle_scan(self, answering: Sequence[Gpu]) -> None:
        """A scan has ended; the GPUs ``answering`` responded."""


class Scanner:
    """``excluded_count`` is the number of GPUs that settings exclude, by the last scan.

    ``held_profiles``: of GPUs of which claims have partitions at the start, the names of their profiles by id.
    """

    def __init__(
        self,
        host: Host,
        settings: NodeSettings,
        events: NodeEventSink,
        held_profiles: Mapping[str, Mapping[int, str]] | None = None,
    ) -> None:
        self.host, self._settings, self._events = host, settings, events
        self._held_profiles = held_profiles or {}
        self._reported: dict[str, str] = {}
        self._gone: dict[str, set[Placement]] = {}
        self.due = threading.Event()
        """Set if a scan is due before the timer's."""

        self.excluded_count = 0

    def discover(self, inventory: Inventory | None = None) -> tuple[list[Gpu], dict[int, str]]:
        """The GPUs that are ours, and by index why others did not respond. Raises HardwareError.

        MIG mode is requested only on GPUs that ``inventory`` knows not to be reserved for another driver.
        """
        discovery, settings = self.host.discover(), self._settings
        names = settings.compute_instances
        ours = [
            names.applied_to(gpu, self._held_profiles.get(gpu.uuid, {}))
            for gpu in discovery.gpus
            if settings.manages(gpu)
        ]
        self.excluded_count = sum(gpu in settings.exclude_gpus for gpu in discovery.gpus)
        self._report(discovery.faults, ours, inventory)
        return ours, {fault.index: fault.reason for fault in discovery.faults}

    def scan(self, inventory: Inventory, followers: Iterable[ScanFollower] = ()) -> bool:
        """Update ``inventory``; returns whether anything changed."""
        try:
            gpus, reasons = self.discover(inventory)
        except RecoverableError as error:
            gpus, reasons = [], {gpu.index: str(error) for gpu in inventory.gpus}
        by_index = {gpu.index: gpu.uuid for gpu in inventory.gpus}
        faults = {by_index[index]: reason for index, reason in reasons.items() if index in by_index}
        changed = inventory.update(gpus, faults)
        changed = self.scan_partitions(inventory, gpus) or changed
        for follower in followers:
            follower.handle_scan(gpus)
        return changed

    def scan_soon(self) -> None:
        """Scan without waiting for the timer, such as after an NVML event. Cheap; may be called from any thread."""
        self.due.set()

    def scan_partitions(self, inventory: Inventory, gpus: Iterable[Gpu]) -> bool:
        """Update the foreign partitions of ``gpus`` in ``inventory``; returns whether anything changed."""
        changed = [self._scan_partitions_of(inventory, gpu) for gpu in gpus]
        return any(changed)

    def _scan_partitions_of(self, inventory: Inventory, gpu: Gpu) -> bool:
        before = inventory.held_on(gpu)
        try:
            existing = self.host.partitions(gpu)
        except RecoverableError as error:
            log.error("can't list the partitions of a GPU", extra={"gpu": gpu.uuid, "error": str(error)})
            return False
        # Held before or after the list was read: claims may be prepared and released meanwhile.
        held = (*before, *inventory.held_on(gpu))
        ours = {device.placement for device in held if not inventory.is_preexisting(device)}
        foreign = self._foreign(
            inventory, gpu, [partition for partition in existing if partition.placement not in ours]
        )
        changed = inventory.set_foreign(gpu, foreign)
        held_before = {device.placement for device in before if device.placement is not None}
        gone = held_before - {partition.placement for partition in existing}
        # A partition that is missing once may belong to a claim that is being prepared or has just ended.
        lasting = gone & self._gone.get(gpu.uuid, set())
        self._gone[gpu.uuid] = gone
        if gone - lasting:
            self.scan_soon()
        if changed and foreign.mask:
            slices = [index for index in range(gpu.memory_slices) if foreign.mask >> index & 1]
            extra = {"gpu": gpu.uuid, "slices": ",".join(map(str, slices)), "offered": ",".join(foreign.offered)}
            log.warning("found partitions that Tessera did not create; they are not changed", extra=extra)
        return changed or bool(lasting)

    def _foreign(self, inventory: Inventory, gpu: Gpu, partitions: Sequence[Partition]) -> ForeignPartitions:
        mask = 0
        for partition in partitions:
            mask |= partition.placement.mask
        usable = partitions if self._settings.publish_existing else ()
        places = {(partition.profile_id, partition.placement) for partition in usable if partition.complete}
        devices = inventory.devices_on(gpu)
        exclusive = (d for d in devices if d.profile is not None and d.kind not in OF_SEVERAL)
        offered = (d.name for d in exclusive if d.profile is not None and (d.profile.id, d.placement) in places)
        return ForeignPartitions(mask, frozenset(offered))

    def _report(self, faults: Iterable[GpuFault], ours: Iterable[Gpu], inventory: Inventory | None) -> None:
        """Log each fault of a GPU once while it lasts."""
        current = {str(fault): fault.reason for fault in faults}
        by_uuid = {gpu.uuid: gpu for gpu in ours}
        mig_faults = {uuid: self._mig_fault(gpu, inventory) for uuid, gpu in by_uuid.items()}
        current |= {uuid: reason for uuid, reason in mig_faults.items() if reason is not None}
        for gone in self._reported.keys() - current.keys():
            log.info("GPU has recovered", extra={"gpu": gone})
        for where, reason in current.items():
            if self._reported.get(where) != reason:
                log.error("GPU can't be used as configured", extra={"gpu": where, "why": reason})
                if reason in RESET_PENDING.values():
                    gpu = by_uuid[where]
                    message = (
                        f"GPU {gpu.index} ({gpu.uuid}) changes its MIG mode with the next reset, and offers until then "
                        f"what it did before. With nothing running on it, DCGM and nvidia-persistenced stopped: "
                        f"nvidia-smi --gpu-reset -i {gpu.index}; or reboot the node where a reset is not supported"
                    )
                    self._events.node("GpuNeedsReset", message, about=gpu.uuid)
                    self.scan_soon()  # so that the slices show it, too
        self._reported = current

    def _mig_fault(self, gpu: Gpu, inventory: Inventory | None) -> str | None:
        """Why the MIG mode of ``gpu`` is not as configured, or None; requests MIG mode if settings name the GPU."""
        if gpu.mig_mode in RESET_PENDING:
            return RESET_PENDING[gpu.mig_mode]
        if gpu.toggles_freely or gpu.mig_mode is not MigMode.DISABLED or gpu not in self._settings.mig_gpus:
            return None
        if inventory is None or inventory.is_reserved(gpu):
            return None
        try:
            in_force = self.host.request_mig_mode(gpu)
        except RecoverableError as error:
            return f"is meant for MIG, but refuses the mode: {error}"
        return None if in_force else RESET_PENDING[MigMode.RESET_TO_ENABLE]


class ScanLoop:
    """Scans periodically, and soon after ``Scanner.scan_soon``; every scan is passed to ``followers``."""

    def __init__(
        self,
        scanner: Scanner,
        inventory: Inventory,
        followers: Sequence[ScanFollower],
        changes: ChangeNotifier,
        give_way: GiveWay = at_once,
    ) -> None:
        self._scanner, self._inventory, self._followers = scanner, inventory, followers
        self._changes, self._give_way = changes, give_way

    def run(self, stop: threading.Event) -> None:
        """Scan until ``stop`` is set (then call ``Scanner.scan_soon``); failures are logged and retried."""
        while not stop.is_set():
            began = time.monotonic()
            self._scanner.due.wait(SCAN_INTERVAL_SECONDS)
            stop.wait(max(0.0, MIN_SCAN_INTERVAL_SECONDS - (time.monotonic() - began)))
            self._give_way(stop)
            self._scanner.due.clear()
            try:
                if not stop.is_set() and self._scanner.scan(self._inventory, self._followers):
                    self._changes.report(NodeChange.HARDWARE)
            except Exception:
                # A defect must not end the thread: changes of the hardware would go unnoticed.
                log.exception("internal error during a hardware scan")


class NvmlEventListener:
    """Passes every NVML event to each of ``handlers``, which must return quickly, in a thread of its own."""

    def __init__(self, host: Host, *handlers: Callable[[GpuEvent], None]) -> None:
        self._host, self._handlers = host, handlers

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
        if event.kind is EventKind.XID and event.xid is not None:  # also of a GPU that settings exclude
            extra = {"gpu": event.gpu_uuid, "xid": event.xid, "meaning": meaning_of(event.xid).text}
            log.warning("GPU reported an XID", extra={**extra, "gpuInstance": event.gpu_instance_id})
        for handle in self._handlers:
            try:
                handle(event)
            except Exception:
                # A defect in one handler must not keep the event from the others, nor end the thread.
                extra = {"gpu": event.gpu_uuid, "kind": event.kind.value}
                log.exception("internal error while handling an NVML event", extra=extra)
