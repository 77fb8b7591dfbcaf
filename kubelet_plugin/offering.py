"""What the slices should say of one GPU: what is held, and of what still fits beside it what is asked for.

Rules only, over values that don't change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from driver.model.device import Device, DeviceKind
from driver.model.gpu import Gpu
from driver.model.health import Ailment
from driver.model.occupancy import Occupancy
from driver.model.plan import Offer, offer_of
from driver.slices.build import PublishedGpu
from driver.slices.limit import limited


@dataclass(frozen=True, slots=True)
class Foreign:
    """Partitions on one GPU that Tessera did not make.

    ``mask`` is the memory slices they take, ``offered`` the names of those devices that are given out as they are.
    """

    mask: int = 0
    offered: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Directions:
    """What to publish beside what prepared claims hold.

    ``held`` are names of devices that claims have which nobody prepared yet; ``offers`` what to offer where it fits,
    None: whatever fits; ``kept`` names of devices that were published before and must not go: somebody may have been
    given one just now. They go where a prepared device overlaps them. One that is only allocated does not do: its
    claim may have lost it again, and the scheduler, which still sees what overlaps it, have given that away; once
    that is out of the slices, the scheduler no longer knows what it takes.

    ``closing``: what is published beside ``offers`` gets a taint, so that nobody new is given it: what is on its way
    out, and what is held, which would otherwise be given away again wherever it is the moment its claim ends.
    """

    held: frozenset[str] = frozenset()
    offers: frozenset[Offer] | None = None
    kept: frozenset[str] = frozenset()
    closing: bool = False

    def ask_for(self, device: Device) -> bool:
        return self.offers is None or device.name in self.kept or offer_of(device) in self.offers

    def close(self, held: Iterable[Device], others: Iterable[Device]) -> frozenset[str]:
        """The names of those that nobody new shall be given: what is held, and of ``others`` what is not offered."""
        if not self.closing or self.offers is None:
            return frozenset()
        return frozenset(d.name for d in held) | {d.name for d in others if offer_of(d) not in self.offers}


WHATEVER_FITS = Directions()


@dataclass(frozen=True, slots=True)
class Offering:
    """One GPU, as far as it matters for what is published of it.

    ``devices`` is all that it could offer, ``prepared`` what prepared claims hold of it, ``waiting`` what claims have
    of it that nobody prepared yet; ``owned``: a neighbour's, so that nothing new of it is for anybody.
    """

    gpu: Gpu
    number: int
    devices: Sequence[Device]
    prepared: tuple[Device, ...]
    waiting: tuple[Device, ...]
    shares_only: bool
    foreign: Foreign
    owned: bool
    fault: str | None
    ailments: tuple[Ailment, ...]

    def published(self, directions: Directions = WHATEVER_FITS) -> PublishedGpu:
        held = (*self.prepared, *self.waiting)
        taken = Occupancy.of(self.gpu, held, self.foreign.mask)
        fitting = self._fitting(held, taken, directions)
        there = directions.kept | self.foreign.offered
        new = [device for device in fitting if device.name not in there]
        chosen = limited(len(held) + len(fitting) - len(new), new, taken.mask)
        offers = tuple(device for device in fitting if device.name in there or device.name in chosen)
        closed = directions.close(held, offers) - self.foreign.offered
        if self.owned:  # what a claim has is its own until it ends; nobody new gets any of it
            closed |= {device.name for device in (*held, *offers)}
        return PublishedGpu(self.gpu, self.number, held, offers, self.foreign.mask, self.fault, closed, self.ailments)

    def _fitting(self, held: Sequence[Device], taken: Occupancy, directions: Directions) -> list[Device]:
        """What may be published beside ``held``."""
        names = {device.name for device in held}
        left = Occupancy.of(self.gpu, self.prepared, self.foreign.mask)

        def stays(device: Device) -> bool:
            if self.owned and device.name not in directions.kept:
                return False
            if device.name in self.foreign.offered:
                return True
            fits = left if device.name in directions.kept else taken
            return directions.ask_for(device) and fits.admits(device)

        return [d for d in self.devices if d.name not in names and self._possible(d) and stays(d)]

    def _possible(self, device: Device) -> bool:
        """By the settings, and without a reset of the GPU: one that needs it offers what its MIG mode allows."""
        if device.kind is not DeviceKind.SHARE and self.shares_only:
            return False
        if self.gpu.toggles_freely:
            return True
        return (device.kind is DeviceKind.PARTITION) == self.gpu.mig_mode.in_force
