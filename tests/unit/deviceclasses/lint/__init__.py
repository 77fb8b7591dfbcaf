"""Unit tests of the rules of lint."""
