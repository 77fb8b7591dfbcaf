"""The GPU that an acceptance test changes, and what its steps make of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from driver.errors import HardwareError
from driver.hardware.gpu_properties import MIB
from driver.model.device import Device
from driver.model.gpu import Gpu, Partition
from driver.model.usage import UsageTarget
from kubelet_plugin.checkpoint.gpu_and_claim_locks import claim_key
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.claims.rehearsals import Rehearsals
from kubelet_plugin.inventory.inventory import ClaimReference


class StepSkipped(Exception):
    """Why a step does not apply."""


@dataclass
class TestedGpu:
    """One GPU in a test. ``is_ended``: nobody waits for the result any more.

    ``other_memory`` receives the measured memory of partitions that differs from their profile's: in MiB.
    """

    gpu: Gpu
    rehearsals: Rehearsals
    is_ended: Callable[[], bool]
    other_memory: list[tuple[Device, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.host, self.inventory = self.rehearsals.partitions.host, self.rehearsals.stores.inventory
        self.usage = self.host.usage_reader()
        self.reference = ClaimReference("", f"the acceptance test of {self.name}", f"acceptance-{self.gpu.uuid}")

    @property
    def name(self) -> str:
        return f"gpu-{self.inventory.number(self.gpu)}"

    @property
    def has_leftovers(self) -> bool:
        """Whether something of the test could not be removed. The test must end then: ClaimReconciler removes it, and
        needs the GPU's lock."""
        return self.rehearsals.stores.checkpoint.get(self.reference.uid) is not None

    @property
    def partitions(self) -> Sequence[Device]:
        """The partitions that the GPU can have, whatever its MIG mode."""
        return [device for device in self.inventory.devices_on(self.gpu) if device.profile is not None]

    def other_memory_of(self, profile_id: int) -> dict[int, int]:
        """``other_memory`` of one profile, by start."""
        return {
            device.placement.start: mib
            for device, mib in self.other_memory
            if device.placement and device.profile and device.profile.id == profile_id
        }

    @contextmanager
    def recorded(self, device: Device, **fields: Any) -> Iterator[ClaimRecord]:
        """Record ``device`` for the block, as ``Rehearsals.recorded`` does, with the lock of the record."""
        with (
            self.rehearsals.stores.locks.hold([claim_key(self.reference.uid)], self.reference.name),
            self.rehearsals.recorded(self.reference, device, **fields) as record,
        ):
            yield record

    def cut_and_measure(self, device: Device) -> tuple[float, float]:
        """Cut ``device``, check it, and remove it again. Return the seconds of both changes."""
        started = time.perf_counter()
        with self.recorded(device) as record:
            partition = self.rehearsals.partitions.make(device, record.devices[0])
            cut = time.perf_counter() - started
            self._check(device, partition)
            started = time.perf_counter()
        return cut, time.perf_counter() - started

    def _check(self, device: Device, partition: Partition | None) -> None:
        if partition is None or not partition.complete or device.profile is None or device.placement is None:
            raise HardwareError(f"{device.name}: NVML created no complete partition")
        self.rehearsals.partitions.nodes(self.gpu, partition)
        target = UsageTarget(self.gpu.uuid, partition.gpu_instance_id, partition.uuid)
        try:
            total = self.usage.read(target).memory_total
        finally:
            self.usage.keep(())
        if total is not None and total // MIB != device.profile.memory_bytes // MIB:
            self.other_memory.append((device, total // MIB))
