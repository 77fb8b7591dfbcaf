"""What the commands for admins have in common: which cluster they ask, and as whom."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from driver.config.settings import DEFAULT_DRIVER
from driver.errors import ApiError, EnvironmentFault

if TYPE_CHECKING:
    from driver.kube.transport import KubeClient

USUAL = Path("~/.kube/config")
"""Where kubectl looks, too."""

with_kubeconfig = click.option(
    "--kubeconfig",
    envvar="KUBECONFIG",
    type=click.Path(path_type=Path),
    help=f"Default: $KUBECONFIG, {USUAL}, or the pod's own ServiceAccount.",
)
with_driver_name = click.option(
    "--driver-name", default=DEFAULT_DRIVER, show_default=True, help="The DRA driver's name."
)


def client_of(kubeconfig: Path | None, user_agent: str) -> KubeClient:
    """Asks the cluster that ``--kubeconfig`` or its default names. Raises EnvironmentFault where there is none."""
    from driver.kube.access import POD, load_configuration
    from driver.kube.transport import KubeClient

    usual, named = USUAL.expanduser(), _named()
    if kubeconfig is None and usual.exists():
        kubeconfig, named = usual, "the usual kubeconfig"
    if kubeconfig is None and POD not in os.environ:
        raise EnvironmentFault(f"no kubeconfig: neither --kubeconfig, $KUBECONFIG nor {USUAL}, and this is no pod")
    return KubeClient(load_configuration(kubeconfig, named=named), user_agent)


def unasked(error: ApiError) -> EnvironmentFault:
    """What it means for a command that the cluster did not answer."""
    return EnvironmentFault(f"the cluster can't be asked: {error}; is --kubeconfig the right one?")


def _named() -> str:
    """What the running command has its kubeconfig from."""
    context = click.get_current_context(silent=True)
    source = context.get_parameter_source("kubeconfig") if context else None
    return "$KUBECONFIG" if source is ParameterSource.ENVIRONMENT else "--kubeconfig"
