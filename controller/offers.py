"""What claims wait for, and what shall be offered: the values of curation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from driver.model.plan import Offer
from driver.placement import Key, Terms

Eligible = frozenset[str] | None
"""UUIDs of the GPUs that would do; None: every GPU."""


@dataclass(frozen=True)
class CurationSettings:
    """How much is offered, and how readily an offer is exchanged.

    ``offers``: how many of each key stand, whoever waits. ``stickiness``: an offer is exchanged for one whose growth
    of fragmentation is less by more than this, in memory slices; all of a key, if that gains as much on average.
    """

    offers: int = 2
    stickiness: float = 0.5


@dataclass(frozen=True)
class Demand:
    """Devices that claims wait for: ``count`` of ``key`` on the GPUs of ``eligible``.

    ``together`` names sets of GPUs of which one must take all ``count`` (a matchAttribute constraint): the GPUs of
    each clique for training, each GPU alone for partitions of one GPU. ``everything``: offer all that is possible on
    those GPUs (for a claim that selects more finely than by GPU, or that nothing served).
    """

    key: Key
    count: int = 1
    eligible: Eligible = None
    together: tuple[frozenset[str], ...] = ()
    everything: bool = False


@dataclass(frozen=True)
class TakenBack:
    """A published offer that shall stand no longer.

    ``gone``: it is held or impossible beside what is held, so nobody can get it. ``worse``: ``better`` takes its
    place. ``surplus``: fewer are needed. ``terms`` are the offer's own.
    """

    offer: Offer
    reason: Literal["gone", "worse", "surplus"]
    terms: Terms | None = None
    better: Terms | None = None


@dataclass(frozen=True)
class Curation:
    """What shall be offered, and why: the terms of each as the fleet stands now. Both parts are sorted."""

    offers: Mapping[Offer, Terms]
    taken_back: tuple[TakenBack, ...] = ()
