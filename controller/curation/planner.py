"""What a decision asks of the planner of its offer mode: ``CountersPlanner`` or ``DisjointPlanner``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from controller.cluster.unheld_devices import UnheldDevices
from controller.demand.pending_claims import Queue
from driver.model.offer import Offer, OfferKind


@dataclass(frozen=True)
class PlannedOffers:
    """``requested``: the kinds of those of ``offers`` that are for pending claims.

    ``by_claim``: by key of the claim, the offers of ``offers`` that its pod is to be given. None with counters: the
    scheduler chooses among all offers.
    """

    offers: tuple[Offer, ...]
    requested: frozenset[OfferKind]
    by_claim: Mapping[str, tuple[Offer, ...]] | None = None

    def including(self, reserved: Mapping[str, Iterable[Offer]]) -> PlannedOffers:
        """The same, and what else is offered for claims, by their keys."""
        offers = {key: tuple(of) for key, of in reserved.items()}
        more = dict.fromkeys(offer for of in offers.values() for offer in of)
        requested = self.requested.union(offer.spot.kind for offer in more)
        by_claim = None if self.by_claim is None else {**self.by_claim, **offers}
        return PlannedOffers((*self.offers, *more), requested, by_claim)


class OfferPlanner(Protocol):
    """Plans the offers of the cluster. What it remembers saves time or measures time; a new leader starts anew."""

    @property
    def next_s(self) -> float | None:
        """Seconds until the plan may change by time alone; None: it does not."""

    def plan(self, queue: Queue, devices: UnheldDevices, announced: Collection[Offer]) -> PlannedOffers:
        """What to offer, whether it is possible at once or not.

        ``devices`` are those that nodes publish, ``announced`` the offers of plans that nodes are about to publish.
        """
