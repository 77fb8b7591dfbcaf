"""Both planners, called in the same way: for pending claims, and the offers that are published at present."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from controller.cluster.unheld_devices import UnheldDevices
from controller.curation.counters_planner import CountersPlanner
from controller.curation.disjoint_planner import DisjointPlanner
from driver.model.offer import Offer
from driver.placement.ranking import Ranking
from tests.support.queues import Situation

Planned = Callable[[Situation, Iterable[Offer]], tuple[Offer, ...]]


def with_counters(there: Situation, published: Iterable[Offer] = ()) -> tuple[Offer, ...]:
    devices = UnheldDevices()
    devices.offered = {*published}
    return CountersPlanner(Ranking()).plan(there.queue, devices, ()).offers


def disjoint(there: Situation, published: Iterable[Offer] = ()) -> tuple[Offer, ...]:
    return DisjointPlanner(Ranking()).curate(there.queue, [*published], {}).offers


PLANNERS = pytest.mark.parametrize("planned", [with_counters, disjoint])
