"""Talking to the API server: transport, list/watch cache, wire types."""
