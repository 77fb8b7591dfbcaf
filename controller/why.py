"""A reason for which a claim waits, as data and as a sentence (values)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Code(StrEnum):
    """Reasons; of several alternatives of a claim the one named last here is told: it is nearest to being met."""

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
    """Of a claim that could be met (``controller.unused``)."""


ORDER = {code: index for index, code in enumerate(Code)}


@dataclass(frozen=True)
class Why:
    """``never``: so it is whatever claims give back, until the claim or the fleet is changed. ``data`` is JSON."""

    code: Code
    sentence: str
    data: Mapping[str, Any]
    never: bool = False

    @property
    def nearness(self) -> tuple[bool, int]:
        """Of several reasons the greatest is nearest to being met."""
        return (not self.never, ORDER[self.code])
