"""The node's GPUs and devices and the claims that hold them, in memory.

The checkpoint is the durable source; this is its index. No method does I/O, so its lock is held for microseconds only.
It is not the lock that serializes claims on a GPU (see ``checkpoint.gpu_and_claim_locks``).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from driver.model.device import (
    Device,
    Monitor,
    devices_of,
    merged,
    number_gpus,
    share_device,
    share_indices,
    shared_device,
)
from driver.model.gpu import Gpu, MigMode
from driver.model.gpu_events_and_conditions import DeviceCondition
from driver.model.gpu_settings import UNSHARED, GpuSharing
from driver.model.offer import DeviceKind
from driver.model.reported_gpus import CORDONED_PREFIX, FaultKind, GpuReport
from driver.model.shared_memory import SharedMemory, SharingStrategy
from driver.placement.occupancy import in_the_way
from driver.slices.build import PublishedGpu
from kubelet_plugin.inventory.published_devices import (
    OFFER_EVERYTHING,
    ForeignPartitions,
    PublishableGpu,
    PublishPolicy,
    published_devices,
)


@dataclass(frozen=True, slots=True)
class ClaimReference:
    """The kubelet's reference to a claim. Logs and errors show ``str()``."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name

    def as_holder(self) -> str:
        """The claim as the holder of a device, in messages about another claim."""
        if not self.namespace and self.name not in ("", self.uid):
            return self.name  # a trial of the plugin's own
        if not self.namespace:
            return f"claim {self.uid}, whose checkpoint record is unreadable or missing,"
        return f"claim {self} ({self.uid})"


SHOWN_HOLDERS = 5
"""Claims that a message names."""


