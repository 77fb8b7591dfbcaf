"""Whether nodes publish the held devices of GPUs without offers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping

from controller.cluster.fleet import Fleet
from driver.kube.types import GpuNodePlan
from driver.model.offer import Offer
from driver.model.plan import MODE_SPREAD_SECONDS, PublishHeld

RETURN_SHARE = 0.8
"""A cluster near the limit of GPUs must not change to and fro as nodes come and go."""


class HeldPublication:
    """Which nodes publish the held devices of GPUs without offers.

    A node changes at a random moment of ``MODE_SPREAD_SECONDS``: each slice update wakes every pending pod.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, spread: Callable[[], float] = random.random
    ) -> None:
        self._clock = clock
        self._spread = spread
        self._modes: dict[str, PublishHeld] = {}
        self._due: dict[str, float] = {}
        """When nodes change to the other mode."""

    def decide(
        self,
        gpus: int,
        most_gpus: int | None,
        plans: Mapping[str, GpuNodePlan],
        nodes: Collection[str],
        requested: Collection[str],
    ) -> Mapping[str, PublishHeld]:
        """The mode of each of ``nodes``; ``requested`` are those whose held devices a pending claim matches.

        ``most_gpus``: all nodes publish them in clusters of at most so many GPUs, in larger ones none; None: always
        all. A new leader starts from the modes in ``plans``.
        """
        now = self._clock()
        of_cluster = self._mode_of_cluster(gpus, most_gpus, plans)
        modes = {name: self._modes.get(name) or _mode(plans.get(name), of_cluster) for name in nodes}
        self._modes = modes | {name: PublishHeld.ALWAYS for name in requested if name in modes}
        differing = {name for name, mode in self._modes.items() if mode is not of_cluster} - {*requested}
        self._due = {name: self._due.get(name) or now + MODE_SPREAD_SECONDS * self._spread() for name in differing}
        for name in [name for name, due in self._due.items() if due <= now]:
            self._modes[name] = of_cluster
            del self._due[name]
        return self._modes

    @property
    def next_s(self) -> float | None:
        """Seconds until the next node changes; None: none is due."""
        return max(0.0, min(self._due.values()) - self._clock()) if self._due else None

    def _mode_of_cluster(self, gpus: int, most_gpus: int | None, plans: Mapping[str, GpuNodePlan]) -> PublishHeld:
        """The mode of the cluster. It returns to ALWAYS only when clearly fewer GPUs are left."""
        if most_gpus is None:
            return PublishHeld.ALWAYS
        if gpus <= most_gpus * RETURN_SHARE:
            return PublishHeld.ALWAYS
        was_larger = any(plan.spec.publish_held is PublishHeld.BESIDE_OFFERS for plan in plans.values())
        return PublishHeld.BESIDE_OFFERS if gpus > most_gpus or was_larger else PublishHeld.ALWAYS


def first_offers(offers: Collection[Offer], fleet: Fleet, plans: Mapping[str, GpuNodePlan]) -> dict[Offer, str]:
    """Those of ``offers``, with their nodes, whose GPUs may be unpublished: plans offer nothing of them so far."""
    offering = {
        name: {text.partition("/")[0] for text in plans[name].spec.offers}
        for name in {fleet.gpus[offer.gpu].node for offer in offers}
        if name in plans and plans[name].spec.leaves_out_held
    }
    nodes = ((offer, fleet.gpus[offer.gpu].node) for offer in offers)
    return {offer: node for offer, node in nodes if node in offering and offer.gpu not in offering[node]}


def _mode(plan: GpuNodePlan | None, otherwise: PublishHeld) -> PublishHeld:
    return otherwise if plan is None else plan.spec.publish_held
