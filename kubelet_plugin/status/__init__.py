"""The status of ResourceClaims, and Kubernetes Events."""
