"""``tessera uninstall``: removes objects that Helm does not delete; a helm hook that runs before the uninstallation."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from controller.app import LEASE
from controller.decision.hardware_labels import LABEL_SETS, NODES
from controller.fence.fence_probe import CANARY
from driver.clock import wait_until
from driver.errors import CONFLICT, FORBIDDEN, NOT_FOUND, ApiError, FatalError, accepted_status
from driver.kube.client import KubeClient, Object
from driver.kube.controller_heartbeat import HEARTBEAT, LEAVING, RENEW_INTERVAL_SECONDS
from driver.kube.get_and_list import RESOURCE_GROUP, list_claims, read_all
from driver.kube.lease import LeaseSpec, lease_object, leases
from driver.kube.types import Claim, Node
from driver.model.plan import FENCE
from driver.slices.publisher import SLICES
from tessera.cluster_options import cancel_uninstall_command, client_of, with_driver_name, with_kubeconfig
from tessera.tables_and_drawings import columns

LISTED_HOLDERS = 20
"""Claims that are listed one by one."""


@click.command()
@with_kubeconfig
@click.option("--namespace", envvar="POD_NAMESPACE", default="tessera", show_default=True, help="Release namespace.")
@with_driver_name
@click.option("--check", is_flag=True, help="Only check whether a claim has a device.")
@click.option("--force", is_flag=True, help="Continue although claims have devices; their pods can't end cleanly.")
@click.option(
    "--timeout", type=click.FloatRange(1), default=120.0, show_default=True, help="Seconds to wait for the nodes."
)
def uninstall(
    kubeconfig: Path | None, namespace: str, driver_name: str, check: bool, force: bool, timeout: float
) -> None:
    """Remove objects that Helm does not delete: slices, files on nodes, Leases, the fence, labels of Nodes.

    While a claim has a device it changes nothing and fails. Exit code 1: something is in use, or a step failed.

    \b
    Examples:
      tessera uninstall --check
      tessera uninstall --force --timeout 30
    """
    removal = Removal(client_of(kubeconfig, "tessera-uninstall"), driver_name, namespace)
    if not force:
        _refuse_while_held(removal.holders())
    if check:
        click.echo("no claim has a device: nothing is in use")
        return
    pods, published = removal.pods(), removal.publishing()
    click.echo("requesting the nodes to withdraw their slices")
    with _rolled_back_on_failure(removal):
        removal.announce()
        wait_until(timeout, lambda: _none(removal.publishing), WITHDRAWAL_POLL_INTERVAL_SECONDS)
        if not force:
            _refuse_while_held(removal.holders())
    click.echo("stopping node plugins and controller")
    removal.end_processes()
    silent = removal.publishing()
    if not wait_until(timeout, lambda: _none(removal.pods), WITHDRAWAL_POLL_INTERVAL_SECONDS):
        click.secho(f"still terminating: {', '.join(removal.pods())}", fg="yellow")
    if (holder := removal.controller_outside(pods)) is not None:
        raise FatalError(
            f"the controller {holder} still runs outside of pods, and would put everything back: end it, and run "
            "tessera uninstall again; until then nodes offer nothing"
        )
    removal.delete(f"{SLICES}/{name}" for names in silent.values() for name in names)
    removal.delete_own_objects()
    try:
        removal.remove_labels()
    except ApiError as error:
        if error.status != FORBIDDEN:
            raise
        # The chart grants it only with controller.nodeLabels; then there may be labels of an earlier revision.
        click.echo("not allowed to remove labels of Nodes: docs/controller.md has the command, should there be any")
    _report(driver_name, sorted(published.keys() - silent.keys() - set(pods.values())), silent)


def _report(driver_name: str, outside: Sequence[str], silent: Collection[str]) -> None:
    """Say what is left on nodes with a node plugin ``outside`` of pods, and on those that did not answer."""
    if outside:
        click.secho(f"done, but node plugins outside of pods still run: {', '.join(outside)}", fg="yellow")
        click.echo("They offer nothing any more, and remove their files when they end: end them, and what starts them.")
    if not silent and not outside:
        click.echo("done: nothing is left")
    if not silent:
        return
    click.secho(f"done, but {len(silent)} nodes did not answer: {', '.join(sorted(silent))}", fg="yellow")
    click.echo(
        f"Their slices were deleted. Their disks may still have /var/lib/kubelet/plugins/{driver_name}, "
        f"/var/run/cdi/{driver_name}-claim_*.json, and partitions of claims that were not released."
    )


@contextmanager
def _rolled_back_on_failure(removal: Removal) -> Iterator[None]:
    """Roll back on failure or interruption (the hook's deadline, a drain); otherwise nodes never publish again."""
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    except BaseException:
        try:
            removal.cancel()
        except ApiError as error:
            click.secho(f"the rollback failed, and nodes may continue to offer nothing: {error}", fg="red", err=True)
            click.echo(f"{cancel_uninstall_command(removal.namespace)}, or uninstall again", err=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _on_sigterm(number: int, _frame: object) -> None:
    raise FatalError(f"{signal.Signals(number).name}: interrupted before the nodes had withdrawn their slices")


def _none(items: Callable[[], object]) -> bool:
    """Whether ``items`` returns none; False while the API server does not answer or is overloaded."""
    try:
        return not items()
    except ApiError as error:
        if not error.is_transient:
            raise
        return False


def _refuse_while_held(claims: Sequence[Claim]) -> None:
    if not claims:
        return
    rows = [(claim.metadata.namespace, claim.metadata.name, claim.pods or "none") for claim in claims[:LISTED_HOLDERS]]
    click.echo(columns(("NAMESPACE", "CLAIM", "PODS"), rows))
    more = f" ({len(claims) - LISTED_HOLDERS} more)" if len(claims) > LISTED_HOLDERS else ""
    raise FatalError(
        f"{len(claims)} claims have devices{more}: end their pods, or delete the claims, and try again; nothing was "
        "changed. With --force (uninstall.force=true) their pods can't be ended cleanly afterwards"
    )


PROCESSES = "app.kubernetes.io/name=tessera,app.kubernetes.io/component in (node,controller)"

WITHDRAWAL_POLL_INTERVAL_SECONDS = 0.5


@dataclass(frozen=True)
class Removal:
    """The steps of an uninstallation; each can be repeated. Methods raise ApiError."""

    client: KubeClient
    driver: str
    namespace: str

    def holders(self) -> list[Claim]:
        claims = list_claims(self.client)
        return [claim for claim in claims if any(result.driver == self.driver for result in claim.results)]

    def announce(self) -> None:
        """Request every node plugin to withdraw its slices."""
        annotation = {"annotations": {LEAVING: "true"}}
        lease = lease_object(self.namespace, HEARTBEAT, LeaseSpec())
        lease["metadata"].update(annotation)
        self.client.create_or_patch(self._lease(HEARTBEAT), {"metadata": annotation}, lease)

    def cancel(self) -> None:
        """Cancel the request: nodes publish again."""
        self.client.patch_existing(self._lease(HEARTBEAT), {"metadata": {"annotations": {LEAVING: None}}})

    def publishing(self) -> dict[str, list[str]]:
        """Names of the driver's slices by node."""
        found: dict[str, list[str]] = {}
        for item in read_all(self.client, SLICES, Object, {"fieldSelector": f"spec.driver={self.driver}"}):
            found.setdefault(item["spec"].get("nodeName", ""), []).append(item["metadata"]["name"])
        return found

    def delete(self, paths: Iterable[str]) -> None:
        """Delete the objects that exist."""
        for path in paths:
            self.client.delete(path, missing_ok=True)

    def end_processes(self) -> None:
        """Delete the DaemonSet and the Deployment, and with them their pods."""
        apps = f"/apis/apps/v1/namespaces/{self.namespace}"
        self.delete((f"{apps}/daemonsets/tessera-node", f"{apps}/deployments/tessera-controller"))

    def pods(self) -> dict[str, str]:
        """The node of each pod that exists, by the pod's name."""
        pods = read_all(self.client, f"/api/v1/namespaces/{self.namespace}/pods", Object, {"labelSelector": PROCESSES})
        return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in pods}

    def controller_outside(self, pods: Container[str]) -> str | None:
        """The controller that renews the heartbeat although all ``pods`` have ended; None if there is none."""
        first = self._heartbeat()
        if first is None or first.renew_time is None or first.holder_identity in pods:
            return None
        renewed = wait_until(
            RENEW_INTERVAL_SECONDS + 2.0, lambda: self._heartbeat() != first, WITHDRAWAL_POLL_INTERVAL_SECONDS
        )
        return first.holder_identity if renewed else None

    def _heartbeat(self) -> LeaseSpec | None:
        """The heartbeat, by a patch that changes nothing: the hook has no right to read it."""
        lease = self.client.patch_existing(self._lease(HEARTBEAT), {})
        return None if lease is None else msgspec.convert(lease.get("spec") or {}, LeaseSpec)

    def delete_own_objects(self) -> None:
        """Delete objects that the processes created, which belong to no release."""
        self.delete(
            [
                f"{RESOURCE_GROUP}/namespaces/{self.namespace}/resourceclaims/{CANARY}",
                f"/api/v1/namespaces/{self.namespace}/configmaps/{FENCE}",
                self._lease(LEASE),
                self._lease(HEARTBEAT),
            ]
        )

    def remove_labels(self) -> None:
        """Remove the labels of Nodes that the controller wrote; others of the same names stay."""
        for node in list(read_all(self.client, NODES, Node)):
            for labels in LABEL_SETS["all"]:
                if node.metadata.labels.keys() & set(labels.names):
                    with accepted_status(NOT_FOUND, CONFLICT):
                        labels.apply(self.client, node.metadata.name, node.metadata.uid, {})

    def _lease(self, name: str) -> str:
        return f"{leases(self.namespace)}/{name}"
