"""The functions of Kubernetes' CEL environment (1.37: what its API server accepts in a selector), by theme."""

# Each module declares its functions (``registry.FUNCTIONS``).
from deviceclasses.cel.library import lists_and_optionals, operators_and_conversions, quantity, semver, text  # noqa: F401
