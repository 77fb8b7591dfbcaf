"""Looking at the hardware again and again: what changed outside our hands is published within seconds.

An event of NVML makes it look at once (``listening`` hears them, in a thread of its own: a GPU that hangs while it is
looked at silences no other), a timer in any case. It only reads the hardware, but for asking
for MIG mode on the GPUs that settings mean for MIG.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from driver.errors import RecoverableError
from driver.hardware.host import GpuFault, Host
from driver.kube.loop import GiveWay, at_once
from driver.model.device import Device
from driver.model.gpu import Gpu, MigMode, Partition, Placement
from driver.model.selection import EVERY_GPU, NO_GPU, Selection
from kubelet_plugin.inventory import Inventory
from kubelet_plugin.offering import Foreign

log = logging.getLogger(__name__)

RESCAN_S = 5.0
"""Longest time between two looks: a change shows in the slices within 10 s."""

PAUSE_S = 1.0
"""Shortest time between two looks: cutting partitions ourselves makes events, too."""

WAITS = "waits for a reset"


@dataclass(frozen=True, slots=True)
class Choice:
    """Which GPUs are ours, which are meant for MIG, and whether partitions of others are given out."""

    include: Selection = EVERY_GPU
    exclude: Selection = NO_GPU
    mig: Selection = NO_GPU
    publish_existing: bool = False


class Scanner:
    """``on_change`` is called after a look that found something new; it must return quickly.

    ``looked`` is called after every look, with the GPUs that answered. ``hands_off`` says which GPUs nothing may be
    done to; ``tell_reset`` hears of each that begins to wait for a reset. ``left_out`` is how many GPUs are there that
    settings exclude.
    """

    def __init__(
        self,
        host: Host,
        choice: Choice,
        give_way: GiveWay = at_once,
        hands_off: Callable[[Gpu], bool] = lambda _: False,
        tell_reset: Callable[[Gpu], None] = lambda _: None,
    ) -> None:
        self._host = host
        self._tell_reset = tell_reset
        self._hands_off = hands_off
        self._give_way = give_way
        self._choice = choice
        self._reported: dict[str, str] = {}
        self._gone: dict[str, set[Placement]] = {}
        self._news = threading.Event()
        self.left_out = 0
        self.looked: Callable[[Sequence[Gpu]], None] = lambda gpus: None

    def discover(self) -> tuple[list[Gpu], dict[int, str]]:
        """The GPUs that are ours, and why others did not answer, by index. Raises HardwareError."""
        discovery, choice = self._host.discover(), self._choice
        ours = [gpu for gpu in discovery.gpus if gpu in choice.include and gpu not in choice.exclude]
        self.left_out = sum(gpu in choice.exclude for gpu in discovery.gpus)
        self._report(discovery.faults, ours)
        return ours, {fault.index: fault.reason for fault in discovery.faults}

    def look(self, inventory: Inventory) -> bool:
        """Bring ``inventory`` up to date; says whether anything changed."""
        try:
            gpus, reasons = self.discover()
        except RecoverableError as error:
            gpus, reasons = [], {gpu.index: str(error) for gpu in inventory.gpus}
        by_index = {gpu.index: gpu.uuid for gpu in inventory.gpus}
        faults = {by_index[index]: reason for index, reason in reasons.items() if index in by_index}
        changed = inventory.update(gpus, faults)
        changed = self.look_at_partitions(inventory, gpus) or changed
        self.looked(gpus)
        return changed

    def look_soon(self) -> None:
        """Something happened: look without waiting for the timer. Cheap, from any thread."""
        self._news.set()

    def look_at_partitions(self, inventory: Inventory, gpus: Iterable[Gpu]) -> bool:
        """Tell ``inventory`` what stands on ``gpus`` that is not Tessera's; says whether any of it is news."""
        news = [self._note_partitions(inventory, gpu) for gpu in gpus]
        return any(news)

    def _note_partitions(self, inventory: Inventory, gpu: Gpu) -> bool:
        before = inventory.held_on(gpu)
        try:
            standing = self._host.partitions(gpu)
        except RecoverableError as error:
            log.error("can't list the partitions of a GPU", extra={"gpu": gpu.uuid, "error": str(error)})
            return False
        # Held before or after the list was made: a claim may come or go meanwhile.
        held = (*before, *inventory.held_on(gpu))
        ours = {device.placement for device in held if not inventory.existing(device)}
        foreign = self._foreign(inventory, gpu, [entry for entry in standing if entry.placement not in ours])
        news = inventory.note_foreign(gpu, foreign)
        gone = {d.placement for d in before if d.placement is not None} - {entry.placement for entry in standing}
        # Once may be a claim that is just being prepared or has just ended.
        lasting = gone & self._gone.get(gpu.uuid, set())
        self._gone[gpu.uuid] = gone
        if gone - lasting:
            self.look_soon()
        if news and foreign.mask:
            slices = [index for index in range(gpu.memory_slices) if foreign.mask >> index & 1]
            log.warning(
                "left alone partitions that Tessera did not make",
                extra={"gpu": gpu.uuid, "slices": ",".join(map(str, slices)), "offered": ",".join(foreign.offered)},
            )
        return news or bool(lasting)

    def run(self, inventory: Inventory, on_change: Callable[[], None], stop: threading.Event) -> None:
        """Look until ``stop`` is set (then call ``look_soon``); whatever fails is logged, and looked at again."""
        while not stop.is_set():
            began = time.monotonic()
            self._news.wait(RESCAN_S)
            stop.wait(max(0.0, PAUSE_S - (time.monotonic() - began)))
            self._give_way(stop)
            self._news.clear()
            try:
                if not stop.is_set() and self.look(inventory):
                    on_change()
            except Exception:
                # A defect of ours must not end the thread: what happens to the hardware would go unnoticed.
                log.exception("defect while looking at the hardware")

    def _foreign(self, inventory: Inventory, gpu: Gpu, partitions: Iterable[Partition]) -> Foreign:
        mask, offered = 0, set()
        for partition in partitions:
            mask |= partition.placement.mask
            device = _device_of(inventory, gpu, partition)
            if self._choice.publish_existing and partition.complete and device is not None:
                offered.add(device.name)
        return Foreign(mask, frozenset(offered))

    def _report(self, faults: Iterable[GpuFault], ours: Iterable[Gpu]) -> None:
        """Log what keeps GPUs from being used as they should, each once for as long as it lasts."""
        current = {str(fault): fault.reason for fault in faults}
        by_uuid = {gpu.uuid: gpu for gpu in ours}
        current |= {uuid: reason for uuid, gpu in by_uuid.items() if (reason := self._waits_for(gpu)) is not None}
        for gone in self._reported.keys() - current.keys():
            log.info("a GPU is well again", extra={"gpu": gone})
        for where, reason in current.items():
            if self._reported.get(where) != reason:
                log.error("a GPU can't be used as it should", extra={"gpu": where, "why": reason})
                if reason.startswith(WAITS):
                    self._tell_reset(by_uuid[where])
                    self.look_soon()  # for the slices to say so, too
        self._reported = current

    def _waits_for(self, gpu: Gpu) -> str | None:
        """What a GPU that needs a reset to switch waits for; one that is meant for MIG is asked to."""
        if gpu.mig_mode in (MigMode.RESET_TO_ENABLE, MigMode.RESET_TO_DISABLE):
            return f"{WAITS}: MIG mode {gpu.mig_mode}"
        if gpu.toggles_freely or gpu.mig_mode is not MigMode.DISABLED or gpu not in self._choice.mig:
            return None
        if self._hands_off(gpu):
            return None
        try:
            in_force = self._host.request_mig_mode(gpu, enabled=True)
        except RecoverableError as error:
            return f"is meant for MIG, but refuses the mode: {error}"
        return None if in_force else f"{WAITS}: MIG mode {MigMode.RESET_TO_ENABLE}"


def _device_of(inventory: Inventory, gpu: Gpu, partition: Partition) -> Device | None:
    """The device that ``partition`` is, by profile and placement."""
    wanted = (partition.profile_id, partition.placement)
    for device in inventory.devices_on(gpu):
        if device.profile is not None and (device.profile.id, device.placement) == wanted:
            return device
    return None
