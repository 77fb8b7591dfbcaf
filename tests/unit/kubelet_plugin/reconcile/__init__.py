"""Unit tests of retries, orphans and recovery."""
