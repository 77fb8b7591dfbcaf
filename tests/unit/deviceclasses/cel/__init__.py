"""Unit tests of the CEL engine."""
