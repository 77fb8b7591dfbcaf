"""Which placement hurts least: the fragmentation measure, the ranking by it, the order of offers (pure).

``occupancy`` contains the geometry and occupancy of a GPU; ``measure`` is FGD for MIG; ``ranking`` compares placements
within and between cliques, and sorts the offers of one node.
"""
