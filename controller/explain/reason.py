"""The reason of a pending claim: its code, its sentence, and how it compares with the reasons of alternatives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from controller.demand.pending_claims import PendingClaim
from driver.kube.types import Key, Metadata


class ReasonCode(StrEnum):
    """Reasons. Of several alternatives of a claim, the one with the last code in this list is reported."""

    NO_SUCH_CLAIM = "NoSuchClaim"
    NODE_NAME = "NodeNameSet"
    GATED = "SchedulingGated"
    NOT_PLACED = "PodNotPlaced"
    """These four of pods that no free device helps (``controller.explain.unplaced_pods``)."""

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
    """These three of a claim that can be satisfied (``controller.explain.pending_despite_offers``)."""

    RESHAPING = "Reshaping"
    """Of a claim for which offers of a GPU are being replaced (``controller.explain.pending_despite_offers``)."""

    BEHIND = "BehindOthers"
    """Of a claim for which other claims leave no room (ibid.)."""

    WAITS = "Waits"
    """Of a claim that had another reason, and for which enough is free now."""

    GANG = "PodGroupNeedsMore"
    """Of a claim whose PodGroup can not be placed as a whole (``controller.explain.gangs``)."""


class ClaimReason(NamedTuple):
    """The reason of one pending claim. ``permanent``: it does not pass when other claims end, as for ``Reason``.

    ``group`` is the PodGroup that the reason is about; ``of_pods`` are those of several pods that have their own.
    """

    pending: PendingClaim
    code: ReasonCode
    sentence: str
    permanent: bool = False
    group: Metadata | None = None
    of_pods: tuple[tuple[Key, Reason], ...] = ()


OF_THE_POD = {ReasonCode.NO_SUCH_CLAIM, ReasonCode.NODE_NAME, ReasonCode.GATED, ReasonCode.NOT_PLACED}
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
