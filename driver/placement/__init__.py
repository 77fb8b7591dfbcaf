"""Which placement hurts least: the fragmentation measure, the ranking by it, the order of offers (pure).

``state`` contains the geometry and occupancy of a GPU; ``measure`` is FGD for MIG; ``ranking`` compares placements
within and between cliques, and sorts the offers of one node.
"""

from driver.placement.measure import EQUAL, Measure, Weights
from driver.placement.ranking import Ranked, RankedClique, RankedGpu, Ranking, Terms, order_offers
from driver.placement.state import FULL, SHARE, GpuState, OfferKind, Spot, key_of, spot_of

__all__ = [
    "EQUAL",
    "FULL",
    "SHARE",
    "GpuState",
    "Measure",
    "OfferKind",
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
