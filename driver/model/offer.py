"""The kinds of devices, and what a GPU can offer: the one identity of an offer in all processes, without names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

WRITTEN_OFFER = re.compile(
    r"(?P<gpu>[^/]+)/(?:full|(?P<shared>shared)|share-(?P<share>[0-9]{1,2})|(?P<profile>[0-9A-Za-z.+-]+)@(?P<start>[0-9]{1,2}))"
)


class DeviceKind(StrEnum):
    """The value of a device's ``type`` attribute."""

    FULL = "gpu"
    PARTITION = "mig"
    SHARE = "share"
    SHARED = "shared"
    SHARED_PARTITION = "mig-shared"


OF_SEVERAL = frozenset({DeviceKind.SHARED, DeviceKind.SHARED_PARTITION})
"""The kinds of devices that several claims can have at once, each a part."""

WITHOUT_OWN_ACTIVITY = OF_SEVERAL | {DeviceKind.SHARE}
"""The kinds of devices whose activity can't be told from that of other claims."""

SHARED_PROFILE = re.compile(r"(?P<part>[1-9])c\.(?P<profile>(?P<slices>[1-9])g\..+)")
"""A profile whose partitions are shared, as NVIDIA writes compute instances: each claim gets one of ``part`` slices."""


class OfferKind(NamedTuple):
    """A kind of request and offer: full GPU, share, shared device, or partition of a profile."""

    type: DeviceKind
    profile: str | None = None

    @property
    def instances(self) -> int:
        """The number of claims that can have a shared partition at once, each one of its compute instances."""
        return compute_instances(self.profile) if self.type is DeviceKind.SHARED_PARTITION else 1

    def __str__(self) -> str:
        return self.profile or ("full" if self.type is DeviceKind.FULL else self.type.value)


FULL = OfferKind(DeviceKind.FULL)
SHARE = OfferKind(DeviceKind.SHARE)
SHARED = OfferKind(DeviceKind.SHARED)


@lru_cache(1024)
def compute_instances(profile: str | None) -> int:
    """Into how many compute instances a partition of this profile is divided; 1 if it is not shared."""
    shared = SHARED_PROFILE.fullmatch(profile or "")
    return int(shared["slices"]) // int(shared["part"]) if shared else 1


@lru_cache(1024)
def partition_kind(profile: str) -> OfferKind:
    """The kind of the partitions of a profile: shared ones of ``1c.3g.40gb``, others of ``3g.40gb``."""
    shared = compute_instances(profile) > 1
    return OfferKind(DeviceKind.SHARED_PARTITION if shared else DeviceKind.PARTITION, profile)


class Spot(NamedTuple):
    """What a device is on its GPU, whichever that is.

    ``at`` is the first memory slice of a partition's placement, the number of a share, or 0 for a full GPU. Of a shared
    device it is the GiB that one claim has of it, or is to have; 0 for the device itself, which is what is offered.
    """

    kind: OfferKind
    at: int = 0

    def __str__(self) -> str:
        """As the plan writes it: ``full``, ``1g.10gb@6``, ``share-0`` or ``shared``."""
        if self.kind.profile is not None:
            return f"{self.kind.profile}@{self.at}"
        of_type = {DeviceKind.FULL: "full", DeviceKind.SHARED: "shared"}
        return of_type.get(self.kind.type) or f"share-{self.at}"

    @property
    def device(self) -> Spot:
        """The spot of the device that is published for this one: of a shared device the whole, whatever a claim has."""
        return Spot(self.kind) if self.kind.type is DeviceKind.SHARED else self


class Offer(NamedTuple):
    """A spot on one GPU. Written ``GPU-<uuid>/full``, ``/1g.10gb@6``, ``/share-0`` or ``/shared``."""

    gpu: str
    spot: Spot

    def __str__(self) -> str:
        return f"{self.gpu}/{self.spot}"

    @classmethod
    def parse(cls, text: str) -> Offer | None:
        """Parse the result of ``str``; None if it is not an offer."""
        written = WRITTEN_OFFER.fullmatch(text)
        if written is None:
            return None
        gpu, shared, share, profile, start = written.group("gpu", "shared", "share", "profile", "start")
        if profile:
            return cls(gpu, Spot(partition_kind(profile), int(start)))
        return cls(gpu, Spot(SHARE, int(share)) if share else Spot(SHARED if shared else FULL))


def parsed_offers(texts: Iterable[str]) -> frozenset[Offer]:
    """Those of ``texts`` that are offers."""
    return frozenset(offer for offer in map(Offer.parse, texts) if offer is not None)
