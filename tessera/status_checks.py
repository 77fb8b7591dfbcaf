"""The table of checks of ``tessera status``: each looks at one thing, and says what to do where it is not in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from tessera import status_cluster as cluster
from tessera import status_nodes as nodes
from tessera.status_finding import Finding, Result, Told
from tessera.status_picture import Picture

CHECKS: Mapping[str, Callable[[Picture], Told]] = {
    "API server": cluster.api,
    "definition": cluster.definition,
    "classes": cluster.classes,
    "policies": cluster.policies,
    "controller": cluster.controller,
    "node plugins": nodes.plugins,
    "versions": cluster.versions,
    "slices": nodes.slices,
    "devices": nodes.held,
    "health": nodes.health,
    "mode": nodes.mode,
    "clocks": cluster.clocks,
    "neighbours": nodes.neighbours,
}
"""By the name on the screen."""


def look_at(picture: Picture) -> list[Result]:
    """Every check, in the order of the screen."""
    return [_result(name, check(picture)) for name, check in CHECKS.items()]


def _result(name: str, told: Iterable[str | Finding]) -> Result:
    parts = list(told)
    summary = ", ".join(part for part in parts if isinstance(part, str))
    return Result(name, summary, tuple(part for part in parts if isinstance(part, Finding)))
