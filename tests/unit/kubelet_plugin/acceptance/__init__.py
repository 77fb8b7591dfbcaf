"""Unit tests of the acceptance test."""
