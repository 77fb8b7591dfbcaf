"""Unit tests of the checkpoint."""
