"""Unit tests of the command and its packages."""
