"""Demand: the devices that pending claims need, and the nodes that can provide them."""
