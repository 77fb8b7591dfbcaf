"""Metrics, and liveness and readiness probes of the node plugin."""