class Inventory:
    """Thread-safe. ``numbers`` is each GPU's number in device names, by UUID; ``sharing`` how GPUs are shared.

    ``held_shares`` are the shares that are held at the start, by GPU: index -> number of shares of the GPU.
    ``held_shared``: how the GPUs are shared of which claims have memory at the start; that does not change meanwhile.
    """

    def __init__(
        self,
        gpus: Iterable[Gpu],
        numbers: Mapping[str, int],
        sharing: GpuSharing = UNSHARED,
        held_shares: Mapping[str, Mapping[int, int]] | None = None,
        held_shared: Mapping[str, SharingStrategy] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._held_shares, self._held_shared = held_shares or {}, held_shared or {}
        self._sharing = sharing
        self._gpus: dict[str, Gpu] = {}
        self._numbers = dict(numbers)
        self._by_gpu: dict[str, tuple[Device, ...]] = {}
        self._devices: dict[str, Device] = {}
        self._outdated: dict[str, Device] = {}
        """Devices that were held at the start and that no new claim may get: shares of another number of shares than
        their GPU has now, shared devices of GPUs that are not shared any more."""
        self._faults: dict[str, str] = {}
        self._held: dict[str, tuple[ClaimReference, tuple[Device, ...]]] = {}
        self._foreign: dict[str, ForeignPartitions] = defaultdict(ForeignPartitions)
        self._conditions: dict[str, tuple[DeviceCondition, ...]] = {}
        self._adopted: dict[str, Mapping[str, str] | str] = {}
        """By uid of a claim that NVIDIA's driver prepared, why each GPU that it holds offers nothing."""
        self._reserved: Mapping[str, str] = {}
        self._reservations_known = False
        self._switched: dict[str, MigMode] = {}
        self._memory: dict[str, SharedMemory | None] = {}
        """How GPUs are shared by memory, or were at the start if claims had some of it then."""
        self.update(gpus, {})

    @property
    def gpus(self) -> Sequence[Gpu]:
        return tuple(self._gpus.values())

    def gpu(self, uuid: str) -> Gpu | None:
        """The GPU with this UUID, healthy or not; None if it was not found since the plugin started."""
        return self._gpus.get(uuid)

    def update(self, gpus: Iterable[Gpu], faults: Mapping[str, str]) -> bool:
        """Set the GPUs to those of the last scan; returns whether anything changed.

        A known GPU that is missing in ``gpus`` stays, with its reason from ``faults`` (by UUID): one of its devices may
        have been allocated, and removing a device from the slices would free its memory for others.
        """
        present = {gpu.uuid: gpu for gpu in gpus}
        # NVML says what limits the memory of a GPU. One that does not answer must not hold the lock.
        memory = {uuid: self._memory_of(gpu) for uuid, gpu in present.items()}
        with self._lock:
            limited = {uuid for uuid in memory if self._memory.get(uuid) != memory[uuid]}
            self._memory |= memory
            self._apply_switched()
            missing = {uuid: faults.get(uuid, "NVML no longer finds it") for uuid in self._gpus if uuid not in present}
            differs = any(self._gpus.get(uuid) != gpu for uuid, gpu in present.items())
            changed = differs or bool(limited) or missing != self._faults
            if changed:
                self._faults = missing
                self._replace({**self._gpus, **present}, limited)
        return changed

    def set_mig_mode(self, gpu: Gpu, mode: MigMode) -> None:
        """Set the MIG mode that the plugin itself has switched, so that it is published before the next scan."""
        with self._lock:
            self._switched[gpu.uuid] = mode

    def _apply_switched(self) -> None:
        """Make the devices of switched GPUs anew, when they are published: a prepare does not wait for that.

        The caller holds the lock.
        """
        if not self._switched:
            return
        changed = {uuid: replace(self._gpus[uuid], mig_mode=mode) for uuid, mode in self._switched.items()}
        self._switched = {}
        if any(self._gpus[uuid] != gpu for uuid, gpu in changed.items()):
            self._replace({**self._gpus, **changed})

    def _replace(self, gpus: dict[str, Gpu], limited: Container[str] = ()) -> None:
        """``limited``: GPUs whose memory is limited in another way now. The caller holds the lock."""
        self._numbers |= number_gpus(gpus.values(), self._numbers)
        for uuid, gpu in gpus.items():
            if self._gpus.get(uuid) is not gpu or uuid in limited:
                number, shares = self._numbers[uuid], self._sharing.shares_of(gpu)
                held = self._held_shares.get(uuid, {})
                memory, shared = self._memory[uuid], self._shared(gpu)
                self._by_gpu[uuid] = devices_of(gpu, number, shares, share_indices(shares, held), shared)
                outdated = [share_device(gpu, number, index, of) for index, of in held.items() if of != shares]
                if shared is None and memory is not None:
                    outdated.append(shared_device(gpu, number, memory))
                self._outdated |= {device.name: device for device in outdated}
        self._gpus = gpus
        self._devices = {device.name: device for devices in self._by_gpu.values() for device in devices}
        self._held = {
            uid: (holder, tuple(self._renewed(device) for device in devices))
            for uid, (holder, devices) in self._held.items()
        }

    def _shared(self, gpu: Gpu) -> SharedMemory | None:
        """How claims share ``gpu`` by memory from now on, as NVML said at the last scan; None: they do not."""
        return None if self._sharing.strategy_of(gpu) is None else self._memory[gpu.uuid]

    def _memory_of(self, gpu: Gpu) -> SharedMemory | None:
        """Calls NVML."""
        return self._sharing.memory_of(gpu, self._held_shared.get(gpu.uuid, self._sharing.strategy_of(gpu)))

    def _renewed(self, held: Device) -> Device:
        """A held device with the current facts of its GPU; its name and memory slices never change."""
        device = self._devices.get(held.name)
        if device is None or (device.gpu.uuid, device.mask, device.shares) != (held.gpu.uuid, held.mask, held.shares):
            return held
        return replace(device, spot=held.spot)

    def fault(self, gpu: Gpu) -> str | None:
        """The reason why the GPU can't be used at present, or None."""
        return self._faults.get(gpu.uuid)

    def device(self, name: str) -> Device | None:
        """The device with this name, whether held, offered or neither."""
        current = self._devices.get(name) or self._outdated.get(name)
        if current is not None and current.kind is not DeviceKind.SHARE:
            return current
        # A held share keeps its size even if the number of shares of the GPU has changed since.
        with self._lock:
            held_devices = (held for _, devices in self._held.values() for held in devices)
            return next((held for held in held_devices if held.name == name), current)

    def devices_on(self, gpu: Gpu) -> Sequence[Device]:
        """Every device that the GPU could offer, whether offered at present or not."""
        return self._by_gpu[gpu.uuid]

    def held_on(self, gpu: Gpu) -> list[Device]:
        with self._lock:
            return [device for _, devices in self._held.values() for device in devices if device.gpu.uuid == gpu.uuid]

    def number(self, gpu: Gpu) -> int:
        return self._numbers[gpu.uuid]

    def monitors(self) -> list[Monitor]:
        """The monitor devices of the GPUs that answer and that no other driver has, in order of number."""
        with self._lock:
            unusable = {*self._faults, *self._reserved, *self._all_adopted()}
            usable = [gpu for uuid, gpu in self._gpus.items() if uuid not in unusable]
            return [Monitor.of(gpu, self._numbers[gpu.uuid]) for gpu in sorted(usable, key=self.number)]

    def monitored_gpu(self, name: str) -> Gpu | None:
        """The GPU of the monitor device with this name, whether it answers or not."""
        monitors = (Monitor.of(gpu, self._numbers[gpu.uuid]) for gpu in self.gpus)
        return next((monitor.gpu for monitor in monitors if monitor.name == name), None)

    def hold(self, holder: ClaimReference, devices: Iterable[Device]) -> None:
        """Record that ``holder`` holds exactly ``devices``; repeatable."""
        with self._lock:
            self._held[holder.uid] = (holder, tuple(devices))

    def hold_unrecorded(self, uid: str, devices: Iterable[Device]) -> None:
        """Add ``devices`` to a claim without checkpoint record, except those that conflict with other claims."""
        with self._lock:
            holder, held = self._held.get(uid, (ClaimReference("", "", uid), ()))
            names = {device.name for device in held}
            new = [device for device in devices if device.name not in names and self._conflict(uid, device) is None]
            self._held[uid] = (holder, (*held, *new))

    def hold_adopted(self, uid: str, reasons: Mapping[str, str] | str) -> None:
        """Record that a claim under whose names nothing can be published holds GPUs (UUID -> reason); repeatable.

        One text is the reason for every GPU, also for those that are found later. Nothing of these GPUs is published
        until ``release``: no counter of ours would subtract what the claim holds.
        """
        with self._lock:
            self._adopted[uid] = reasons

    def _all_adopted(self) -> dict[str, str]:
        """Why GPUs that adopted claims hold offer nothing, by UUID. The caller holds the lock."""
        adopted: dict[str, str] = {}
        for reasons in self._adopted.values():
            for uuid, reason in (dict.fromkeys(self._gpus, reasons) if isinstance(reasons, str) else reasons).items():
                adopted[uuid] = f"{adopted[uuid]}; {reason}" if uuid in adopted else reason
        return adopted

    def adopted_reason(self, gpu: Gpu) -> str | None:
        """Which claims that NVIDIA's driver prepared hold ``gpu``, and what that means; None: none does."""
        with self._lock:
            return self._all_adopted().get(gpu.uuid)

    def release(self, uid: str) -> None:
        """Remove all devices of the claim; not an error if it holds none."""
        with self._lock:
            self._held.pop(uid, None)
            self._adopted.pop(uid, None)

    def set_foreign(self, gpu: Gpu, foreign: ForeignPartitions) -> bool:
        """Set the partitions on ``gpu`` that Tessera did not create; returns whether they changed."""
        with self._lock:
            changed = self._foreign[gpu.uuid] != foreign
            self._foreign[gpu.uuid] = foreign
        return changed

    def set_conditions(self, uuid: str, conditions: tuple[DeviceCondition, ...]) -> bool:
        """Set all conditions of a GPU, known here or not, and of its devices; returns whether they changed."""
        with self._lock:
            changed = self._conditions.get(uuid, ()) != conditions
            self._conditions[uuid] = conditions
        return changed

    def set_reserved(self, reserved: Mapping[str, str]) -> bool:
        """Set the GPUs that are reserved for other drivers (UUID -> reason); returns whether they changed.

        Devices that are held on them, or may just have been allocated, stay published; no other device is offered.
        """
        with self._lock:
            changed = self._reserved != reserved
            self._reserved, self._reservations_known = dict(reserved), True
        return changed

    def is_reserved(self, gpu: Gpu) -> bool:
        """Whether ``gpu`` must not be changed: another driver or its claims have it, or that is not known yet."""
        with self._lock:
            return not self._reservations_known or gpu.uuid in {*self._reserved, *self._all_adopted()}

    def reserved_reason(self, uid: str, gpu: Gpu) -> str | None:
        """Why ``gpu`` is reserved for another driver; None if it is not, or if the claim ``uid`` already holds it."""
        with self._lock:
            _, devices = self._held.get(uid, (None, ()))
            if any(d.gpu.uuid == gpu.uuid for d in devices):
                return None
            return self._reserved.get(gpu.uuid) or (self._all_adopted().get(gpu.uuid) if self._adopted else None)

    @property
    def foreign(self) -> bool:
        """Whether any GPU has partitions that belong to no claim."""
        with self._lock:
            return any(partitions.mask for partitions in self._foreign.values())

    def is_preexisting(self, device: Device) -> bool:
        """Whether ``device`` is a partition that Tessera did not create and offers as it is."""
        with self._lock:
            return device.name in self._foreign.get(device.gpu.uuid, ForeignPartitions()).offered

    def conflict(self, uid: str, device: Device) -> tuple[ClaimReference, Device] | None:
        """Another claim that leaves no room for ``device``, and its overlapping device; None if ``device`` fits."""
        with self._lock:
            return self._conflict(uid, device)

    def _conflict(self, uid: str, device: Device) -> tuple[ClaimReference, Device] | None:
        """The caller holds the lock."""
        others = [
            (holder, held)
            for holder, devices in self._held.values()
            for held in devices
            if holder.uid != uid and held.gpu.uuid == device.gpu.uuid
        ]
        if not others:
            return None
        obstacles = in_the_way(device, [held for _, held in others])
        return next(((holder, held) for holder, held in others if obstacles and held is obstacles[0]), None)

    def others_with(self, uid: str, name: str) -> list[tuple[ClaimReference, Device]]:
        """What other claims than ``uid`` have of the device with this name."""
        with self._lock:
            held = [(holder, d) for holder, devices in self._held.values() for d in devices if d.name == name]
        return [(holder, device) for holder, device in held if holder.uid != uid]

    def overdrawn_reason(self, uid: str, device: Device, shared: SharedMemory) -> str | None:
        """Why a shared device has not the GiB of ``device`` left for the claim ``uid``; None if it has."""
        others = [(holder, d.spot.at) for holder, d in self.others_with(uid, device.name)]
        free = max(0, shared.gib - sum(gib for _, gib in others))
        is_crowded = device.clients is not None and len(others) >= device.clients
        if device.spot.at <= free and not is_crowded:
            return None
        claims = sorted({holder.as_holder() for holder, _ in others})[:SHOWN_HOLDERS]
        holding = f"; {', '.join(claims)} still hold the rest on this node; it is prepared once enough is free"
        left = f"{free} GiB left of {shared.gib}, it was allocated {device.spot.at}"
        room = f"room for {device.clients} claims by MPS, all of them taken" if is_crowded else left
        return f"{device.name} has {room}{holding if claims else ''}"

    def states(self) -> list[GpuReport]:
        """The state of every GPU, for the controller."""
        with self._lock:
            self._apply_switched()
            return [self._report(gpu) for gpu in self._gpus.values()]

    def _report(self, gpu: Gpu) -> GpuReport:
        """The caller holds the lock."""
        taken = self._foreign[gpu.uuid].mask
        for condition in self._conditions.get(gpu.uuid, ()):
            taken |= condition.slices or 0  # they may not be allocated
        number, shares = self._numbers[gpu.uuid], self._sharing.shares_of(gpu)
        report = GpuReport(gpu, number, shares, gpu in self._sharing.only, taken, shared=self._shared(gpu))
        if gpu.uuid in self._faults:
            return replace(report, fault=self._faults[gpu.uuid], fault_kind=FaultKind.UNAVAILABLE)
        if reason := self._all_adopted().get(gpu.uuid):
            return replace(report, fault=reason, fault_kind=FaultKind.ADOPTED)
        if gpu.uuid in self._reserved:
            return replace(report, fault=self._reserved[gpu.uuid], fault_kind=FaultKind.RESERVED)
        for condition in self._conditions.get(gpu.uuid, ()):
            if condition.slices is None and condition.device is None:
                if condition.cordon:
                    text = f"{CORDONED_PREFIX}: {condition}".removesuffix(": ")
                    return replace(report, fault=text, fault_kind=FaultKind.CORDONED)
                return replace(report, fault=str(condition), fault_kind=FaultKind.UNHEALTHY, condition=condition.value)
        return report

    def published(self, policy: PublishPolicy = OFFER_EVERYTHING) -> list[PublishedGpu]:
        """The devices to publish: held ones, and those that ``policy`` wants and that fit next to them."""
        with self._lock:
            self._apply_switched()
            prepared = merged(device for _, devices in self._held.values() for device in devices)
            held = {device.name: device for device in prepared}
            names = policy.held - held.keys()
            of_names = (self._devices.get(name) or self._outdated.get(name) for name in names)
            allocated = [device for device in of_names if device is not None]
            adopted = self._all_adopted()
            gpus = [
                PublishableGpu(
                    gpu,
                    self._numbers[uuid],
                    self._by_gpu[uuid],
                    prepared=tuple(device for device in held.values() if device.gpu.uuid == uuid),
                    allocated=tuple(device for device in allocated if device.gpu.uuid == uuid),
                    shares_only=gpu in self._sharing.only,
                    foreign=self._foreign[uuid],
                    reserved=uuid in self._reserved or uuid in adopted,
                    fault=self._faults.get(uuid),
                    conditions=self._conditions.get(uuid, ()),
                    adopted=uuid in adopted,
                )
                for uuid, gpu in self._gpus.items()
            ]
        return published_devices(gpus, policy)
