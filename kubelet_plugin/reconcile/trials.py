"""Trials of failing GPUs: whether the hardware makes the change again that it has refused.

Nothing is offered of a failing GPU, so nobody else would find out. Where nothing holds the GPU, the plugin cuts the
smallest partition and removes it again, or switches the MIG mode; otherwise it offers one smallest partition, and the
claim that gets it is the trial.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import reduce
from operator import or_

from driver.errors import RecoverableError
from driver.kube.work_loop import Loop
from kubelet_plugin.changes import GpuChange
from kubelet_plugin.checkpoint.gpu_and_claim_locks import claim_key
from kubelet_plugin.claims.rehearsals import Rehearsals
from kubelet_plugin.health.device_health import HealthMonitor
from kubelet_plugin.health.recorded_faults import RefusedChanges
from kubelet_plugin.inventory.inventory import ClaimReference

log = logging.getLogger(__name__)

COALESCE_SECONDS = 0.2

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 30.0, 600.0
"""From the refusal that made a GPU failing to its first trial; the pause doubles after each, up to the longest."""


class Trials:
    """One thread."""

    def __init__(
        self,
        rehearsals: Rehearsals,
        health: HealthMonitor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rehearsals, self._health, self._clock = rehearsals, health, clock
        self._due: dict[str, tuple[float, float]] = {}
        self._loop = Loop("trying failing GPUs", self.try_due, COALESCE_SECONDS)
        self.notify = self._loop.notify

    def run(self, stop: threading.Event) -> None:
        """Try failing GPUs until ``stop`` is set (then ``notify`` once more)."""
        self.notify()
        self._loop.run(stop)

    def try_due(self) -> float | None:
        """Try the GPUs whose pause has ended. Return the number of seconds until the next trial; None: no GPU fails."""
        failing = {refused.gpu: refused for refused in self._health.failing()}
        self._due = {uuid: due for uuid, due in self._due.items() if uuid in failing}
        for uuid, refused in failing.items():
            due, pause = self._due.setdefault(uuid, (self._clock() + FIRST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS))
            if self._clock() >= due:
                try:
                    self._try(refused)
                except RecoverableError as error:
                    log.warning("a failing GPU still fails", extra={"gpu": uuid, "error": str(error)})
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                self._due[uuid] = self._clock() + pause, pause
        return min((due - self._clock() for due, _ in self._due.values()), default=None)

    def _try(self, refused: RefusedChanges) -> None:
        stores, partitions = self._rehearsals.stores, self._rehearsals.partitions
        inventory = stores.inventory
        gpu = inventory.gpu(refused.gpu)
        if gpu is None or inventory.fault(gpu) is not None or inventory.is_reserved(gpu):
            return
        trial = ClaimReference("", f"the trial of gpu-{inventory.number(gpu)}", f"trial-{gpu.uuid}")
        with stores.locks.hold([claim_key(trial.uid)], trial.name), stores.locks.hold([gpu.uuid], trial.name):
            masks = [device.mask for device in inventory.held_on(gpu)]
            masks += [partition.placement.mask for partition in partitions.host.partitions(gpu)]
            taken = reduce(or_, masks, 0)
            cuttable = [device for device in inventory.devices_on(gpu) if device.profile is not None]
            smallest = next((device for device in cuttable if not device.mask & taken), None)
            if not cuttable:
                self._health.offer_for_trial(gpu, gpu.all_slices)
            elif taken:
                if smallest is not None:
                    self._health.offer_for_trial(gpu, smallest.mask)
            elif refused.change is GpuChange.SWITCH:
                partitions.switch_mig_mode(gpu)
            elif smallest is not None:
                with self._health.trying(gpu):
                    self._rehearsals.cut_and_remove(trial, smallest)
                self._health.change_succeeded(gpu, GpuChange.CUT)
