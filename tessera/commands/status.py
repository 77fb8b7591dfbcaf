"""``tessera status``: checks the installation, with a remedy for each problem."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import click

from tessera.cluster_options import ListOnceClient, access_of, with_driver_name, with_kubeconfig
from tessera.status import installation, nodes, processes, stuck_claims
from tessera.status.snapshot import NAMESPACE, CheckOutput, Listing, Problem, SnapshotReader, StatusSnapshot
from tessera.tables_and_drawings import columns, counted, printable, show, with_output


class CheckState(StrEnum):
    """State of a check, by the name that people see."""

    OK = "ok"
    PROBLEM = "look"
    UNREAD = "unread"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check: a summary, findings, and the lists that it needs but that can't be read (``unread``)."""

    check: str
    summary: str
    findings: tuple[Problem, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def state(self) -> CheckState:
        if self.findings:
            return CheckState.PROBLEM
        return CheckState.UNREAD if self.unread else CheckState.OK


class StatusCheck(NamedTuple):
    """A check. It does not run if a list that it ``needs`` can't be read; it runs without lists that it ``uses``. In
    both cases its state is unread."""

    run: Callable[[StatusSnapshot], CheckOutput]
    needs: tuple[Listing, ...] = ()
    uses: tuple[Listing, ...] = ()


CHECKS: Mapping[str, StatusCheck] = {
    "API server": StatusCheck(installation.api),
    "definition": StatusCheck(installation.definition, (Listing.PLANS,)),
    "classes": StatusCheck(installation.classes, (Listing.CLASSES,), (Listing.CLAIMS,)),
    "policies": StatusCheck(installation.policies, (Listing.POLICIES, Listing.BINDINGS)),
    "controller": StatusCheck(processes.controller, (), (Listing.LEASES, Listing.PODS)),
    "node plugins": StatusCheck(processes.plugins, (), (Listing.SLICES, Listing.NODES, Listing.PODS)),
    "versions": StatusCheck(processes.versions, (), (Listing.PODS,)),
    "directories": StatusCheck(processes.directories, (Listing.EVENTS,)),
    "slices": StatusCheck(nodes.slices, (Listing.SLICES,)),
    "devices": StatusCheck(nodes.devices, (Listing.SLICES, Listing.CLAIMS)),
    "claims": StatusCheck(
        stuck_claims.pending,
        (Listing.PENDING,),
        (Listing.EVENTS,),
    ),
    "starts": StatusCheck(stuck_claims.starts, (Listing.PENDING, Listing.PLANS)),
    "releases": StatusCheck(stuck_claims.releases, (Listing.PENDING,)),
    "health": StatusCheck(nodes.health, (Listing.SLICES,), (Listing.PLANS, Listing.PENDING)),
    "offers": StatusCheck(nodes.offers, (Listing.PLANS, Listing.SLICES)),
    "mode": StatusCheck(nodes.mode, (Listing.PLANS, Listing.SLICES), (Listing.LEASES,)),
    "settings": StatusCheck(installation.configurations, (Listing.PLANS,)),
    "clocks": StatusCheck(installation.clocks, (), (Listing.LEASES, Listing.NODE_LEASES)),
    "neighbours": StatusCheck(nodes.other_drivers, (Listing.NODES, Listing.SLICES, Listing.PLANS, Listing.CLAIMS)),
}

NOT_INSTALLED: Mapping[str, StatusCheck] = {
    "API server": StatusCheck(installation.api),
    "installation": StatusCheck(installation.not_installed),
}
"""The checks of a cluster without Tessera."""


def run_checks(snapshot: StatusSnapshot) -> list[CheckResult]:
    checks = NOT_INSTALLED if installation.is_not_installed(snapshot) else CHECKS
    return [_result(name, check, snapshot) for name, check in checks.items()]


def _result(name: str, check: StatusCheck, snapshot: StatusSnapshot) -> CheckResult:
    missing = tuple(str(listing) for listing in (*check.needs, *check.uses) if not snapshot.has_read(listing))
    parts = list(check.run(snapshot)) if snapshot.has_read(*check.needs) else []
    summary = [part for part in parts if isinstance(part, str)]
    if missing:
        summary.append(f"{', '.join(missing)} can't be listed")
    return CheckResult(name, ", ".join(summary), tuple(part for part in parts if isinstance(part, Problem)), missing)


STATE_COLOURS = {CheckState.OK: "green", CheckState.PROBLEM: "red", CheckState.UNREAD: "yellow"}


@click.command()
@with_kubeconfig
@with_driver_name
@click.option("--namespace", default=NAMESPACE, show_default=True, help="Namespace of the release.")
@with_output("table", "json")
def status(kubeconfig: Path | None, driver_name: str, namespace: str, output: str) -> None:
    """Check whether the installation works, with a remedy for each problem.

    Exit code 0: no problem; 1: a problem, or something could not be read; 2: Tessera is not in --namespace.

    \b
    Examples:
      tessera status
      tessera status --kubeconfig ~/.kube/prod -o json
    """
    client = ListOnceClient(access_of(kubeconfig), "tessera-command")
    results = run_checks(SnapshotReader(client, driver_name, namespace).read())
    show(output, as_json(results), as_text(results))
    sys.exit(0 if all(result.state is CheckState.OK for result in results) else 1)


def as_text(results: Sequence[CheckResult]) -> str:
    states = {state: click.style(state, fg=colour) for state, colour in STATE_COLOURS.items()}
    rows = [[result.check, states[result.state], printable(result.summary)] for result in results]
    problems = [(result.check, finding) for result in results for finding in result.findings]
    unread = sum(result.state is CheckState.UNREAD for result in results)
    table = columns(["CHECK", "STATE", "SUMMARY"], rows)
    lines = [table, ""]
    for check, finding in problems:
        about, message, remedy = map(printable, (finding.about, finding.message, finding.remedy))
        lines.append(f"{check}: {click.style(about, bold=True)} {message}\n    -> {remedy}")
    return "\n".join([*lines, _verdict(len(problems), unread)])


def as_json(results: Sequence[CheckResult]) -> list[dict[str, object]]:
    return [
        {
            "check": result.check,
            "ok": result.state is CheckState.OK,
            "state": result.state.value,
            "summary": result.summary,
            "findings": [{"about": f.about, "message": f.message, "remedy": f.remedy} for f in result.findings],
        }
        for result in results
    ]


def _verdict(found: int, unread: int) -> str:
    if not found and not unread:
        return click.style("No problems found.", fg="green")
    parts = [f"{counted(found, 'problem')}"] if found else []
    if unread:
        parts.append(f"{counted(unread, 'check')} could not read everything")
    return click.style("; ".join(parts) + ".", fg="red" if found else "yellow")
