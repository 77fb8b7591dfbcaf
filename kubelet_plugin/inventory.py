"""The node's GPUs and devices, and who holds them, in memory.

The checkpoint is the durable truth; this is its index. No method does I/O, so the one lock in here is
held for microseconds; it is not the lock that keeps two claims apart on a GPU (see ``locks``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from driver.model.device import Device, DeviceKind, devices_of, number_gpus
from driver.model.gpu import Gpu, MigMode
from driver.model.occupancy import Occupancy
from driver.slices.build import PublishedGpu

NOT_FOUND = "NVML does not find it any more"


@dataclass(frozen=True, slots=True)
class Holder:
    """A claim that holds devices, prepared or being prepared."""

    uid: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"claim {self.namespace}/{self.name} ({self.uid})"


@dataclass(frozen=True, slots=True)
class Foreign:
    """Partitions on one GPU that Tessera did not make.

    ``mask`` is the memory slices they take, ``offered`` the names of those devices that are given out as they are.
    """

    mask: int = 0
    offered: frozenset[str] = frozenset()


class Inventory:
    """Thread-safe. ``numbers`` gives each GPU's number in device names, by UUID."""

    def __init__(self, gpus: Iterable[Gpu], numbers: Mapping[str, int]) -> None:
        self._lock = threading.Lock()
        self._gpus: dict[str, Gpu] = {}
        self._numbers = dict(numbers)
        self._by_gpu: dict[str, tuple[Device, ...]] = {}
        self._devices: dict[str, Device] = {}
        self._faults: dict[str, str] = {}
        self._held: dict[str, tuple[Holder, tuple[Device, ...]]] = {}
        self._foreign: dict[str, Foreign] = {}
        self.update(gpus, {})

    @property
    def gpus(self) -> Sequence[Gpu]:
        return tuple(self._gpus.values())

    def gpu(self, uuid: str) -> Gpu | None:
        """The GPU of this UUID, in trouble or not; None if this node never had it since the start."""
        return self._gpus.get(uuid)

    def update(self, gpus: Iterable[Gpu], faults: Mapping[str, str]) -> bool:
        """Take over what the hardware is now; says whether anything changed.

        A GPU that was known and is not among ``gpus`` stays, with its reason from ``faults`` (by UUID): somebody
        may have been given one of its devices, and a device that disappears gives its memory away.
        """
        found = {gpu.uuid: gpu for gpu in gpus}
        with self._lock:
            missing = {uuid: faults.get(uuid, NOT_FOUND) for uuid in self._gpus if uuid not in found}
            changed = missing != self._faults or any(self._gpus.get(uuid) != gpu for uuid, gpu in found.items())
            if changed:
                self._faults = missing
                self._replace({**self._gpus, **found})
        return changed

    def note_mig_mode(self, gpu: Gpu, mode: MigMode) -> None:
        """A mode that we switched ourselves, so that it is published at once and not at the next look."""
        with self._lock:
            known = self._gpus[gpu.uuid]
            if known.mig_mode is not mode:
                self._replace({**self._gpus, gpu.uuid: replace(known, mig_mode=mode)})

    def _replace(self, gpus: dict[str, Gpu]) -> None:
        """The caller holds the lock."""
        self._numbers |= number_gpus(gpus.values(), self._numbers)
        self._by_gpu = {
            uuid: self._by_gpu[uuid] if self._gpus.get(uuid) is gpu else devices_of(gpu, self._numbers[uuid])
            for uuid, gpu in gpus.items()
        }
        self._gpus = gpus
        self._devices = {device.name: device for devices in self._by_gpu.values() for device in devices}
        self._held = {
            uid: (holder, tuple(self._renewed(device) for device in devices))
            for uid, (holder, devices) in self._held.items()
        }

    def _renewed(self, held: Device) -> Device:
        """A held device with its GPU's facts of now; what it takes and what it is called never changes."""
        known = self._devices.get(held.name)
        same = known is not None and known.gpu.uuid == held.gpu.uuid and known.mask == held.mask
        return known if same and known is not None else held

    def fault(self, gpu: Gpu) -> str | None:
        """Why the GPU can't be used at present, or None."""
        return self._faults.get(gpu.uuid)

    def device(self, name: str) -> Device | None:
        """The device of this name, offered at present or not."""
        return self._devices.get(name)

    def devices_on(self, gpu: Gpu) -> Sequence[Device]:
        """Every device the GPU could offer, offered at present or not."""
        return self._by_gpu[gpu.uuid]

    def held_on(self, gpu: Gpu) -> list[Device]:
        """The devices of the GPU that are held."""
        with self._lock:
            return [device for _, devices in self._held.values() for device in devices if device.gpu.uuid == gpu.uuid]

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

    def note_foreign(self, gpu: Gpu, foreign: Foreign) -> bool:
        """What stands on ``gpu`` that Tessera did not make; says whether that is news."""
        with self._lock:
            changed = self._foreign.get(gpu.uuid, Foreign()) != foreign
            self._foreign[gpu.uuid] = foreign
        return changed

    def existing(self, device: Device) -> bool:
        """Whether ``device`` is a partition that stood there before and is given out as it is."""
        with self._lock:
            return device.name in self._foreign.get(device.gpu.uuid, Foreign()).offered

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
            foreign, gpus, faults = dict(self._foreign), list(self._gpus.values()), dict(self._faults)
            return [self._publish(gpu, held, foreign.get(gpu.uuid, Foreign()), faults.get(gpu.uuid)) for gpu in gpus]

    def _publish(self, gpu: Gpu, all_held: Sequence[Device], foreign: Foreign, fault: str | None) -> PublishedGpu:
        held = tuple(device for device in all_held if device.gpu.uuid == gpu.uuid)
        taken, names = Occupancy.of(gpu, held, foreign.mask), {device.name for device in held}
        offers = tuple(
            device
            for device in self._by_gpu[gpu.uuid]
            if device.name not in names
            and _possible(device)
            and (taken.admits(device) or device.name in foreign.offered)
        )
        return PublishedGpu(gpu, self._numbers[gpu.uuid], held, offers, foreign.mask, fault)


def _possible(device: Device) -> bool:
    """Without a reset of the GPU: one that needs it offers what its MIG mode in force allows."""
    if device.gpu.toggles_freely:
        return True
    return (device.kind is DeviceKind.PARTITION) == device.gpu.mig_mode.in_force
