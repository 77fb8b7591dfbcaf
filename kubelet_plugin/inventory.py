"""The node's GPUs and devices, and who holds them, in memory.

The checkpoint is the durable truth; this is its index. No method does I/O, so the one lock in here is
held for microseconds; it is not the lock that keeps two claims apart on a GPU (see ``locks``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from driver.model.device import SLICE_VALUE, Device, DeviceKind, devices_of, number_gpus, share_indices
from driver.model.gpu import Gpu, MigMode
from driver.model.health import Ailment
from driver.model.plan_gpus import GpuState
from driver.model.selection import NO_GPU, Selection
from driver.slices.build import PublishedGpu
from kubelet_plugin.offering import WHATEVER_FITS, Directions, Foreign, Offering

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
class Sharing:
    """Into how many shares a GPU is divided (0: none), and which GPUs are offered as shares only."""

    shares_of: Callable[[Gpu], int]
    only: Selection = NO_GPU


UNSHARED = Sharing(lambda _: 0)


class Inventory:
    """Thread-safe. ``numbers`` gives each GPU's number in device names, by UUID; ``sharing`` who is shared.

    ``held_shares`` are the shares that are held at the start, by GPU: the number of each and of how many it is one.
    """

    def __init__(
        self,
        gpus: Iterable[Gpu],
        numbers: Mapping[str, int],
        sharing: Sharing = UNSHARED,
        held_shares: Mapping[str, Mapping[int, int]] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._held_shares = held_shares or {}
        self._sharing = sharing
        self._gpus: dict[str, Gpu] = {}
        self._numbers = dict(numbers)
        self._by_gpu: dict[str, tuple[Device, ...]] = {}
        self._devices: dict[str, Device] = {}
        self._faults: dict[str, str] = {}
        self._held: dict[str, tuple[Holder, tuple[Device, ...]]] = {}
        self._foreign: dict[str, Foreign] = {}
        self._ailments: dict[str, tuple[Ailment, ...]] = {}
        self._owned: Mapping[str, str] = {}
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
            uuid: self._by_gpu[uuid] if self._gpus.get(uuid) is gpu else self._devices_of(gpu)
            for uuid, gpu in gpus.items()
        }
        self._gpus = gpus
        self._devices = {device.name: device for devices in self._by_gpu.values() for device in devices}
        self._held = {
            uid: (holder, tuple(self._renewed(device) for device in devices))
            for uid, (holder, devices) in self._held.items()
        }

    def _devices_of(self, gpu: Gpu) -> tuple[Device, ...]:
        shares = self._sharing.shares_of(gpu)
        indices = share_indices(shares, self._held_shares.get(gpu.uuid, {}))
        return devices_of(gpu, self._numbers[gpu.uuid], shares, indices)

    def _renewed(self, held: Device) -> Device:
        """A held device with its GPU's facts of now; what it takes and what it is called never changes."""
        known = self._devices.get(held.name)
        if known is None or (known.gpu.uuid, known.mask, known.shares) != (held.gpu.uuid, held.mask, held.shares):
            return held
        return known

    def fault(self, gpu: Gpu) -> str | None:
        """Why the GPU can't be used at present, or None."""
        return self._faults.get(gpu.uuid)

    def device(self, name: str) -> Device | None:
        """The device of this name, held, offered or neither at present."""
        known = self._devices.get(name)
        if known is not None and known.kind is not DeviceKind.SHARE:
            return known
        # A share may have been given out when the GPU was divided otherwise: it stays what it was.
        with self._lock:
            held = (device for _, devices in self._held.values() for device in devices)
            return next((device for device in held if device.name == name), known)

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

    def note_ailments(self, uuid: str, ailments: tuple[Ailment, ...]) -> bool:
        """All that is wrong with a GPU, known here or not, and its devices; says whether that is news."""
        with self._lock:
            changed = self._ailments.get(uuid, ()) != ailments
            self._ailments[uuid] = ailments
        return changed

    def note_owned(self, owned: Mapping[str, str]) -> bool:
        """Which GPUs are a neighbour's (by UUID), and why; says whether that is news. What is held on one, or may have
        been given out just now, stays published; nothing new is offered."""
        with self._lock:
            changed = self._owned != owned
            self._owned = dict(owned)
        return changed

    def owner(self, uid: str, gpu: Gpu) -> str | None:
        """Why ``gpu`` is a neighbour's, unless the claim ``uid`` has it since before."""
        with self._lock:
            _, devices = self._held.get(uid, (None, ()))
            return None if any(d.gpu.uuid == gpu.uuid for d in devices) else self._owned.get(gpu.uuid)

    def existing(self, device: Device) -> bool:
        """Whether ``device`` is a partition that stood there before and is given out as it is."""
        with self._lock:
            return device.name in self._foreign.get(device.gpu.uuid, Foreign()).offered

    def conflict(self, uid: str, device: Device) -> tuple[Holder, Device] | None:
        """Another claim because of which there is no room for ``device``, and the device by which it is so."""
        with self._lock:
            others = [
                (holder, held)
                for holder, devices in self._held.values()
                for held in devices
                if holder.uid != uid and held.gpu.uuid == device.gpu.uuid and held.mask & device.mask
            ]
        same = [(holder, held) for holder, held in others if held.name == device.name]
        # Only shares leave anything of a slice to others.
        full = sum(held.weight for _, held in others) + device.weight > SLICE_VALUE
        return next(iter([*same, *(others if full else [])]), None)

    def states(self) -> list[GpuState]:
        """What is known of every GPU, for the controller."""
        with self._lock:
            return [
                GpuState(
                    gpu,
                    self._numbers[gpu.uuid],
                    self._sharing.shares_of(gpu),
                    gpu in self._sharing.only,
                    self._foreign.get(gpu.uuid, Foreign()).mask | self._ill_slices(gpu),
                    self._faults.get(gpu.uuid) or self._owned.get(gpu.uuid) or self._ill(gpu),
                )
                for gpu in self._gpus.values()
            ]

    def _ill(self, gpu: Gpu) -> str | None:
        """Why none of the GPU's devices is for anybody new, though it answers. The caller holds the lock."""
        whole = [each for each in self._ailments.get(gpu.uuid, ()) if each.slices is None and each.device is None]
        return next((f"cordoned: {each}" if each.cordon else str(each) for each in whole), None)

    def _ill_slices(self, gpu: Gpu) -> int:
        """Bit mask of the memory slices that are for nobody new; the controller counts them as taken."""
        mask = 0
        for each in self._ailments.get(gpu.uuid, ()):
            mask |= each.slices or 0
        return mask

    def published(self, directions: Directions = WHATEVER_FITS) -> list[PublishedGpu]:
        """What the slices should say: everything held, and of what still fits beside it what ``directions`` ask for."""
        with self._lock:
            held = {device.name: device for _, devices in self._held.values() for device in devices}
            names = directions.held - held.keys()
            waiting = [self._devices[name] for name in names if name in self._devices]
            offerings = [self._offering(gpu, tuple(held.values()), waiting) for gpu in self._gpus.values()]
        return [offering.published(directions) for offering in offerings]

    def _offering(self, gpu: Gpu, all_held: Sequence[Device], all_waiting: Sequence[Device]) -> Offering:
        """The caller holds the lock."""
        return Offering(
            gpu,
            self._numbers[gpu.uuid],
            self._by_gpu[gpu.uuid],
            prepared=tuple(device for device in all_held if device.gpu.uuid == gpu.uuid),
            waiting=tuple(device for device in all_waiting if device.gpu.uuid == gpu.uuid),
            shares_only=gpu in self._sharing.only,
            foreign=self._foreign.get(gpu.uuid, Foreign()),
            owned=gpu.uuid in self._owned,
            fault=self._faults.get(gpu.uuid),
            ailments=self._ailments.get(gpu.uuid, ()),
        )
