"""``tessera status``: one screen that tells whether the installation is sound, and what to do where it is not."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from driver.errors import ApiError
from tessera.asking import client_of, unasked, with_driver_name, with_kubeconfig
from tessera.output import columns
from tessera.status_checks import look_at
from tessera.status_finding import Finding, Result, State, some
from tessera.status_picture import Picture
from tessera.status_reader import NAMESPACE, Reader

USER_AGENT = "tessera-command"
FINDINGS = 1
"""Exit code where something has to be dealt with, or could not be read."""

COLOURS = {State.OK: "green", State.LOOK: "red", State.UNREAD: "yellow"}


@click.command()
@with_kubeconfig
@with_driver_name
@click.option("--namespace", default=NAMESPACE, show_default=True, help="Where the processes and their Leases are.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def status(kubeconfig: Path | None, driver_name: str, namespace: str, output: str) -> None:
    """Tell whether the installation is sound, and what to do about what is not.

    Only reads, from the API server alone. Ends with 0 where all is well, 1 where something has to be dealt with or
    could not be read, 2 where --namespace is not Tessera's.

    \b
    Examples:
      tessera status
      tessera status --kubeconfig ~/.kube/prod -o json
      tessera status --driver-name gpu.nvidia.com --namespace gpus
    """
    results = look_at(read(kubeconfig, driver_name, namespace))
    click.echo(json.dumps(as_json(results), indent=2) if output == "json" else as_text(results))
    sys.exit(0 if all(result.state is State.OK for result in results) else FINDINGS)


def read(kubeconfig: Path | None, driver_name: str, namespace: str) -> Picture:
    """Everything that is looked at.

    Raises EnvironmentFault where there is no cluster to ask, UsageError where Tessera is in another namespace.
    """
    client = client_of(kubeconfig, USER_AGENT)
    try:
        return Reader(client, driver_name, namespace).read()
    except ApiError as error:
        raise unasked(error) from error


def as_text(results: Sequence[Result]) -> str:
    """A line a check, then what to do."""
    rows = [[result.check, click.style(result.state, fg=COLOURS[result.state]), result.summary] for result in results]
    found = [(result.check, finding) for result in results for finding in result.findings]
    unread = sum(result.state is State.UNREAD for result in results)
    table = columns(["CHECK", "STATE", "WHAT"], rows)
    return "\n".join([table, "", *(_told(*each) for each in found), _verdict(len(found), unread)])


def as_json(results: Sequence[Result]) -> list[dict[str, object]]:
    """One object a check."""
    return [
        {
            "check": result.check,
            "ok": result.state is State.OK,
            "state": result.state.value,
            "summary": result.summary,
            "findings": [{"about": f.about, "message": f.message, "remedy": f.remedy} for f in result.findings],
        }
        for result in results
    ]


def _told(check: str, finding: Finding) -> str:
    return f"{check}: {click.style(finding.about, bold=True)} {finding.message}\n    -> {finding.remedy}"


def _verdict(found: int, unread: int) -> str:
    if not found and not unread:
        return click.style("All is well.", fg="green")
    parts = [f"{some(found, 'thing')} to deal with"] if found else []
    if unread:
        parts.append(f"{some(unread, 'check')} without all that {'it needs' if unread == 1 else 'they need'}")
    return click.style("; ".join(parts) + ".", fg="red" if found else "yellow")
