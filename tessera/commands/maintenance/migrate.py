"""``tessera migrate``: moves a node from NVIDIA's device plugin or DRA driver to Tessera, and back.

Every step can be repeated. An annotation of the Node (``migrating_node``) has how far it is, and what was there before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from driver.clock import wait_until
from driver.config.flag_values import DEFAULT_DRIVER, NVIDIA_DRIVER
from driver.errors import ApiError, FatalError, StateError, UsageError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import read_pods
from driver.kube.types import Claim, PodDetails
from tessera.cluster_options import ListOnceClient, access_of, with_driver_name, with_kubeconfig
from tessera.commands.maintenance.migrating_node import (
    DRIVERS,
    HERE,
    MONITORS,
    MOVING,
    MigratingNode,
    MigrationState,
    MigrationStep,
)
from tessera.commands.maintenance.migration_plan import read_plan
from tessera.progress import Progress
from tessera.status import nodes
from tessera.status.processes import OWN_LABEL
from tessera.status.snapshot import NAMESPACE, Listing, Problem, SnapshotReader
from tessera.tables_and_drawings import counted, show, with_output

POLL_INTERVAL_SECONDS = 2.0
"""Each look lists the pods of the node, and all claims."""

QUIET_LOOKS = 2
"""Looks in a row that must find nothing: the scheduler may just have chosen the node when it was cordoned."""

CHECKS = (nodes.slices, nodes.health, nodes.other_drivers)
LISTS = (Listing.NODES, Listing.SLICES, Listing.PLANS, Listing.CLAIMS, Listing.PENDING)
"""The checks of `tessera status` that concern one node, and the lists that they need."""

NODE_PODS = {"app.kubernetes.io/name": "tessera", "app.kubernetes.io/component": "node"}
SHOWN = 5
"""Names that a line of progress has at most."""

LEAVE_REMEDY = f"outside of the GPU Operator its DaemonSet must not match label {OWN_LABEL} (docs/migrate.md)"


@click.command()
@click.argument("node", metavar="NODE")
@click.option("--plan", "plan_only", is_flag=True, help="Change nothing; print what has to end and to change.")
@click.option("--back", is_flag=True, help="Undo it: give the node back to the driver that it had.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=3600.0,
    show_default=True,
    help="Seconds to wait in all.",
)
@click.option("--namespace", default=NAMESPACE, show_default=True, help="Namespace of the release.")
@with_kubeconfig
@with_driver_name
@with_output("text", "json")
def migrate(
    node: str,
    plan_only: bool,
    back: bool,
    timeout: float,
    namespace: str,
    kubeconfig: Path | None,
    driver_name: str,
    output: str,
) -> None:
    """Move a node from NVIDIA's device plugin or DRA driver to Tessera. No pod is ended.

    It cordons the node, waits until the pods and claims of the other driver have ended, sets labels so that the other
    driver leaves and Tessera's node plugin comes, checks the node and uncordons it. Run it again to continue.
    docs/migrate.md has what to prepare, and the rights that the account needs.

    Exit code 0: done (--plan: always); 1: not done, and the message says what continues or undoes it.

    \b
    Examples:
      tessera migrate node-a --plan
      tessera migrate node-a --timeout 86400
      tessera migrate node-a --back
    """
    if plan_only and back:
        raise UsageError("--plan and --back exclude each other: --plan shows the move to Tessera")
    access = access_of(kubeconfig)
    client = KubeClient(access, "tessera-command")
    migrating = MigratingNode(client, node, driver_name)
    migrating.read()
    if plan_only:
        plan = read_plan(client, migrating)
        show(output, [plan.as_json()], plan.as_text())
        return
    state = migrating.state()
    if back and state is None:
        raise UsageError(f"NODE {node}: --back needs a node that `tessera migrate` has moved; this one was not moved")
    waiting = MigrationWait(timeout)

    def problems() -> list[str]:
        return _problems(SnapshotReader(ListOnceClient(access, "tessera-command"), driver_name, namespace), node)

    with _explained(migrating, waiting):
        if back:
            _return(migrating, waiting)
        elif state is None or state.step is not MigrationStep.MOVED:
            _move(migrating, waiting, lambda: _starting(client, migrating, namespace) or problems())
    verdict = f"node {node} is back with the driver that it had" if back else f"node {node} has moved to Tessera"
    show(output, [{"node": node, "step": "returned" if back else MigrationStep.MOVED.value}], verdict)


class MigrationWait:
    """Waits for one condition after the other, until one deadline. ``step`` is the one, at first none."""

    def __init__(self, timeout_s: float) -> None:
        self.progress, self.step = Progress(), ""
        self._timeout_s, self._until = timeout_s, time.monotonic() + timeout_s
        self._rest: Sequence[str] = ()

    def start(self, node: MigratingNode) -> None:
        self.step = "its labels can be changed"
        self.progress.log(f"node {node.name} is cordoned")

    def until(self, step: str, rest: Callable[[], Sequence[str]], looks: int = 1) -> None:
        """Wait until ``rest`` has nothing more to wait for at so many ``looks`` in a row.

        Raises FatalError at the deadline, and ApiError.
        """
        self.step, quiet = step, 0

        def is_done() -> bool:
            nonlocal quiet
            try:
                self._rest = rest()
            except ApiError as error:
                if not error.is_transient:
                    raise
                self._rest = [str(error)]
            if self._rest:
                more = f" and {len(self._rest) - SHOWN} more" if len(self._rest) > SHOWN else ""
                self.progress.show(f"waiting until {step}: {'; '.join(self._rest[:SHOWN])}{more}")
            quiet = 0 if self._rest else quiet + 1
            return quiet >= looks

        if not wait_until(self._until - time.monotonic(), is_done, POLL_INTERVAL_SECONDS):
            missing = "; ".join(self._rest[:SHOWN]) or f"{step} now, but that must be seen again"
            raise FatalError(f"not within {self._timeout_s:g} s: {missing}")
        self.progress.log(f"done: {step}")


def _move(node: MigratingNode, waiting: MigrationWait, missing: Callable[[], Sequence[str]]) -> None:
    state = node.begin(MigrationStep.MOVING)
    waiting.start(node)
    node.switch_off(MONITORS)
    waiting.until("pods and claims of the other driver have ended", lambda: _held_by_others(node), QUIET_LOOKS)
    if node.labels().get(OWN_LABEL) != HERE:
        node.set_labels({OWN_LABEL: MOVING})
    node.switch_off(DRIVERS)
    waiting.until("the other driver has left", lambda: _others(node))
    node.set_labels({OWN_LABEL: HERE})
    waiting.until("Tessera's node plugin works", missing)
    node.end(state, MigrationStep.MOVED)


def _return(node: MigratingNode, waiting: MigrationWait) -> None:
    state = node.begin(MigrationStep.RETURNING)
    waiting.start(node)
    waiting.until("claims of Tessera have ended", lambda: _held_by_tessera(node), QUIET_LOOKS)
    if node.labels().get(OWN_LABEL) == HERE:
        node.set_labels({OWN_LABEL: MOVING})
    waiting.until(
        "Tessera's node plugin has left",
        lambda: [
            *(f"pod {pod.metadata.key}" for pod in node.pods() if NODE_PODS.items() <= pod.metadata.labels.items()),
            *(f"ResourceSlice {item.metadata.name}" for item in node.slices(ours=True)),
        ],
    )
    node.set_labels(state.labels)
    waiting.until("the driver that was here before works", lambda: _missing(node, state))
    node.end(state, None)


def _held_by_others(node: MigratingNode) -> list[str]:
    pods = [f"pod {pod.metadata.key} has {', '.join(names)}" for pod, names in node.plugin_pods()]
    claims = (f"{_named(claim)}: {reason}" for claim, reason in node.must_end())
    return [*pods, *claims]


def _held_by_tessera(node: MigratingNode) -> list[str]:
    adopted = node.claims(ours=False) if node.driver == NVIDIA_DRIVER else []
    return [_named(claim) for claim in (*node.claims(ours=True), *adopted)]


def _named(claim: Claim) -> str:
    return f"claim {claim.metadata.key} (pods: {claim.pods or 'none'})"


def _others(node: MigratingNode) -> list[str]:
    offered = ", ".join(f"{name}: {amount}" for name, amount in node.resources().items())
    slices = node.slices(ours=False)
    return [
        *(f"pod {pod}" for pod in node.operator_pods()),
        *([f"a device plugin offers {offered}; {LEAVE_REMEDY}"] if offered else ()),
        *([f"NVIDIA's DRA driver has {counted(len(slices), 'ResourceSlice')}; {LEAVE_REMEDY}"] if slices else ()),
    ]


def _pods(client: KubeClient, node: MigratingNode, namespace: str) -> list[PodDetails]:
    """Those of Tessera's node plugin."""
    selector = ",".join(f"{name}={value}" for name, value in NODE_PODS.items())
    return [pod for pod in read_pods(client, namespace, selector) if pod.spec.node_name == node.name]


