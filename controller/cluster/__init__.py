"""The state of the cluster, read from the API server."""
