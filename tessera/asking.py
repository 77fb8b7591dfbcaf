"""What the commands for admins have in common: which cluster they ask, and as whom."""

from __future__ import annotations

from pathlib import Path

import click

from driver.config.settings import DEFAULT_DRIVER
from driver.kube.transport import KubeClient, load_configuration

USUAL = Path("~/.kube/config")
"""Where kubectl looks, too."""

with_kubeconfig = click.option(
    "--kubeconfig",
    envvar="KUBECONFIG",
    type=click.Path(path_type=Path),
    help=f"Default: {USUAL}, or the pod's own ServiceAccount.",
)
with_driver_name = click.option(
    "--driver-name", default=DEFAULT_DRIVER, show_default=True, help="The DRA driver's name."
)


def client_of(kubeconfig: Path | None, user_agent: str) -> KubeClient:
    """Asks the cluster that ``--kubeconfig`` or its default names. Raises EnvironmentFault where there is none."""
    usual = USUAL.expanduser()
    return KubeClient(load_configuration(kubeconfig or (usual if usual.exists() else None)), user_agent)
