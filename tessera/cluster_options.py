"""Options and client that the commands for administrators share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlencode

import click
from click.core import ParameterSource

from driver.config.flag_values import DEFAULT_DRIVER
from driver.errors import NOT_FOUND, EnvironmentFault, UsageError, accepted_status
from driver.kube.client import KubeClient
from driver.kube.controller_heartbeat import HEARTBEAT, LEAVING
from driver.kube.credentials import POD, Access, load_configuration
from driver.kube.get_and_list import read_all
from driver.kube.types import GpuNodePlan
from driver.model.plan import PATH

DEFAULT_KUBECONFIG = Path("~/.kube/config")
UNKNOWN = "unknown"

with_kubeconfig = click.option(
    "--kubeconfig",
    envvar="KUBECONFIG",
    type=click.Path(path_type=Path),
    help=f"Default: $KUBECONFIG, {DEFAULT_KUBECONFIG}, or the pod's own ServiceAccount.",
)
with_driver_name = click.option(
    "--driver-name", default=DEFAULT_DRIVER, show_default=True, help="The DRA driver's name."
)


def package_version(package: str) -> str:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:  # it runs from a tree that was never installed
        return UNKNOWN


class ListOnceClient(KubeClient):
    """A client that reads each list once: a second reader of a list gets the same answer."""

    def __init__(self, access: Access, user_agent: str) -> None:
        super().__init__(access, user_agent)
        self._answers: dict[tuple[str, str], bytes] = {}

    def get(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        if not query or "limit" not in query:
            return super().get(path, query)
        page = path, urlencode(sorted(query.items()))
        if page not in self._answers:
            self._answers[page] = super().get(path, query)
        return self._answers[page]

    def forget(self, path: str) -> None:
        """Read the list at ``path`` anew the next time."""
        self._answers = {page: answer for page, answer in self._answers.items() if page[0] != path}


def client_of(kubeconfig: Path | None, user_agent: str) -> KubeClient:
    """A client of the cluster that ``--kubeconfig`` or its default names. Raises EnvironmentFault without one."""
    return KubeClient(access_of(kubeconfig), user_agent)


def access_of(kubeconfig: Path | None) -> Access:
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
    return load_configuration(kubeconfig, named=source)


def find_plans(client: KubeClient) -> list[GpuNodePlan] | None:
    """All GpuNodePlans; None if their CustomResourceDefinition is not installed. Raises ApiError and MsgspecError."""
    with accepted_status(NOT_FOUND):
        return list(read_all(client, PATH, GpuNodePlan))
    return None


def check_flag(flag: str, value: str, check: Callable[[str], object]) -> None:
    """Raises UsageError about a value for which ``check`` raises ValueError."""
    try:
        check(value)
    except ValueError as error:
        raise UsageError(f"{flag} {value}: {error}") from error


def cancel_uninstall_command(namespace: str) -> str:
    """The command after which nodes publish again though an uninstallation has begun."""
    return f"kubectl -n {namespace} annotate lease {HEARTBEAT} {LEAVING}-"
