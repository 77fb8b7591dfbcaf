"""Unit tests of the checks of tessera status."""
