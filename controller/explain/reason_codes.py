"""Reason codes of pending claims (values)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Code(StrEnum):
    """Reasons. Of several alternatives of a claim, the one with the last code in this list is reported."""

    NO_SUCH_CLASS = "NoSuchClass"
    SELECTOR_REFUSED = "SelectorRefused"
    NO_GPUS = "NoGpusKnown"
    NOTHING_MATCHES = "NothingMatches"
    SELECTOR_FAILS = "SelectorFails"
    TOO_MANY = "TooMany"
    NO_NODE = "NoNode"
    OTHER_NODES = "OnOtherNodesOnly"
    CONSTRAINT = "ConstraintNotMet"
    NOT_TOGETHER = "NotOnOneNode"
    DEDICATED = "NotOfferedThere"
    FAULT = "GpuFault"
    FOREIGN = "ForeignPartitions"
    RESET = "GpuNeedsReset"
    FRAGMENTED = "Fragmented"
    HELD = "AllHeld"
    UNUSED = "OfferStandsUnused"
    """Of a claim that can be satisfied (``controller.explain.unscheduled``)."""


ORDER = {code: index for index, code in enumerate(Code)}


@dataclass(frozen=True)
class Reason:
    """``permanent``: it holds whatever other claims release, until the claim or the fleet changes. ``data`` is JSON."""

    code: Code
    sentence: str
    data: Mapping[str, Any]
    permanent: bool = False

    @property
    def nearness(self) -> tuple[bool, int]:
        """Sort key: the alternative with the greatest is nearest to being satisfied."""
        return (not self.permanent, ORDER[self.code])
