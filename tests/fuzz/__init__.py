"""Hostile objects against the controller's reading and deciding: ``python -m tests.fuzz --help``."""
