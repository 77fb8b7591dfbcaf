"""Hostile objects against reading, deciding and answering: ``python -m tests.fuzz --help``."""
