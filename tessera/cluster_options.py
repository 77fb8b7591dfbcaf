"""Options and client that the commands for administrators share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from driver.config.flags import DEFAULT_DRIVER
from driver.errors import ApiError, EnvironmentFault
from driver.kube.heartbeat import HEARTBEAT, LEAVING

if TYPE_CHECKING:
    from driver.kube.client import KubeClient

DEFAULT_KUBECONFIG = Path("~/.kube/config")
"""kubectl's default, too."""

with_kubeconfig = click.option(
    "--kubeconfig",
    envvar="KUBECONFIG",
    type=click.Path(path_type=Path),
    help=f"Default: $KUBECONFIG, {DEFAULT_KUBECONFIG}, or the pod's own ServiceAccount.",
)
with_driver_name = click.option(
    "--driver-name", default=DEFAULT_DRIVER, show_default=True, help="The DRA driver's name."
)


def client_of(kubeconfig: Path | None, user_agent: str) -> KubeClient:
    """A client of the cluster that ``--kubeconfig`` or its default names. Raises EnvironmentFault without one."""
    from driver.kube.client import KubeClient
    from driver.kube.credentials import POD, load_configuration

    default, source = DEFAULT_KUBECONFIG.expanduser(), _kubeconfig_source()
    if kubeconfig is None and default.exists():
        kubeconfig, source = default, "the default kubeconfig"
    if kubeconfig is None and POD not in os.environ:
        raise EnvironmentFault(
            f"no kubeconfig: neither --kubeconfig, $KUBECONFIG nor {DEFAULT_KUBECONFIG}, and not in a pod"
        )
    return KubeClient(load_configuration(kubeconfig, named=source), user_agent)


def unreachable(error: ApiError) -> EnvironmentFault:
    """The error of a command whose cluster does not answer."""
    return EnvironmentFault(f"the cluster can't be reached: {error}; check --kubeconfig")


def cancel_uninstall_command(namespace: str) -> str:
    """The command after which nodes publish again though an uninstallation has begun."""
    return f"kubectl -n {namespace} annotate lease {HEARTBEAT} {LEAVING}-"


def _kubeconfig_source() -> str:
    """Where the running command has its kubeconfig from."""
    context = click.get_current_context(silent=True)
    source = context.get_parameter_source("kubeconfig") if context else None
    return "$KUBECONFIG" if source is ParameterSource.ENVIRONMENT else "--kubeconfig"
