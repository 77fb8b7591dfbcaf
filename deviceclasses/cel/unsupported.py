"""What Kubernetes accepts in a selector and Tessera refuses, since it would not evaluate it alike; with reasons."""

from __future__ import annotations

REASONS = {
    "format": "string.format is not evaluated by Tessera; join strings with + instead",
    "url": "url() is not evaluated by Tessera; use string functions instead",
    "isURL": "isURL() is not evaluated by Tessera; use string functions instead",
    "format.named": "named formats are not evaluated by Tessera; use matches() instead",
    "authorizer": "a selector has no authorizer",
}


def refusal(name: str) -> str | None:
    """Why a name is refused that Kubernetes knows; None for one that it does not know either."""
    first, _, rest = name.partition(".")
    return REASONS.get("format.named" if first == "format" and rest else name)
