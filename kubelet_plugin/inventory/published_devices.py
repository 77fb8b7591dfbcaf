"""The devices that the ResourceSlices contain for one GPU: held devices, and the wanted offers that fit next to them.

Pure rules over immutable values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from driver.model.device import Device
from driver.model.gpu import Gpu
from driver.model.gpu_events_and_conditions import DeviceCondition
from driver.model.offer import OF_SEVERAL, DeviceKind, Offer
from driver.model.plan import OfferMode
from driver.placement.occupancy import GpuState, possible_kinds
from driver.placement.ranking import full_first
from driver.slices.build import PublishedGpu, limited


@dataclass(frozen=True, slots=True)
class ForeignPartitions:
    """Partitions on one GPU that Tessera did not create.

    ``mask`` is the memory slices they occupy, ``offered`` the names of the devices that are offered as they are.
    """

    mask: int = 0
    offered: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PublishPolicy:
    """The devices to publish in addition to those of prepared claims.

    ``held`` names devices that are allocated but not prepared yet. ``offers`` is what to offer if it fits; None: every
    device that fits. ``kept`` names devices that were published before and must stay, because one may just have been
    allocated. They are removed only if a prepared device overlaps them. Overlap with a device that is only allocated
    is not sufficient: its claim may have been deallocated again and the scheduler, which still sees the overlapping
    device, may have allocated that one; without it in the slices, the scheduler no longer counts its memory.

    ``closing``: devices that are published but not in ``offers`` get a taint, so that no new claim gets them: devices
    that are being withdrawn, and held devices, which would otherwise be allocated again as soon as their claim ends.
    Only devices of OF_SEVERAL can be held and in ``offers`` at once.

    ``listed``: devices to publish whether they are offered or not, next to held devices, too; not if ``mode`` is
    DISJOINT.

    ``publish_held``: False: a GPU with no device but held ones becomes unpublished when its node offers nothing. This
    is safe because its devices stay in ``kept``: whenever the node offers anything again, every device that was ever
    published and has not been withdrawn since is published along with the offer, so that the scheduler counts its
    memory if a claim holds it. ``unpublished`` are the UUIDs of the GPUs that are unpublished now: they stay so until
    something of their node is offered. With disjoint offers each GPU is judged by itself.

    ``mode``: DISJOINT: of the devices that ``offers`` wants, only those are added that fit next to everything that is
    published. ``keeps_taints``, ``keeps_sharing``: whether the API server keeps the taints of devices, and that several
    claims may have one.

    ``complete``: every device that the GPU can be, whatever is held: shared counters keep the scheduler from allocating
    what overlaps. Only partitions that Tessera did not create, faults, and other drivers change what is published.
    """

    held: frozenset[str] = frozenset()
    offers: frozenset[Offer] | None = None
    kept: frozenset[str] = frozenset()
    closing: bool = False
    listed: frozenset[Offer] = frozenset()
    publish_held: bool = True
    unpublished: frozenset[str] = frozenset()
    mode: OfferMode = OfferMode.COUNTERS
    keeps_taints: bool = True
    keeps_sharing: bool = True
    complete: bool = False

    def wants(self, device: Device) -> bool:
        return self.offers is None or device.name in self.kept or device.offer in self.offers

    def closed(self, held: Iterable[Device], others: Iterable[Device]) -> frozenset[str]:
        """The names of the devices that no new claim may get: ``held``, and those of ``others`` that are no offers."""
        if not self.closing or self.offers is None:
            return frozenset()
        exclusive = (d.name for d in held if d.kind not in OF_SEVERAL or d.offer not in self.offers)
        return frozenset(exclusive) | {d.name for d in others if d.offer not in self.offers}


OFFER_EVERYTHING = PublishPolicy()


@dataclass(frozen=True, slots=True)
class PublishableGpu:
    """One GPU with the facts that determine its published devices.

    ``devices`` are all devices it could offer, ``prepared`` those of prepared claims, ``allocated`` those that are
    allocated but not prepared yet. ``reserved``: another driver owns the GPU, so none of its devices is offered.
    ``adopted``: claims hold it under names that are not ours, so that none of its devices may be published.
    """

    gpu: Gpu
    number: int
    devices: Sequence[Device]
    prepared: tuple[Device, ...]
    allocated: tuple[Device, ...]
    shares_only: bool
    foreign: ForeignPartitions
    reserved: bool
    fault: str | None
    conditions: tuple[DeviceCondition, ...]
    adopted: bool = False

    def published(self, policy: PublishPolicy) -> PublishedGpu:
        """The devices to publish of this GPU; ``published_devices`` decides whether they are."""
        if policy.complete:
            return replace(self._with(policy, self.prepared, self._all_free(policy)), constant=True)
        held = (*self.prepared, *self.allocated)
        taken = GpuState.of(self.gpu, held, self.foreign.mask)
        fitting = self._fitting(held, taken, policy)
        existing = policy.kept | self.foreign.offered
        standing = [device for device in fitting if device.name in existing]
        new = [device for device in fitting if device.name not in existing]
        if policy.mode is OfferMode.DISJOINT:
            new = self._fitting_together(new, (*held, *standing))
        chosen = limited(len(held) + len(standing), new, taken.mask)
        offers = tuple(device for device in fitting if device.name in existing or device.name in chosen)
        ours = [device for device in (*held, *offers) if device.name not in self.foreign.offered]
        return replace(
            self._with(policy, held, offers, policy.closed(held, offers) - self.foreign.offered),
            # Devices may overlap in DISJOINT mode, too: a plan may name as held what no claim has.
            counted=policy.mode is OfferMode.COUNTERS or len(self._fitting_together(ours)) < len(ours),
        )

    def _with(
        self,
        policy: PublishPolicy,
        held: tuple[Device, ...],
        offers: tuple[Device, ...],
        closed: frozenset[str] = frozenset(),
    ) -> PublishedGpu:
        closed |= {device.name for device in held if not self._may_be_shared(device)}
        if self.reserved:  # claims keep their devices until they end; no new claim gets one
            closed = frozenset(device.name for device in (*held, *offers))
        return PublishedGpu(
            self.gpu,
            self.number,
            held,
            offers,
            self.foreign.mask,
            self.fault,
            closed,
            self.conditions,
            divided=any(device.kind in (DeviceKind.SHARE, DeviceKind.SHARED) for device in self.devices),
            keeps_taints=policy.keeps_taints,
        )

    def _all_free(self, policy: PublishPolicy) -> tuple[Device, ...]:
        """The devices without a claim that are possible next to partitions that Tessera did not create."""
        empty = GpuState.of(self.gpu, foreign=self.foreign.mask)
        possible = [
            d for d in self.devices if d.name in self.foreign.offered or (self._possible(d, policy) and empty.fits(d))
        ]
        chosen = limited(0, possible, self.foreign.mask) | self.foreign.offered
        prepared = {device.name for device in self.prepared}
        return tuple(device for device in possible if device.name in chosen - prepared)

    def _may_be_shared(self, held: Device) -> bool:
        """Whether more claims could get a held device: False only for a shared one that is not shared any more."""
        return held.kind not in OF_SEVERAL or any(held.name == device.name for device in self.devices)

    def _candidates(self, published: PublishedGpu) -> Iterable[Device]:
        """What new claims could get of ``published``: its offers, and the shared devices that claims have already."""
        yield from published.offers
        yield from (d for d in published.held if d.kind in OF_SEVERAL and self._may_be_shared(d))

    def is_offered(self, policy: PublishPolicy, published: PublishedGpu) -> bool:
        """Whether new claims can get something of ``published``."""
        offered = not self.reserved and any(self._is_offered(d, policy) for d in self._candidates(published))
        return offered and not self._waits_for_plan(policy)

    def is_unpublished(self, policy: PublishPolicy, published: PublishedGpu, *, node_offers: bool) -> bool:
        """Whether the slices contain nothing of ``published``; ``node_offers``: something of the node is offered."""
        if self.adopted:
            return True
        if any(self._needs_slice(device) for device in published.held):
            return False
        # A device that is only kept keeps others from being offered in DISJOINT mode, so the controller must see it.
        disjoint = policy.mode is OfferMode.DISJOINT
        kept = disjoint and published.offers
        if not self.reserved and (kept or any(self._is_wanted(d, policy) for d in self._candidates(published))):
            return self._waits_for_plan(policy)
        if self.gpu.uuid in policy.unpublished:
            return not node_offers
        return not (policy.publish_held or published.offers or node_offers)

    def _waits_for_plan(self, policy: PublishPolicy) -> bool:
        """Whether the GPU is unpublished, and the plan lacks a prepared device of it: the plan is older than its
        claim, or its maker does not know the claim."""
        is_unpublished = self.gpu.uuid in policy.unpublished
        return is_unpublished and any(device.name not in policy.held for device in self.prepared)

    def _is_wanted(self, device: Device, policy: PublishPolicy) -> bool:
        """Whether ``device`` is to be published, and not only kept because it may just have been allocated."""
        return device.offer in policy.listed or self._is_offered(device, policy)

    def _is_offered(self, device: Device, policy: PublishPolicy) -> bool:
        is_offer = policy.offers is None or device.offer in policy.offers
        return is_offer or device.name in self.foreign.offered

    def _needs_slice(self, held: Device) -> bool:
        """Whether a held device has something to report that only its slice can: a taint, or an outdated share size."""
        unhealthy = self.fault is not None or any(condition.affects(held) for condition in self.conditions)
        return unhealthy or (held.kind is DeviceKind.SHARE and held not in self.devices)

    def _fitting(self, held: Sequence[Device], taken: GpuState, policy: PublishPolicy) -> list[Device]:
        """The devices that may be published next to ``held``."""
        names = {device.name for device in held}
        prepared = GpuState.of(self.gpu, self.prepared, self.foreign.mask)
        empty = GpuState.of(self.gpu, foreign=self.foreign.mask)
        listed = policy.listed if policy.mode is OfferMode.COUNTERS else frozenset[Offer]()

        def stays(device: Device) -> bool:
            if self.reserved and device.name not in policy.kept:
                return False
            if device.name in self.foreign.offered:
                return True
            if device.offer in listed:
                return empty.fits(device)
            state = prepared if device.name in policy.kept else taken
            return policy.wants(device) and state.fits(device)

        return [d for d in self.devices if d.name not in names and self._possible(d, policy) and stays(d)]

    def _fitting_together(self, devices: Iterable[Device], published: Sequence[Device] = ()) -> list[Device]:
        """Those of ``devices`` that fit next to ``published`` and each other, the first in a fixed order."""
        chosen: list[Device] = []
        for device in full_first(devices, {}):
            if GpuState.of(self.gpu, (*published, *chosen), self.foreign.mask).fits(device):
                chosen.append(device)
        return chosen

    def _possible(self, device: Device, policy: PublishPolicy) -> bool:
        """Whether API server, settings and MIG mode allow ``device`` without a reset of the GPU."""
        if device.kind in OF_SEVERAL and not policy.keeps_sharing:
            return False
        return device.kind in possible_kinds(self.gpu, shares_only=self.shares_only)


def published_devices(gpus: Iterable[PublishableGpu], policy: PublishPolicy) -> list[PublishedGpu]:
    """What the slices of a node contain of its ``gpus``.

    A node that offers anything publishes everything that claims hold on it, because a scheduler may give out nothing
    that consumes counters of a pool in which a held device is missing (kubernetes#140806).
    """
    candidates = [(gpu, gpu.published(policy)) for gpu in gpus]
    is_counted = policy.mode is OfferMode.COUNTERS
    node_offers = is_counted and any(gpu.is_offered(policy, published) for gpu, published in candidates)
    return [
        replace(published, unpublished=gpu.is_unpublished(policy, published, node_offers=node_offers))
        for gpu, published in candidates
    ]
