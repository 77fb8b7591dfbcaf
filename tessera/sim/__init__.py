"""``tessera sim``: simulated nodes, faults on them, and fleets of them."""
