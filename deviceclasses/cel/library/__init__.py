"""The functions of Kubernetes' CEL environment (1.37: what its API server accepts in a selector), by theme."""

from deviceclasses.cel.library import collections, network, operators, quantity, semver, text, times

__all__ = ["collections", "network", "operators", "quantity", "semver", "text", "times"]
