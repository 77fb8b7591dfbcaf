"""``tessera status``: checks the installation, with a remedy for each problem."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import click

from controller.eviction.recent_evictions import Eviction
from driver.clock import wait_until, written_time
from driver.errors import ApiError
from tessera.cluster_options import ListOnceClient, access_of, with_driver_name, with_kubeconfig
from tessera.progress import Progress
from tessera.status import installation, nodes, processes, stuck_claims
from tessera.status.snapshot import NAMESPACE, CheckOutput, Listing, Problem, SnapshotReader, StatusSnapshot
from tessera.tables_and_drawings import columns, counted, printable, show, with_output


class CheckState(StrEnum):
    """State of a check, by the name that people see."""

    OK = "ok"
    PROBLEM = "look"
    UNREAD = "unread"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check: a summary, findings, the lists that it needs but that can't be read (``unread``), and the
    evictions that it lists, the oldest first."""

    check: str
    summary: str
    findings: tuple[Problem, ...] = ()
    unread: tuple[str, ...] = ()
    evictions: tuple[Eviction, ...] = ()

    @property
    def state(self) -> CheckState:
        if self.findings:
            return CheckState.PROBLEM
        return CheckState.UNREAD if self.unread else CheckState.OK


class StatusCheck(NamedTuple):
    """A check. It does not run if a list that it ``needs`` can't be read; it runs without lists that it ``uses``. In
    both cases its state is unread."""

    run: Callable[[StatusSnapshot], CheckOutput]
    needs: tuple[Listing, ...] = ()
    uses: tuple[Listing, ...] = ()


EVICTIONS = "evictions"
SHOWN_EVICTIONS = 20

CHECKS: Mapping[str, StatusCheck] = {
    "API server": StatusCheck(installation.api),
    "definition": StatusCheck(installation.definition, (Listing.PLANS,)),
    "classes": StatusCheck(installation.classes, (Listing.CLASSES,), (Listing.CLAIMS,)),
    "policies": StatusCheck(installation.policies, (Listing.POLICIES, Listing.BINDINGS)),
    "controller": StatusCheck(processes.controller, (), (Listing.LEASES, Listing.PODS)),
    "node plugins": StatusCheck(processes.plugins, (), (Listing.SLICES, Listing.NODES, Listing.PODS)),
    "versions": StatusCheck(processes.versions, (), (Listing.PODS,)),
    "directories": StatusCheck(processes.directories, (Listing.EVENTS,)),
    "slices": StatusCheck(nodes.slices, (Listing.SLICES,)),
    "devices": StatusCheck(nodes.devices, (Listing.SLICES, Listing.CLAIMS)),
    "claims": StatusCheck(
        stuck_claims.pending,
        (Listing.PENDING,),
        (Listing.EVENTS,),
    ),
    "room": StatusCheck(stuck_claims.room, (Listing.PENDING,)),
    "starts": StatusCheck(stuck_claims.starts, (Listing.PENDING, Listing.PLANS)),
    "releases": StatusCheck(stuck_claims.releases, (Listing.PENDING,)),
    EVICTIONS: StatusCheck(stuck_claims.evictions, (Listing.EVICTIONS,)),
    "health": StatusCheck(nodes.health, (Listing.SLICES,), (Listing.PLANS, Listing.PENDING)),
    "offers": StatusCheck(nodes.offers, (Listing.PLANS, Listing.SLICES)),
    "mode": StatusCheck(nodes.mode, (Listing.PLANS, Listing.SLICES), (Listing.LEASES,)),
    "settings": StatusCheck(installation.configurations, (Listing.PLANS,)),
    "clocks": StatusCheck(installation.clocks, (), (Listing.LEASES, Listing.NODE_LEASES)),
    "neighbours": StatusCheck(nodes.other_drivers, (Listing.NODES, Listing.SLICES, Listing.PLANS, Listing.CLAIMS)),
}

