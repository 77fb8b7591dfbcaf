"""The table of checks of ``tessera status``: each looks at one thing, and says what to do where it is not in order.

What could not be read is neither good news nor bad: a check without what it ``needs`` says nothing else, and one
without what it ``uses`` concludes nothing from that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tessera import status_claims as claims
from tessera import status_cluster as cluster
from tessera import status_health as health
from tessera import status_nodes as nodes
from tessera import status_plugins as plugins
from tessera.status_finding import Finding, Result, Told
from tessera.status_picture import Picture, What


class Check(NamedTuple):
    look: Callable[[Picture], Told]
    needs: tuple[What, ...] = ()
    uses: tuple[What, ...] = ()


CHECKS: Mapping[str, Check] = {
    "API server": Check(cluster.api),
    "definition": Check(cluster.definition, (What.PLANS,)),
    "classes": Check(cluster.classes, (What.CLASSES,), (What.CLAIMS,)),
    "policies": Check(cluster.policies, (What.POLICIES, What.BINDINGS)),
    "controller": Check(cluster.controller, (), (What.LEASES, What.PODS)),
    "node plugins": Check(plugins.plugins, (), (What.SLICES, What.NODES, What.PODS)),
    "versions": Check(cluster.versions, (), (What.PODS,)),
    "slices": Check(nodes.slices, (What.SLICES,)),
    "devices": Check(nodes.held, (What.SLICES, What.CLAIMS)),
    "claims": Check(claims.waiting, (What.CLAIMS, What.EVENTS), (What.LEASES,)),
    "health": Check(health.health, (What.SLICES,), (What.PLANS,)),
    "mode": Check(nodes.mode, (What.PLANS, What.SLICES), (What.LEASES,)),
    "clocks": Check(cluster.clocks, (), (What.LEASES, What.NODE_LEASES)),
    "neighbours": Check(nodes.neighbours, (What.NODES, What.SLICES, What.PLANS, What.CLAIMS)),
}
"""By the name on the screen."""

NOWHERE: Mapping[str, Check] = {"API server": Check(cluster.api), "installation": Check(cluster.not_installed)}
"""All there is to say where Tessera isn't."""


def look_at(picture: Picture) -> list[Result]:
    """Every check, in the order of the screen."""
    checks = NOWHERE if cluster.is_nowhere(picture) else CHECKS
    return [_result(name, check, picture) for name, check in checks.items()]


def _result(name: str, check: Check, picture: Picture) -> Result:
    missing = tuple(str(what) for what in (*check.needs, *check.uses) if not picture.has_read(what))
    parts = list(check.look(picture)) if picture.has_read(*check.needs) else []
    said = [part for part in parts if isinstance(part, str)]
    if missing:
        said.append(f"{', '.join(missing)} can't be listed")
    return Result(name, ", ".join(said), tuple(part for part in parts if isinstance(part, Finding)), missing)
