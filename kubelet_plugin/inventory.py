"""The node's GPUs and devices, and who holds them, in memory.

The checkpoint is the durable truth; this is its index. No method does I/O, so the one lock in here is
held for microseconds; it is not the lock that keeps two claims apart on a GPU (see ``locks``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from driver.model.device import Device, devices_of
from driver.model.gpu import Gpu
from driver.model.occupancy import Occupancy
from driver.slices.build import PublishedGpu


@dataclass(frozen=True, slots=True)
class Holder:
    """A claim that holds devices, prepared or being prepared."""

    uid: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"claim {self.namespace}/{self.name} ({self.uid})"


class Inventory:
    """Thread-safe. ``numbers`` gives each GPU's number in device names, by UUID."""

    def __init__(self, gpus: Iterable[Gpu], numbers: Mapping[str, int]) -> None:
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._numbers = dict(numbers)
        self._by_gpu = {uuid: devices_of(gpu, self._numbers[uuid]) for uuid, gpu in self._gpus.items()}
        self._devices = {device.name: device for devices in self._by_gpu.values() for device in devices}
        self._held: dict[str, tuple[Holder, tuple[Device, ...]]] = {}
        self._foreign: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def gpus(self) -> Sequence[Gpu]:
        return tuple(self._gpus.values())

    def device(self, name: str) -> Device | None:
        """The device of this name, offered at present or not."""
        return self._devices.get(name)

    def number(self, gpu: Gpu) -> int:
        return self._numbers[gpu.uuid]

    def hold(self, holder: Holder, devices: Iterable[Device]) -> None:
        """``holder`` has ``devices`` from now on, and nothing else; repeatable."""
        with self._lock:
            self._held[holder.uid] = (holder, tuple(devices))

    def release(self, uid: str) -> None:
        """The claim holds nothing any more; one that holds nothing is no error."""
        with self._lock:
            self._held.pop(uid, None)

    def note_foreign(self, gpu: Gpu, mask: int) -> None:
        """Memory slices of ``gpu`` that are taken by partitions Tessera did not make."""
        with self._lock:
            self._foreign[gpu.uuid] = mask

    def conflict(self, uid: str, device: Device) -> tuple[Holder, Device] | None:
        """Another claim that holds memory slices of ``device``, and the device by which it does."""
        with self._lock:
            for holder, devices in self._held.values():
                for held in devices:
                    if holder.uid != uid and held.gpu.uuid == device.gpu.uuid and held.mask & device.mask:
                        return holder, held
        return None

    def published(self) -> list[PublishedGpu]:
        """What the slices should say: everything held, and everything that still fits beside it."""
        with self._lock:
            held = [device for _, devices in self._held.values() for device in devices]
            foreign = dict(self._foreign)
        return [self._publish(gpu, held, foreign.get(gpu.uuid, 0)) for gpu in self._gpus.values()]

    def _publish(self, gpu: Gpu, all_held: Sequence[Device], foreign: int) -> PublishedGpu:
        number = self._numbers[gpu.uuid]
        held = tuple(device for device in all_held if device.gpu.uuid == gpu.uuid)
        taken = Occupancy.of(held, foreign)
        offers = tuple(device for device in self._by_gpu[gpu.uuid] if taken.admits(device))
        return PublishedGpu(gpu, number, held, offers, foreign)
