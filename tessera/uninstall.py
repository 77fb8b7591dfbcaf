"""``tessera uninstall``: what has to be done before a release's objects are deleted; helm runs it as a hook."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import click

from driver.errors import ApiError, FatalError
from driver.kube.claims import Claim
from tessera.asking import client_of, with_driver_name, with_kubeconfig
from tessera.output import columns
from tessera.removal import LOOK_S, Removal, taking_back
from tessera.waiting import within

USER_AGENT = "tessera-uninstall"

SHOWN = 20
"""Claims that are told one by one."""


@click.command()
@with_kubeconfig
@click.option("--namespace", envvar="POD_NAMESPACE", default="tessera", show_default=True, help="The release's.")
@with_driver_name
@click.option("--check", is_flag=True, help="Only say whether anything is in use.")
@click.option("--force", is_flag=True, help="Also while claims have devices: their pods can't end cleanly any more.")
@click.option("--timeout", type=click.FloatRange(1), default=120.0, show_default=True, help="Seconds that nodes have.")
def uninstall(
    kubeconfig: Path | None, namespace: str, driver_name: str, check: bool, force: bool, timeout: float
) -> None:
    """Take everything out of the cluster that no release knows: slices, files on nodes, Leases, the fence.

    Refuses while a claim has a device, and changes nothing then. `helm uninstall` runs it first. Nodes that don't
    answer are named, with what is left on them. Exit code 1: something is in use, or could not be done.

    \b
    Examples:
      tessera uninstall --check
      tessera uninstall --namespace tessera
      tessera uninstall --force --timeout 30
    """
    removal = Removal(client_of(kubeconfig, USER_AGENT), driver_name, namespace)
    if not force:
        _refuse_while_held(removal.holders())
    if check:
        click.echo("no claim has a device: nothing is in use")
        return
    click.echo("telling the nodes to withdraw their slices")
    with _taken_back_if_it_fails(removal):
        removal.announce()
        within(timeout, lambda: _none(removal.publishing), LOOK_S)
        if not force:
            _refuse_while_held(removal.holders())
    click.echo("ending node plugins and controller")
    removal.end_processes()
    silent = removal.publishing()
    if not within(timeout, lambda: _none(removal.running), LOOK_S):
        click.secho(f"still ending: {', '.join(removal.running())}", fg="yellow")
    for names in silent.values():
        removal.delete_slices(names)
    removal.delete_own_objects()
    _tell_of(sorted(silent), driver_name)


@contextmanager
def _taken_back_if_it_fails(removal: Removal) -> Iterator[None]:
    """Nodes would offer nothing for ever. It may end at any moment: by the hook's deadline, a drain, a person."""
    before = signal.signal(signal.SIGTERM, _ended)
    try:
        yield
    except BaseException:
        try:
            removal.recall()
        except ApiError as error:
            click.secho(f"nodes may go on offering nothing: it could not be taken back: {error}", fg="red", err=True)
            click.echo(f"{taking_back(removal.namespace)}, or uninstall again", err=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _ended(number: int, _frame: object) -> None:
    raise FatalError(f"{signal.Signals(number).name}: ended before the nodes had withdrawn their slices")


def _none(look: Callable[[], object]) -> bool:
    """Whether there are none any more, as far as the API server answers."""
    try:
        return not look()
    except ApiError as error:
        if error.status is not None and error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            raise
        return False


def _refuse_while_held(claims: Sequence[Claim]) -> None:
    if not claims:
        return
    rows = [(claim.metadata.namespace, claim.metadata.name, claim.pods or "none") for claim in claims[:SHOWN]]
    click.echo(columns(("NAMESPACE", "CLAIM", "PODS"), rows))
    more = f" ({len(claims) - SHOWN} more)" if len(claims) > SHOWN else ""
    raise FatalError(
        f"{len(claims)} claims have devices{more}: end their pods, or delete the claims, and try again; nothing was "
        "changed. With --force (uninstall.force=true) their pods can't be ended cleanly afterwards"
    )


def _tell_of(silent: Sequence[str], driver: str) -> None:
    if not silent:
        click.echo("done: nothing is left")
        return
    click.secho(f"done, but {len(silent)} nodes did not answer: {', '.join(silent)}", fg="yellow")
    click.echo(
        f"Their slices were deleted. On their disks may be left: /var/lib/kubelet/plugins/{driver}, "
        f"/var/run/cdi/{driver}-claim_*.json, and partitions of claims that were not released."
    )
