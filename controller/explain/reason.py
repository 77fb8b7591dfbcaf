"""The reason of a pending claim: its code, its sentence, and how it compares with others."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from controller.demand.pending_claims import PendingClaim
from driver.clock import seconds_time
from driver.kube.types import Key, PodGroup


class ReasonCode(StrEnum):
    """Codes of reasons, in an order that matters.

    Of the reasons of a claim's alternatives a temporary one is reported before a permanent one, and among equally
    permanent ones the one whose code comes last here (``Reason.nearness``).
    """

    NO_SUCH_CLAIM = "NoSuchClaim"
    OVER_QUOTA = "OverQuota"
    NOT_MAPPED = "ResourceNotMapped"
    NODE_NAME = "NodeNameSet"
    GATED = "SchedulingGated"
    NOT_PLACED = "PodNotPlaced"
    """The six codes above apply to pods that no device helps (``explain.sources.causes_in_pods_and_claims``)."""

    NO_SUCH_CLASS = "NoSuchClass"
    SELECTOR_REFUSED = "SelectorRefused"
    NO_GPUS = "NoGpusKnown"
    NOTHING_MATCHES = "NothingMatches"
    SELECTOR_FAILS = "SelectorFails"
    TOO_MANY = "TooMany"
    NO_NODE = "NoNode"
    OTHER_NODES = "OnOtherNodesOnly"
    NOT_READY = "NodeNotReady"
    CONSTRAINT = "ConstraintNotMet"
    NOT_TOGETHER = "NotOnOneNode"
    DEDICATED = "NotOfferedThere"
    CLOSED = "NodeClosed"
    FAULT = "GpuFault"
    CORDONED = "GpuCordoned"
    FOREIGN = "ForeignPartitions"
    RESET = "GpuNeedsReset"
    FRAGMENTED = "Fragmented"
    LIMIT = "ProfileLimitReached"
    HELD = "AllHeld"
    NOT_PUBLISHED = "NotPublished"
    TAINTED = "DeviceTainted"
    UNUSED = "OfferStandsUnused"
    """The three codes above apply to a claim for which enough is free (``explain.sources.pending_despite_offers``).
    ``TAINTED`` also applies to one that no untainted device satisfies."""

    RESHAPING = "Reshaping"
    """Of a claim for which offers of a GPU are being replaced (``controller.explain.pipeline``)."""

    BEHIND = "BehindOthers"
    """Of a claim for which other claims leave no room (ibid.)."""

    WAITS = "Waits"
    """Of a claim for which enough is free now, or for which that is not known (ibid.)."""

    GANG = "PodGroupNeedsMore"
    """Of a claim whose PodGroup can not be placed as a whole (``controller.explain.sources.waiting_gangs``)."""


class ClaimReason(NamedTuple):
    """The reason of one pending claim.

    permanent    it does not pass when other claims end, as for ``Reason``
    group        the PodGroup that the reason is about
    of_pods      those of several pods that have a reason of their own
    found_at     when it was found; None: it is current
    is_examined  False: there was no time yet to find the reason
    moves        what moves of other claims would do, a part of the sentence; empty: none are known that help
    """

    pending: PendingClaim
    code: ReasonCode
    sentence: str
    permanent: bool = False
    group: PodGroup | None = None
    of_pods: tuple[tuple[Key, Reason], ...] = ()
    found_at: datetime | None = None
    is_examined: bool = True
    moves: str = ""

    @property
    def text(self) -> str:
        """The sentence; if it is not current, with the time when it was found."""
        return self.sentence if self.found_at is None else f"{self.sentence} (as of {seconds_time(self.found_at)})"


OF_THE_POD = {
    ReasonCode.NO_SUCH_CLAIM,
    ReasonCode.OVER_QUOTA,
    ReasonCode.NOT_MAPPED,
    ReasonCode.NODE_NAME,
    ReasonCode.GATED,
    ReasonCode.NOT_PLACED,
}
"""Reasons of pods that no device helps, free or not."""


@dataclass(frozen=True)
class Reason:
    """``permanent``: it holds whatever other claims release, until the claim or the fleet changes."""

    code: ReasonCode
    sentence: str
    permanent: bool = False

    @property
    def nearness(self) -> tuple[bool, int]:
        """Sort key: the alternative with the greatest is nearest to being satisfied."""
        return (not self.permanent, list(ReasonCode).index(self.code))
