"""The functions of Kubernetes' CEL environment (1.37, what its API server accepts for a selector), by theme."""

from deviceclasses.cel.library import conversions, lists, network, operators, optionals, quantity, semver, text, times

__all__ = ["conversions", "lists", "network", "operators", "optionals", "quantity", "semver", "text", "times"]