NOT_INSTALLED: Mapping[str, StatusCheck] = {
    "API server": StatusCheck(installation.api),
    "installation": StatusCheck(installation.not_installed),
}
"""The checks of a cluster without Tessera."""

ROLLOUT: Mapping[str, StatusCheck] = {
    "controller": CHECKS["controller"],
    "rollout": StatusCheck(processes.rollout, (Listing.DAEMON_SETS, Listing.DEPLOYMENTS, Listing.PODS)),
}
AFTER_ROLLOUT: Mapping[str, StatusCheck] = {name: CHECKS[name] for name in ("slices", "mode")}
"""What --wait waits for: first the processes, then what nodes publish."""

POLL_INTERVAL_SECONDS = 5.0
"""Each look lists the pods of all node plugins."""

LINE_INTERVAL_SECONDS = 10.0
"""Time between two lines about the progress where they are not shown in place: a rollout of 1,000 nodes has many."""

DEFAULT_TIMEOUT_SECONDS = 900.0


def run_checks(snapshot: StatusSnapshot) -> list[CheckResult]:
    checks = NOT_INSTALLED if installation.is_not_installed(snapshot) else CHECKS
    return [_result(name, check, snapshot) for name, check in checks.items()]


def _result(name: str, check: StatusCheck, snapshot: StatusSnapshot) -> CheckResult:
    missing = tuple(str(listing) for listing in (*check.needs, *check.uses) if not snapshot.has_read(listing))
    parts = list(check.run(snapshot)) if snapshot.has_read(*check.needs) else []
    summary = [part for part in parts if isinstance(part, str)]
    if missing:
        summary.append(f"{', '.join(missing)} can't be listed")
    findings = tuple(part for part in parts if isinstance(part, Problem))
    evictions = tuple(part for part in parts if isinstance(part, Eviction))
    return CheckResult(name, ", ".join(summary), findings, missing, evictions)


STATE_COLOURS = {CheckState.OK: "green", CheckState.PROBLEM: "red", CheckState.UNREAD: "yellow"}


@click.command()
@with_kubeconfig
@with_driver_name
@click.option("--namespace", default=NAMESPACE, show_default=True, help="Namespace of the release.")
@click.option(
    "--wait",
    is_flag=True,
    help="Wait until an installation or upgrade is complete: each node has the new plugin, and it is ready; a "
    "controller leads, and the nodes follow it. Only this is checked then.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=DEFAULT_TIMEOUT_SECONDS,
    show_default=True,
    help="Seconds that --wait waits.",
)
@with_output("table", "json")
def status(kubeconfig: Path | None, driver_name: str, namespace: str, wait: bool, timeout: float, output: str) -> None:
    """Check whether the installation works, with a remedy for each problem.

    Exit code 0: no problem; 1: a problem, or something could not be read; 2: Tessera is not in --namespace.

    \b
    Examples:
      tessera status
      tessera status --kubeconfig ~/.kube/prod -o json
      helm upgrade ... && tessera status --wait --timeout 1800
    """
    access = access_of(kubeconfig)

    def reader() -> SnapshotReader:
        return SnapshotReader(ListOnceClient(access, "tessera-command"), driver_name, namespace)

    results = RolloutWait(reader).run(timeout) if wait else run_checks(reader().read())
    show(output, as_json(results), as_text(results))
    sys.exit(0 if all(result.state is CheckState.OK for result in results) else 1)


