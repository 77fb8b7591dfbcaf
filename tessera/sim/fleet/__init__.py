"""Simulated GPU nodes in one process, for ``tessera sim fleet``: the node plugin's own rules, no hardware."""