def _starting(client: KubeClient, node: MigratingNode, namespace: str) -> list[str]:
    """Why the plugin does not work yet. With a controller a cordoned node may publish nothing: then its pod counts."""
    pods = _pods(client, node, namespace)
    if node.slices(ours=True) or any(pod.is_ready for pod in pods):
        return []
    name = next((pod.metadata.name for pod in pods), None)
    return [f"pod {name} is not ready" if name else f"no ResourceSlice, and no pod in namespace {namespace}"]


def _missing(node: MigratingNode, state: MigrationState) -> list[str]:
    return [
        *(["a device plugin offers no GPU yet"] if state.had_plugin and not node.resources() else ()),
        *(
            ["NVIDIA's DRA driver has no ResourceSlice yet"]
            if state.had_dra_driver and not node.slices(ours=False)
            else ()
        ),
    ]


def _problems(reader: SnapshotReader, node: str) -> list[str]:
    """What `tessera status` finds on the node. Raises FatalError if the account may not read it."""
    snapshot = reader.read()
    failures = {listing: snapshot.unreadable[listing] for listing in LISTS if not snapshot.has_read(listing)}
    unread = [f"{listing} can't be listed: {failure.reason}" for listing, failure in failures.items()]
    if any(failure.forbidden for failure in failures.values()):
        raise FatalError("; ".join(unread))
    if unread:
        return unread
    problems = [part for check in CHECKS for part in check(snapshot) if isinstance(part, Problem)]
    concerned = [problem for problem in problems if problem.about == node or problem.about.startswith(f"{node}/")]
    return [f"{problem.about} {problem.message} -> {problem.remedy}" for problem in concerned]


@contextmanager
def _explained(node: MigratingNode, waiting: MigrationWait) -> Iterator[None]:
    """Say, whatever ends the block early, where the node stands, and how to continue or undo it."""
    try:
        yield
    except (KeyboardInterrupt, ApiError, FatalError, StateError) as error:
        waiting.progress.clear()
        if not waiting.step:
            raise
        name = "" if node.driver == DEFAULT_DRIVER else f" --driver-name {node.driver}"
        raise FatalError(
            f"{str(error) or 'interrupted'}; node {node.name} waits until {waiting.step}, and stays cordoned: "
            f"tessera migrate {node.name}{name} continues, tessera migrate {node.name} --back{name} undoes it"
        ) from error