class RolloutWait:
    """Looks again and again what a rollout still has to do. ``reader`` returns a new reader for each look."""

    def __init__(self, reader: Callable[[], SnapshotReader]) -> None:
        self._reader, self._progress = reader, Progress(LINE_INTERVAL_SECONDS)
        self._results: list[CheckResult] = []
        self._is_forbidden = False
        """Whether the account lacks a right: no look will show more."""

    def run(self, timeout_s: float) -> Sequence[CheckResult]:
        """Wait; the results of the last look. Raises ApiError if the API server did not even answer then."""
        wait_until(timeout_s, self._is_over, POLL_INTERVAL_SECONDS)
        self._progress.clear()
        return self._results or self._look()

    def _is_over(self) -> bool:
        """Whether the rollout is complete, or what can't be read hides whether it is."""
        try:
            self._results = self._look()
        except ApiError as error:
            if not error.is_transient:
                raise
            self._results = []
            self._progress.show(f"waiting: {error}")
            return False
        waits = [result for result in self._results if result.state is CheckState.PROBLEM]
        unread = [name for result in self._results for name in result.unread]
        if waits:
            rest = "; ".join(f"{result.check}: {counted(len(result.findings), 'problem')}" for result in waits)
            [rollout] = (result.summary for result in self._results if result.check == "rollout")
            self._progress.show(f"waiting: {rollout} ({rest})")
        elif unread and not self._is_forbidden:
            self._progress.show(f"waiting: {', '.join(unread)} can't be listed")
        return not waits and (not unread or self._is_forbidden)

    def _look(self) -> list[CheckResult]:
        reader = self._reader()
        snapshot = reader.read_rollout()
        results = [_result(name, check, snapshot) for name, check in ROLLOUT.items()]
        if all(result.state is CheckState.OK for result in results):
            snapshot = reader.with_nodes(snapshot)
            results += [_result(name, check, snapshot) for name, check in AFTER_ROLLOUT.items()]
        self._is_forbidden = any(failure.forbidden for failure in snapshot.unreadable.values())
        return results


def as_text(results: Sequence[CheckResult]) -> str:
    states = {state: click.style(state, fg=colour) for state, colour in STATE_COLOURS.items()}
    rows = [[result.check, states[result.state], printable(result.summary)] for result in results]
    problems = [(result.check, finding) for result in results for finding in result.findings]
    unread = sum(result.state is CheckState.UNREAD for result in results)
    table = columns(["CHECK", "STATE", "SUMMARY"], rows)
    lines = [table, "", *(_evictions_text(result.evictions) for result in results if result.evictions)]
    for check, finding in problems:
        about, message, remedy = map(printable, (finding.about, finding.message, finding.remedy))
        lines.append(f"{check}: {click.style(about, bold=True)} {message}\n    -> {remedy}")
    return "\n".join([*lines, _verdict(len(problems), unread)])


def _eviction(eviction: Eviction) -> dict[str, object]:
    return {
        "pod": eviction.name or eviction.pod,  # earlier versions record its UID only
        "at": written_time(int(eviction.at)),
        "node": eviction.node,
        "for": eviction.contender or None,
        "gpuHours": eviction.gpu_hours,
        "trigger": eviction.trigger or None,
        "policy": eviction.policy or None,
    }


def _evictions_text(evictions: Sequence[Eviction]) -> str:
    """A table of the newest."""
    header = ["EVICTED", "AT", "NODE", "FOR", "GPU HOURS", "TRIGGER", "POLICY"]
    newest = [_eviction(eviction).values() for eviction in reversed(evictions[-SHOWN_EVICTIONS:])]
    table = columns(header, [["-" if cell is None else printable(str(cell)) for cell in cells] for cells in newest])
    more = len(evictions) - len(newest)
    return f"{table}\nand {more} earlier (-o json)\n" if more else f"{table}\n"


def as_json(results: Sequence[CheckResult]) -> list[dict[str, object]]:
    return [
        {
            "check": result.check,
            "ok": result.state is CheckState.OK,
            "state": result.state.value,
            "summary": result.summary,
            "findings": [{"about": f.about, "message": f.message, "remedy": f.remedy} for f in result.findings],
            **({"evictions": list(map(_eviction, result.evictions))} if result.check == EVICTIONS else {}),
        }
        for result in results
    ]


def _verdict(found: int, unread: int) -> str:
    if not found and not unread:
        return click.style("No problems found.", fg="green")
    parts = [f"{counted(found, 'problem')}"] if found else []
    if unread:
        parts.append(f"{counted(unread, 'check')} could not read everything")
    return click.style("; ".join(parts) + ".", fg="red" if found else "yellow")
