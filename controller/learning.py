"""Class weights learnt from what claims asked for in the last hours (pure, but for a memory).

FGD weighs every class of request by how likely it is to come (Weng et al., ATC'23, section 4). What comes is taken to
be like what came: a class counts the memory that was asked for in it, half of that a half-life later. Memory and not
claims, because many small claims outweigh few big ones by far, which then find nothing (docs/placement.md). A class
that nobody asked for keeps a small weight, else its first claim would meet a cluster where nothing fits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from datetime import datetime

from controller.claim_queue import Queue
from controller.fleet import Fleet
from controller.objects import Claim
from controller.search import slices_of
from controller.wishes import Ask, Refusal
from driver.kube.clock import Clock
from driver.placement import EQUAL, FULL, Weights
from driver.placement.measure import CLIQUE_CLASS

log = logging.getLogger(__name__)

PRIOR = 5.0
"""GPUs; as if so much had been asked for in every class before: the first claims of a new cluster say little."""

FLOOR = 0.02
"""The part of all that was asked for that every class is given besides, whether anybody asked for it or not."""

PAUSE_S = 600.0
"""New weights rank everything anew and take offers back, so they come seldom,"""

CLEARLY = 1.5
"""and only where some class counts so many times as much, or as little, as before against one never asked for."""


class Popularity:
    """What was asked for in each class, in GPUs; it counts half after ``half_life_s`` seconds."""

    def __init__(self, half_life_s: float, clock: Clock) -> None:
        self._half_life_s = half_life_s
        self._clock = clock
        self._asked: dict[str, float] = {}
        self._as_of = clock.monotonic()

    def add(self, asked: Mapping[str, float], age_s: float = 0.0) -> None:
        """GPUs by class, asked for ``age_s`` seconds ago."""
        self._decay()
        for name, gpus in asked.items():
            self._asked[name] = self._asked.get(name, 0.0) + gpus * self._worth(age_s)

    def weights(self) -> Weights:
        """What each class counts: what was asked for in it, PRIOR, and FLOOR of what was asked for in all."""
        self._decay()
        least = PRIOR + FLOOR * sum(self._asked.values())
        return Weights({name: gpus + least for name, gpus in self._asked.items()}, default=least)

    def _decay(self) -> None:
        now = self._clock.monotonic()
        worth = self._worth(now - self._as_of)
        self._asked = {name: gpus * worth for name, gpus in self._asked.items()}
        self._as_of = now

    def _worth(self, age_s: float) -> float:
        return float(0.5 ** (max(age_s, 0.0) / self._half_life_s))


class Learnt:
    """The weights in force: those of a popularity as it was when it last differed clearly."""

    def __init__(self, popularity: Popularity, clock: Clock) -> None:
        self.weights = EQUAL
        self._popularity = popularity
        self._clock = clock
        self._look_at = clock.monotonic()

    def renew(self) -> bool:
        """Look, unless that was less than PAUSE_S ago, whether they hold still; says whether they are others now."""
        if self._clock.monotonic() < self._look_at:
            return False
        self._look_at = self._clock.monotonic() + PAUSE_S
        found = self._popularity.weights()
        if not differ(self.weights, found):
            return False
        self.weights = found
        return True


def differ(one: Weights, other: Weights) -> bool:
    """Whether a class counts clearly more or less in one than in the other, as a multiple of the default."""
    for name in one.of_class.keys() | other.of_class.keys():
        before, after = one[name] / one.default, other[name] / other.default
        if max(before, after) >= CLEARLY * min(before, after):
            return True
    return False


class Learner:
    """Learns from the claims of the cluster, each counted once: when it waits for devices, or already has them.

    After a restart it begins with the claims that there are, by their age.
    """

    def __init__(self, hours: float, clock: Clock) -> None:
        self._clock = clock
        self._popularity = Popularity(hours * 3600, clock)
        self._learnt = Learnt(self._popularity, clock)
        self._seen: set[str] = set()

    @property
    def weights(self) -> Weights:
        return self._learnt.weights

    def learn(self, queue: Queue) -> bool:
        """Count the claims that are new; says whether the weights are others now."""
        now = self._clock.now()
        for claim in self._new(queue):
            self._popularity.add(classes_of(queue, claim), _age_s(claim, now))
        changed = self._learnt.renew()
        if changed:
            # Only now and then: it takes a look at every claim.
            self._seen &= {claim.metadata.uid for claim in queue.cluster.claims}
            told = {name: round(weight / self.weights.default, 1) for name, weight in self.weights.of_class.items()}
            log.info("class weights follow what claims ask for", extra={"weights": told, "others": 1})
        return changed

    def _new(self, queue: Queue) -> Iterator[Claim]:
        waiting = {each.claim.metadata.uid for each in queue.waiting if not each.made_up}
        for claim in queue.cluster.claims:
            uid = claim.metadata.uid
            if uid not in self._seen and (claim.status.allocation is not None or uid in waiting):
                self._seen.add(uid)
                yield claim


def classes_of(queue: Queue, claim: Claim) -> dict[str, float]:
    """What ``claim`` asks for in each class, in GPUs; where several classes would do, the same part of each.

    Of a request with alternatives the first counts. One for as many full GPUs as a clique has asks for a clique.
    Requests for all devices of a node say nothing of how many, and are left out.
    """
    wishes = queue.wishes_of(claim)
    found: dict[str, float] = {}
    if isinstance(wishes, Refusal) or not wishes:
        return found
    fleet = queue.survey.fleet
    for ask in wishes[0].asks:
        kinds = queue.survey.kinds(ask.selector, frozenset(fleet.nodes))
        examples = {kind.key: fleet.gpus[min(gpus)].state for kind, gpus in kinds.items()}
        for key, state in examples.items():
            name = CLIQUE_CLASS if key == FULL and _is_clique(fleet, ask) else str(key)
            gpus = (ask.count or 0) * slices_of(state, key) / state.geometry.slices
            found[name] = found.get(name, 0.0) + gpus / len(examples)
    return found


def _is_clique(fleet: Fleet, ask: Ask) -> bool:
    return ask.count in fleet.clique_sizes and ask.count != 1


def _age_s(claim: Claim, now: datetime) -> float:
    created = claim.metadata.creation_timestamp
    return (now - datetime.fromisoformat(created)).total_seconds() if created else 0.0
