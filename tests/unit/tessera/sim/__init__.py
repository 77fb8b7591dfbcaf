"""Unit tests of tessera sim."""
