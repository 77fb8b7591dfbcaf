"""What is wrong with each GPU and each device of the node, why, and since when.

Faults come from NVML's events, from what NVML says a GPU needs, and from those who prepare claims; an operator may keep
a GPU from new pods on top of it. The rules are in ``faults``; here they are applied under one lock, kept on disk, and
told: to the inventory (which publishes and excuses), to the operator, and to ``on_change``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from driver.errors import RecoverableError
from driver.model.device import Device
from driver.model.gpu import Gpu
from driver.model.health import Ailment, EventKind, GpuEvent, Trouble
from driver.model.plan import ClearedFaults, PlanSpec
from driver.model.xid import meaning_of
from kubelet_plugin import faults
from kubelet_plugin.faults import FaultKind, Record
from kubelet_plugin.health_file import HealthFile
from kubelet_plugin.inventory import Inventory

log = logging.getLogger(__name__)

UNHEALTHY, HEALTHY = "GpuUnhealthy", "GpuHealthy"
"""Reasons of what is told about the node."""


class Health:
    """Thread-safe. ``on_change`` is called after something changed that anybody sees.

    ``recovery_action`` asks NVML what a GPU needs (``Host.recovery_action``); ``boot_id`` reads the node's, None where
    it can't; ``slices_of`` says on which memory slices of a GPU a GPU instance of ours lies, None where nobody knows;
    ``tell`` takes (reason, message, whether it is a warning) about the node. It and ``on_change`` are called under the
    lock and must return quickly.
    """

    def __init__(
        self,
        inventory: Inventory,
        state_dir: Path,
        recovery_action: Callable[[Gpu], int | None],
        boot_id: Callable[[], str | None],
        slices_of: Callable[[str, int], int | None],
        on_change: Callable[[], None],
        tell: Callable[[str, str, bool], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Reads what was kept, and calls nothing but the inventory; ``look`` before anything is published."""
        self._inventory = inventory
        self._file = HealthFile(state_dir)
        self._recovery_action = recovery_action
        self._boot_id = boot_id
        self._slices_of = slices_of
        self._on_change = on_change
        self._tell = tell
        self._clock = clock
        self._lock = threading.RLock()  # ``tell`` and the inventory are told in the order of what happened
        self._record = self._file.load()
        self._notes: dict[tuple[str, Trouble], tuple[str, int]] = {}
        self._driver_tells: set[str] = set()
        self._current: dict[str, tuple[Ailment, ...]] = {}
        self._refresh()
        self._said = {uuid: _why(each) for uuid, each in self._current.items()}  # what was told before the restart

    def heard(self, event: GpuEvent) -> None:
        """An event of NVML; one of a GPU that is not ours (``--exclude-gpus``) is none of our business."""
        if event.kind is EventKind.XID and event.xid is not None:
            extra = {"gpu": event.gpu_uuid, "xid": event.xid, "meaning": meaning_of(event.xid).text}
            log.warning("a GPU reported an XID", extra={**extra, "gpuInstance": event.gpu_instance_id})
        if event.gpu_uuid is None or self._inventory.gpu(event.gpu_uuid) is None:
            return
        slices = self._slices(event)
        with self._lock:
            tells = event.gpu_uuid in self._driver_tells
            self._change(faults.heard(self._record, event, slices, self._now(), driver_tells=tells))

    def look(self, answering: Sequence[Gpu]) -> None:
        """After each look at the hardware: these GPUs answered."""
        actions = self._ask(answering)
        boot_id = self._boot_id()
        with self._lock:
            self._driver_tells = set(actions)
            record = faults.looked(faults.booted(self._record, boot_id), {gpu.uuid for gpu in answering})
            for uuid, action in actions.items():
                record = faults.told(record, uuid, action, self._now())
            self._change(record)
            self._report()

    def obey(self, spec: PlanSpec) -> None:
        """What operators said of the node's GPUs (``tessera cordon``, ``uncordon``)."""
        cleared = {each.gpu: each.stamp for text in spec.cleared if (each := ClearedFaults.parse(text)) is not None}
        with self._lock:
            self._change(faults.obeyed(self._record, spec.cordons, cleared))

    def note(self, device_name: str, kind: Trouble, reason: str | None) -> None:
        """``device_name`` is in trouble because of ``reason``, or, with None, not any more. Forgotten at a restart."""
        with self._lock:
            _, stamp = self._notes.pop((device_name, kind), ("", 0))
            if reason is not None:
                if not stamp:
                    self._record, stamp = faults.stamped(self._record, self._now())
                self._notes[device_name, kind] = reason, stamp
            self._publish()

    def trouble(self, device: Device) -> str | None:
        """Why ``device`` is not healthy, or None. A cordon is no illness."""
        fault = self._inventory.fault(device.gpu)
        reasons = [f"its GPU can't be used at present: {fault}"] if fault else []
        # Without the lock: whoever has it may be waiting for the disk.
        ailments = self._current.get(device.gpu.uuid, ())
        reasons += [str(each) for each in ailments if not each.cordon and each.concerns(device)]
        return "; ".join(reasons) or None

    def faults_by_kind(self) -> Mapping[str, int]:
        """How many faults there are of each kind: xid, unavailable, recovery, lost, stuck; and GPUs cordoned."""
        with self._lock:
            kinds = [fault.kind.value for fault in self._record.faults]
            kinds += [kind.value for _, kind in self._notes]
            return Counter({**Counter(kinds), "cordoned": len(self._record.cordoned)})

    def described(self) -> tuple[str, ...]:
        """A line for each fault that an operator can clear, as ``ClearedFaults`` names them, and what it is."""
        with self._lock:
            return tuple(f"{ClearedFaults(each.gpu, each.stamp)} {each.ailment()}" for each in self._record.faults)

    def _now(self) -> int:
        return int(self._clock())

    def _slices(self, event: GpuEvent) -> int | None:
        """Where the partition lies that ``event`` is about; None, the whole GPU, also where nobody knows it."""
        if event.gpu_uuid is None or event.gpu_instance_id is None:
            return None
        return self._slices_of(event.gpu_uuid, event.gpu_instance_id)

    def _ask(self, gpus: Iterable[Gpu]) -> dict[str, int]:
        """What NVML says each needs, by UUID; those of which it can't tell are left out."""
        found = {}
        for gpu in gpus:
            try:
                action = self._recovery_action(gpu)
            except RecoverableError as error:
                log.warning("can't ask what a GPU needs", extra={"gpu": gpu.uuid, "error": str(error)})
                continue
            if action is not None:
                found[gpu.uuid] = action
        return found

    def _change(self, record: Record) -> None:
        """The caller holds the lock, or is the only one there is."""
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
        """Let the inventory know; says whether anything is new."""
        before, self._current = self._current, self._ailments()
        uuids = before.keys() | self._current.keys()
        news = [self._inventory.note_ailments(uuid, self._current.get(uuid, ())) for uuid in uuids]
        return any(news)

    def _ailments(self) -> dict[str, tuple[Ailment, ...]]:
        """What is wrong, by GPU: faults as they were found, then what is noted of devices, then the cordon.

        What NVML says a GPU needs comes after its other faults: it follows from them, even where it is seen first.
        """
        found: dict[str, list[Ailment]] = {}
        for fault in sorted(self._record.faults, key=lambda each: each.kind is FaultKind.RECOVERY):
            found.setdefault(fault.gpu, []).append(fault.ailment())
        for (name, kind), (reason, stamp) in sorted(self._notes.items()):
            device = self._inventory.device(name)
            if device is not None:
                found.setdefault(device.gpu.uuid, []).append(Ailment(kind.value, reason, device=name, stamp=stamp))
        for uuid, reason in self._record.cordoned.items():
            found.setdefault(uuid, []).append(Ailment("cordoned", reason, cordon=True))
        return {uuid: tuple(each) for uuid, each in found.items()}

    def _report(self) -> None:
        """Tell of each GPU what is newly wrong with it, and that it is well again."""
        now = {uuid: _why(each) for uuid, each in self._current.items()}
        for gpu in self._inventory.gpus:
            absent = self._inventory.fault(gpu)
            if absent is not None:
                now[gpu.uuid] = (*now.get(gpu.uuid, ()), f"can't be used at present: {absent}")
        for uuid in sorted(now.keys() | self._said.keys()):
            new = [reason for reason in now.get(uuid, ()) if reason not in self._said.get(uuid, ())]
            if new:
                self._tell(UNHEALTHY, f"{self._named(uuid)}: {'; '.join(new)}; new pods are kept off", True)
            elif self._said.get(uuid) and not now.get(uuid):
                self._tell(HEALTHY, f"{self._named(uuid)} is well again", False)
        self._said = now

    def _named(self, uuid: str) -> str:
        gpu = self._inventory.gpu(uuid)
        return f"GPU {uuid}" if gpu is None else f"gpu-{self._inventory.number(gpu)} ({uuid})"


def _why(ailments: Iterable[Ailment]) -> tuple[str, ...]:
    """What is wrong, for people; without what an operator wished."""
    return tuple(f"{each.device}: {each}" if each.device else str(each) for each in ailments if not each.cordon)
