"""``tessera status``: one screen that tells whether the installation is sound, and what to do where it is not."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from driver.errors import ApiError, EnvironmentFault
from tessera.asking import client_of, with_driver_name, with_kubeconfig
from tessera.output import columns
from tessera.status_checks import look_at
from tessera.status_finding import Finding, Result
from tessera.status_picture import Picture, Reader

USER_AGENT = "tessera-command"
FINDINGS = 1
"""Exit code where something has to be dealt with."""


@click.command()
@with_kubeconfig
@with_driver_name
@click.option("--namespace", default="tessera", show_default=True, help="Where the processes and their Leases are.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def status(kubeconfig: Path | None, driver_name: str, namespace: str, output: str) -> None:
    """Tell whether the installation is sound, and what to do about what is not.

    Only reads, from the API server alone. Ends with 0 where all is well, 1 where something has to be dealt with.

    \b
    Examples:
      tessera status
      tessera status --kubeconfig ~/.kube/prod -o json
      tessera status --driver-name gpu.nvidia.com --namespace gpus
    """
    results = look_at(read(kubeconfig, driver_name, namespace))
    click.echo(json.dumps(as_json(results), indent=2) if output == "json" else as_text(results))
    sys.exit(FINDINGS if any(result.findings for result in results) else 0)


def read(kubeconfig: Path | None, driver_name: str, namespace: str) -> Picture:
    """Everything that is looked at. Raises EnvironmentFault where there is no cluster to ask."""
    client = client_of(kubeconfig, USER_AGENT)
    try:
        return Reader(client, driver_name, namespace).read()
    except ApiError as error:
        raise EnvironmentFault(f"the cluster can't be asked: {error}; is --kubeconfig the right one?") from error


def as_text(results: Sequence[Result]) -> str:
    """A line a check, then what to do."""
    rows = [[result.check, _state(result), result.summary] for result in results]
    found = [(result.check, finding) for result in results for finding in result.findings]
    return "\n".join(
        [columns(["CHECK", "STATE", "WHAT"], rows), "", *(_told(*each) for each in found), _verdict(found)]
    )


def as_json(results: Sequence[Result]) -> list[dict[str, object]]:
    """One object a check."""
    return [
        {
            "check": result.check,
            "ok": not result.findings,
            "summary": result.summary,
            "findings": [{"about": f.about, "message": f.message, "remedy": f.remedy} for f in result.findings],
        }
        for result in results
    ]


def _state(result: Result) -> str:
    return click.style("look", fg="red") if result.findings else click.style("ok", fg="green")


def _told(check: str, finding: Finding) -> str:
    return f"{check}: {click.style(finding.about, bold=True)} {finding.message}\n    -> {finding.remedy}"


def _verdict(found: Sequence[tuple[str, Finding]]) -> str:
    if not found:
        return click.style("All is well.", fg="green")
    return click.style(f"{len(found)} thing{'s' if len(found) > 1 else ''} to deal with.", fg="red")
