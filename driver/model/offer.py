"""The kinds of devices, and what a GPU can offer: the one identity of an offer in all processes, without names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

WRITTEN_OFFER = re.compile(
    r"(?P<gpu>[^/]+)/(?:full|share-(?P<share>[0-9]{1,2})|(?P<profile>[0-9A-Za-z.+-]+)@(?P<start>[0-9]{1,2}))"
)


class DeviceKind(StrEnum):
    """The value of a device's ``type`` attribute."""

    FULL = "gpu"
    PARTITION = "mig"
    SHARE = "share"


class OfferKind(NamedTuple):
    """A kind of request and offer: full GPU, share, or partition of a profile."""

    type: DeviceKind
    profile: str | None = None

    def __str__(self) -> str:
        return self.profile or ("full" if self.type is DeviceKind.FULL else "share")


FULL = OfferKind(DeviceKind.FULL)
SHARE = OfferKind(DeviceKind.SHARE)


class Spot(NamedTuple):
    """What a device is on its GPU, whichever that is.

    ``at`` is the first memory slice of a partition's placement, the number of a share, or 0 for a full GPU.
    """

    kind: OfferKind
    at: int = 0

    def __str__(self) -> str:
        """As the plan writes it: ``full``, ``1g.10gb@6`` or ``share-0``."""
        if self.kind.type is DeviceKind.FULL:
            return "full"
        return f"share-{self.at}" if self.kind.type is DeviceKind.SHARE else f"{self.kind.profile}@{self.at}"


class Offer(NamedTuple):
    """A spot on one GPU. Written ``GPU-<uuid>/full``, ``GPU-<uuid>/1g.10gb@6`` or ``GPU-<uuid>/share-0``."""

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
        gpu, share, profile, start = written.group("gpu", "share", "profile", "start")
        if profile:
            return cls(gpu, Spot(OfferKind(DeviceKind.PARTITION, profile), int(start)))
        return cls(gpu, Spot(SHARE, int(share)) if share else Spot(FULL))


def parsed_offers(texts: Iterable[str]) -> frozenset[Offer]:
    """Those of ``texts`` that are offers."""
    return frozenset(offer for offer in map(Offer.parse, texts) if offer is not None)
