"""The table of checks of ``tessera status``.

A check does not run if a list that it ``needs`` can't be read; it runs without lists that it ``uses``. In both cases
its state is unread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tessera.status import claims, cluster, health, nodes, processes
from tessera.status.finding import CheckOutput, Finding, Result
from tessera.status.snapshot import Listing, StatusSnapshot


class Check(NamedTuple):
    run: Callable[[StatusSnapshot], CheckOutput]
    needs: tuple[Listing, ...] = ()
    uses: tuple[Listing, ...] = ()


CHECKS: Mapping[str, Check] = {
    "API server": Check(cluster.api),
    "definition": Check(cluster.definition, (Listing.PLANS,)),
    "classes": Check(cluster.classes, (Listing.CLASSES,), (Listing.CLAIMS,)),
    "policies": Check(cluster.policies, (Listing.POLICIES, Listing.BINDINGS)),
    "controller": Check(processes.controller, (), (Listing.LEASES, Listing.PODS)),
    "node plugins": Check(processes.plugins, (), (Listing.SLICES, Listing.NODES, Listing.PODS)),
    "versions": Check(processes.versions, (), (Listing.PODS,)),
    "directories": Check(processes.directories, (Listing.EVENTS,)),
    "slices": Check(nodes.slices, (Listing.SLICES,)),
    "devices": Check(nodes.devices, (Listing.SLICES, Listing.CLAIMS)),
    "claims": Check(
        claims.pending, (Listing.CLAIMS, Listing.EVENTS), (Listing.LEASES, Listing.PENDING_PODS, Listing.CLASSES)
    ),
    "health": Check(health.health, (Listing.SLICES,), (Listing.PLANS,)),
    "mode": Check(nodes.mode, (Listing.PLANS, Listing.SLICES), (Listing.LEASES,)),
    "clocks": Check(cluster.clocks, (), (Listing.LEASES, Listing.NODE_LEASES)),
    "neighbours": Check(nodes.other_drivers, (Listing.NODES, Listing.SLICES, Listing.PLANS, Listing.CLAIMS)),
}
"""Checks by the name that people see."""

NOT_INSTALLED: Mapping[str, Check] = {"API server": Check(cluster.api), "installation": Check(cluster.not_installed)}
"""The checks of a cluster without Tessera."""


def run_checks(snapshot: StatusSnapshot) -> list[Result]:
    """The result of every check, in the order of the table."""
    checks = NOT_INSTALLED if cluster.is_not_installed(snapshot) else CHECKS
    return [_result(name, check, snapshot) for name, check in checks.items()]


def _result(name: str, check: Check, snapshot: StatusSnapshot) -> Result:
    missing = tuple(str(each) for each in (*check.needs, *check.uses) if not snapshot.has_read(each))
    parts = list(check.run(snapshot)) if snapshot.has_read(*check.needs) else []
    summary = [part for part in parts if isinstance(part, str)]
    if missing:
        summary.append(f"{', '.join(missing)} can't be listed")
    return Result(name, ", ".join(summary), tuple(part for part in parts if isinstance(part, Finding)), missing)
