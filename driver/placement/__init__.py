"""Which placement hurts least: the fragmentation measure, the ranking by it, the order of offers (pure).

``geometry`` and ``state`` are what a GPU can hold and holds; ``measure`` is FGD for MIG; ``ranking`` compares
placements in and between cliques and says why; ``order`` sorts what one node offers.
"""

from driver.placement.measure import EQUAL, Measure, Weights
from driver.placement.order import order_offers
from driver.placement.ranking import Ranked, RankedClique, RankedGpu, Ranking, Terms
from driver.placement.state import FULL, SHARE, GpuState, Key, Spot, key_of, spot_of

__all__ = [
    "EQUAL",
    "FULL",
    "SHARE",
    "GpuState",
    "Key",
    "Measure",
    "Ranked",
    "RankedClique",
    "RankedGpu",
    "Ranking",
    "Spot",
    "Terms",
    "Weights",
    "key_of",
    "order_offers",
    "spot_of",
]
