"""``tessera web``: opens the controller's web page through a port-forward."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from controller.app import LEASE
from driver.errors import ApiError, EnvironmentFault, FatalError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import read_pods
from driver.kube.lease import leases
from driver.kube.types import PodDetails
from tessera.cluster_options import client_of, with_kubeconfig
from tessera.status.snapshot import NAMESPACE

CONTROLLERS = "app.kubernetes.io/name=tessera,app.kubernetes.io/component=controller"
PORT_NAME = "web"
FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) -> ")
STOP_SECONDS = 5.0

REMEDY = "helm upgrade tessera deploy/tessera -n {} --reuse-values --set controller.webAddress=127.0.0.1:8082"


@click.command()
@click.option("--namespace", default=NAMESPACE, show_default=True, help="Namespace of the release.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Local port.  [default: any free one]")
@click.option("--no-browser", is_flag=True, help="Print the address only.")
@with_kubeconfig
def web(namespace: str, port: int, *, no_browser: bool, kubeconfig: Path | None) -> None:
    """Open the controller's web page through a port-forward, until Ctrl-C.

    Needs kubectl, the chart's value controller.webAddress, and the rights to list pods and to create pods/portforward
    in the namespace of the release (docs/web.md).

    \b
    Examples:
      tessera web
      tessera web --no-browser --port 8082
    """
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise EnvironmentFault("kubectl is not in $PATH: `tessera web` forwards a local port with it")
    client = client_of(kubeconfig, "tessera-command")
    config = [] if kubeconfig is None else [f"--kubeconfig={kubeconfig}"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    is_open = False
    try:
        while True:
            pod, remote_port, scheme = _find(client, namespace)
            ports = f"{port or ''}:{remote_port}"
            command = [kubectl, *config, f"--namespace={namespace}", "port-forward", "--address=127.0.0.1"]
            with _forwarding([*command, f"pod/{pod}", ports]) as (process, port):
                if not is_open:
                    is_open, url = True, f"{scheme}://127.0.0.1:{port}/"
                    click.echo(f"The web page is at {url} until Ctrl-C.")
                    if not no_browser and not webbrowser.open(url):
                        click.echo("No browser could be started: open the address yourself.", err=True)
                # Until the pod ends; then the page goes on with another one. A full pipe would block kubectl.
                for _ in process.stdout or ():
                    pass
    except KeyboardInterrupt:
        return


def _find(client: KubeClient, namespace: str) -> tuple[str, int, str]:
    """A controller pod that serves the page, its port and the URL's scheme. Raises FatalError if there is none."""
    pods = read_pods(client, namespace, CONTROLLERS)
    if not pods:
        raise FatalError(f"namespace {namespace} has no controller of Tessera; --namespace names that of the release")
    ready = [pod for pod in _leader_first(client, namespace, pods) if pod.is_ready]
    if not ready:
        raise FatalError(f"no controller in namespace {namespace} is ready: kubectl -n {namespace} get pods")
    for pod in ready:
        if (port := pod.port(PORT_NAME)) is not None:
            arguments = (argument for container in pod.spec.containers for argument in container.args)
            is_secure = any(argument.startswith("--web-tls-cert") for argument in arguments)
            return pod.metadata.name, port, "https" if is_secure else "http"
    remedy = REMEDY.format(namespace)
    raise FatalError(f"the web page is off: the chart's value controller.webAddress is empty; {remedy}")


def _leader_first(client: KubeClient, namespace: str, pods: Sequence[PodDetails]) -> list[PodDetails]:
    """The leader first: all serve the same page, but only the leader has the cluster in its memory already."""
    try:
        lease = client.find(f"{leases(namespace)}/{LEASE}")
    except ApiError:  # this account may not read it
        lease = None
    leader = (lease or {}).get("spec", {}).get("holderIdentity")
    return sorted(pods, key=lambda each: (each.metadata.name != leader, each.metadata.name))


@contextmanager
def _forwarding(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A running ``kubectl port-forward`` and its local port. Raises FatalError if it ends before it forwards."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
        forwarding = FORWARDING.match(line)
        if forwarding is None:
            code = process.wait(STOP_SECONDS)
            raise FatalError(f"kubectl port-forward failed with exit code {code}; its error is above")
        yield process, int(forwarding[1])
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)
        if process.stdout is not None:
            process.stdout.close()
