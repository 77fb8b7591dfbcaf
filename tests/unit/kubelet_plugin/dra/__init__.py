"""Unit tests of the gRPC services."""
