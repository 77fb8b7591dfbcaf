"""Kubernetes' CEL for device selectors."""
