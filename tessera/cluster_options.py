"""Options and client that the commands for administrators share."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.core import ParameterSource

from driver.config.shared_flags import DEFAULT_DRIVER
from driver.errors import NOT_FOUND, ApiError, EnvironmentFault
from driver.kube.client import KubeClient
from driver.kube.controller_heartbeat import HEARTBEAT, LEAVING
from driver.kube.credentials import POD, load_configuration
from driver.kube.reads import read_all
from driver.kube.types import GpuNodePlan
from driver.model.plan import PATH

DEFAULT_KUBECONFIG = Path("~/.kube/config")

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
    context = click.get_current_context(silent=True)
    given = context.get_parameter_source("kubeconfig") if context else None
    default = DEFAULT_KUBECONFIG.expanduser()
    source = "$KUBECONFIG" if given is ParameterSource.ENVIRONMENT else "--kubeconfig"
    if kubeconfig is None and default.exists():
        kubeconfig, source = default, "the default kubeconfig"
    if kubeconfig is None and POD not in os.environ:
        raise EnvironmentFault(
            f"no kubeconfig: neither --kubeconfig, $KUBECONFIG nor {DEFAULT_KUBECONFIG}, and not in a pod"
        )
    return KubeClient(load_configuration(kubeconfig, named=source), user_agent)


def find_plans(client: KubeClient) -> list[GpuNodePlan] | None:
    """All GpuNodePlans; None if their CustomResourceDefinition is not installed. Raises ApiError and MsgspecError."""
    try:
        return list(read_all(client, PATH, GpuNodePlan))
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
    return None


def cancel_uninstall_command(namespace: str) -> str:
    """The command after which nodes publish again though an uninstallation has begun."""
    return f"kubectl -n {namespace} annotate lease {HEARTBEAT} {LEAVING}-"
