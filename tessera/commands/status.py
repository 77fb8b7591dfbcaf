"""``tessera status``: checks the installation, with a remedy for each problem."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from driver.errors import ApiError
from tessera.cluster_options import client_of, unreachable, with_driver_name, with_kubeconfig
from tessera.output import columns
from tessera.status.checks import run_checks
from tessera.status.finding import CheckState, Finding, Result, counted
from tessera.status.snapshot import NAMESPACE, SnapshotReader, StatusSnapshot

USER_AGENT = "tessera-command"
FINDINGS = 1
"""Exit code if there is a finding, or if something could not be read."""

COLOURS = {CheckState.OK: "green", CheckState.PROBLEM: "red", CheckState.UNREAD: "yellow"}


@click.command()
@with_kubeconfig
@with_driver_name
@click.option("--namespace", default=NAMESPACE, show_default=True, help="Where the processes and their Leases are.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def status(kubeconfig: Path | None, driver_name: str, namespace: str, output: str) -> None:
    """Check whether the installation works, with a remedy for each problem.

    Only reads, and only from the API server. Exit code 0: no problem; 1: a problem, or something could not be read;
    2: Tessera is not in --namespace.

    \b
    Examples:
      tessera status
      tessera status --kubeconfig ~/.kube/prod -o json
      tessera status --driver-name gpu.nvidia.com --namespace gpus
    """
    results = run_checks(read(kubeconfig, driver_name, namespace))
    click.echo(json.dumps(as_json(results), indent=2) if output == "json" else as_text(results))
    sys.exit(0 if all(result.state is CheckState.OK for result in results) else FINDINGS)


def read(kubeconfig: Path | None, driver_name: str, namespace: str) -> StatusSnapshot:
    """Read the snapshot.

    Raises EnvironmentFault if there is no cluster to read from, UsageError if Tessera is in another namespace.
    """
    client = client_of(kubeconfig, USER_AGENT)
    try:
        return SnapshotReader(client, driver_name, namespace).read()
    except ApiError as error:
        raise unreachable(error) from error


def as_text(results: Sequence[Result]) -> str:
    """One line per check, then the findings with their remedies."""
    rows = [[result.check, click.style(result.state, fg=COLOURS[result.state]), result.summary] for result in results]
    found = [(result.check, finding) for result in results for finding in result.findings]
    unread = sum(result.state is CheckState.UNREAD for result in results)
    table = columns(["CHECK", "STATE", "WHAT"], rows)
    return "\n".join([table, "", *(_finding_text(*each) for each in found), _verdict(len(found), unread)])


def as_json(results: Sequence[Result]) -> list[dict[str, object]]:
    """One object per check."""
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


def _finding_text(check: str, finding: Finding) -> str:
    about, message, remedy = map(_printable, (finding.about, finding.message, finding.remedy))
    return f"{check}: {click.style(about, bold=True)} {message}\n    -> {remedy}"


def _printable(text: str) -> str:
    """Replace control characters: parts of the text come from tenants."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _verdict(found: int, unread: int) -> str:
    if not found and not unread:
        return click.style("All is well.", fg="green")
    parts = [f"{counted(found, 'problem')}"] if found else []
    if unread:
        parts.append(f"{counted(unread, 'check')} could not read everything")
    return click.style("; ".join(parts) + ".", fg="red" if found else "yellow")
