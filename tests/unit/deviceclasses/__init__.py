"""Unit tests of the packages under deviceclasses."""
