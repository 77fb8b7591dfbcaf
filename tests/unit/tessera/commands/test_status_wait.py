"""``tessera status --wait``: an upgrade that goes on while the command looks, against the API's wire protocol."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from driver.kube.lease import leases
from driver.model.plan import PATH, PlanMode
from tessera.cli import main
from tessera.commands import status
from tests.support.api_server import SLICES, Exchange, Object
from tests.unit.tessera.commands.test_status import StatusApi
from tests.unit.tessera.status.test_checks import NOW, lease, slice_of
from tests.unit.tessera.test_cli import KUBECONFIG

NODES = ("node-a", "node-b", "node-c")
APPS = "/apis/apps/v1/namespaces/tessera"
DAEMON_SET, DEPLOYMENT = f"{APPS}/daemonsets/tessera-node", f"{APPS}/deployments/tessera-controller"
PODS = "/api/v1/namespaces/tessera/pods"
TIMEOUT = "20"


class Upgrade(StatusApi):
    """Three nodes whose plugins are replaced one after the other: each time that somebody looks, one step further."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        replicas = {"updatedReplicas": 2, "availableReplicas": 2, "replicas": 2, "observedGeneration": 1}
        metadata = {"name": "tessera-controller", "namespace": "tessera", "generation": 1}
        self.store(DEPLOYMENT, metadata=metadata, spec={"replicas": 2}, status=replicas)
        for name, number in (("old", 9), ("new", 10)):
            metadata = {"labels": {"controller-revision-hash": name}, "ownerReferences": [{"name": "tessera-node"}]}
            self.store(f"{APPS}/controllerrevisions/{name}", metadata=metadata, revision=number)
        for name in ("controller-1", "controller-2"):
            self.pod(name, "node-a", account="tessera-controller")
        for name in NODES:
            self.pod(f"old-{name}", name, revision="old")
            item = slice_of([{"name": "gpu-0"}], node=name)
            self.store(f"{SLICES}/{name}", spec=msgspec.to_builtins(item.spec))
            self.plan(name, PlanMode.PLANNED)
        self.counts(updated=0)
        self.heartbeat("controller-1")

    def _answer(self, exchange: Exchange) -> None:
        if "/daemonsets" in exchange.route and self.steps:
            self.steps.pop(0)()
        super()._answer(exchange)

    def pod(self, name: str, node: str, *, ready: bool = True, revision: str = "new", **more: Any) -> None:
        spec = {"serviceAccountName": more.get("account", "tessera-node"), "nodeName": node, "containers": []}
        conditions = [{"type": "Ready", "status": str(ready)}]
        labels = {"controller-revision-hash": revision}
        self.store(
            f"{PODS}/{name}",
            metadata={"name": name, "labels": labels, **more.get("metadata", {})},
            spec=spec,
            status={"phase": "Running", "conditions": conditions},
        )

    def counts(self, updated: int, available: int = 3, observed: int = 2) -> None:
        """The status of the DaemonSet."""
        metadata = {"name": "tessera-node", "namespace": "tessera", "generation": 2}
        numbers = {"updatedNumberScheduled": updated, "numberAvailable": available, "desiredNumberScheduled": 3}
        self.store(DAEMON_SET, metadata=metadata, spec={}, status={**numbers, "observedGeneration": observed})

    def replace(self, count: int) -> None:
        """The plugin of the ``count``-th node is a new one."""
        node = NODES[count - 1]
        self.drop(f"{PODS}/old-{node}")
        self.pod(f"new-{node}", node)
        self.counts(count)

    def plan(self, node: str, mode: PlanMode) -> None:
        self.store(f"{PATH}/{node}", spec={}, status={"mode": mode.value})

    def heartbeat(self, holder: str | None) -> None:
        ago_s = (NOW - datetime.now(UTC)).total_seconds()
        for name in ("tessera-controller", "tessera-controller-heartbeat"):
            written: Object = lease(name, holder, ago_s=ago_s)
            self.store(f"{leases('tessera')}/{name}", **written)


@pytest.fixture
def upgrade(monkeypatch: pytest.MonkeyPatch) -> Iterator[Upgrade]:
    monkeypatch.setattr(status, "POLL_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(status, "LINE_INTERVAL_SECONDS", 0.0)
    with Upgrade() as api:
        yield api


@pytest.fixture
def wait(upgrade: Upgrade, tmp_path: Path) -> Callable[..., Result]:
    file = tmp_path / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": upgrade.server.url}}
    file.write_text(yaml.safe_dump({**KUBECONFIG, "clusters": [cluster]}))

    def run(*flags: str) -> Result:
        return CliRunner().invoke(main, ["status", "--kubeconfig", str(file), "--wait", *flags])

    return run


def rolled_out(upgrade: Upgrade) -> None:
    for count in range(1, 4):
        upgrade.replace(count)


def test_an_upgrade_is_followed_node_by_node_and_ends_with_exit_code_0(
    upgrade: Upgrade, wait: Callable[..., Result]
) -> None:
    upgrade.steps = [
        lambda: upgrade.counts(3, observed=1),
        lambda: upgrade.counts(0),
        *(partial(upgrade.replace, count) for count in range(1, 4)),
    ]
    answer = wait("--timeout", TIMEOUT)
    assert answer.exit_code == 0, answer.output
    seen = [line.split("; ")[0] for line in answer.stderr.splitlines()]
    assert [line.split(" (")[0].split(",")[0] for line in seen] == [
        f"waiting: tessera-node: {count} of 3 updated" for count in (3, 0, 1, 2)
    ]
    assert "No problems found." in answer.stdout
    assert "tessera-node: 3 of 3 updated, 3 available" in answer.stdout


def test_the_same_state_is_reported_once(upgrade: Upgrade, wait: Callable[..., Result]) -> None:
    upgrade.steps = [lambda: None] * 20 + [lambda: rolled_out(upgrade)]
    assert len(wait("--timeout", TIMEOUT).stderr.splitlines()) == 1


def test_a_fast_upgrade_does_not_fill_a_log_with_lines(
    upgrade: Upgrade, wait: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "LINE_INTERVAL_SECONDS", 60.0)
    upgrade.steps = [partial(upgrade.replace, count) for count in range(1, 4)]
    assert len(wait("--timeout", TIMEOUT).stderr.splitlines()) == 1


def test_json_has_the_checks_of_the_rollout_alone_and_nothing_else_is_on_stdout(
    upgrade: Upgrade, wait: Callable[..., Result]
) -> None:
    upgrade.steps = [lambda: None, lambda: rolled_out(upgrade)]
    answer = wait("--timeout", TIMEOUT, "-o", "json")
    results = json.loads(answer.stdout)
    assert [result["check"] for result in results] == ["controller", "rollout", "slices", "mode"]
    assert all(result["ok"] for result in results)


def hung(upgrade: Upgrade) -> None:
    upgrade.replace(1)
    upgrade.pod("new-node-b", "node-b", ready=False)
    upgrade.counts(1)


def ending(upgrade: Upgrade) -> None:
    rolled_out(upgrade)
    upgrade.pod("old-node-c", "node-c", metadata={"deletionTimestamp": "2026-11-22T12:00:00Z"})


def unavailable(upgrade: Upgrade) -> None:
    rolled_out(upgrade)
    upgrade.counts(3, available=2)


def without_leader(upgrade: Upgrade) -> None:
    rolled_out(upgrade)
    upgrade.heartbeat(None)


def one_standalone(upgrade: Upgrade) -> None:
    rolled_out(upgrade)
    upgrade.plan("node-b", PlanMode.STANDALONE)


def one_incomplete(upgrade: Upgrade) -> None:
    rolled_out(upgrade)
    item = slice_of([{"name": "gpu-0"}], count=2, node="node-b")
    upgrade.store(f"{SLICES}/node-b", spec=msgspec.to_builtins(item.spec))


def controller_not_updated(upgrade: Upgrade) -> None:
    rolled_out(upgrade)
    old = upgrade.folder(DEPLOYMENT)["tessera-controller"]
    upgrade.store(
        DEPLOYMENT, metadata=old["metadata"], spec=old["spec"], status={**old["status"], "updatedReplicas": 1}
    )


def uninstalled(upgrade: Upgrade) -> None:
    for path in (
        DAEMON_SET,
        DEPLOYMENT,
        *(f"{leases('tessera')}/{name}" for name in upgrade.folder(leases("tessera"))),
    ):
        upgrade.drop(path)
    for name in [*upgrade.folder(PODS)]:
        upgrade.drop(f"{PODS}/{name}")


@pytest.mark.parametrize(
    ("happened", "findings"),
    [
        (hung, ["pod new-node-b is not ready on node-b", "node-b, node-c still has a plugin of an earlier version"]),
        (ending, ["pod old-node-c is ending"]),
        (unavailable, ["tessera-node is not rolled out: 3 of 3 updated, 2 available"]),
        (without_leader, ["controller no replica is the leader"]),
        (one_standalone, ["node-b is standalone although a controller is running"]),
        (one_incomplete, ["node-b its pool is incomplete: 1 of 2 slices"]),
        (controller_not_updated, ["tessera-controller is not rolled out: 1 of 2 updated, 2 available"]),
        (uninstalled, ["Tessera is not installed here"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_does_not_become_ready_is_named_after_the_timeout_with_exit_code_1(
    upgrade: Upgrade, wait: Callable[..., Result], happened: Callable[[Upgrade], None], findings: list[str]
) -> None:
    happened(upgrade)
    answer = wait("--timeout", "0.1")
    assert answer.exit_code == 1
    for finding in findings:
        assert finding in answer.stdout
    assert answer.stdout.count("\n    -> ") >= len(findings)


@pytest.mark.parametrize("resource", ["daemonsets", "deployments", "pods", "leases", "resourceslices"])
def test_a_list_that_is_forbidden_ends_the_wait_at_once_with_exit_code_1(
    upgrade: Upgrade, wait: Callable[..., Result], resource: str
) -> None:
    rolled_out(upgrade)
    upgrade.forbidden.add(resource)
    answer = wait()
    assert answer.exit_code == 1
    assert "could not read everything" in answer.stdout


def test_an_api_server_that_is_busy_for_a_moment_does_not_end_the_wait(
    upgrade: Upgrade, wait: Callable[..., Result]
) -> None:
    rolled_out(upgrade)
    upgrade.once("list", *[lambda exchange: exchange.refuse(503, "busy")] * 2)
    answer = wait("--timeout", TIMEOUT)
    assert answer.exit_code == 0, answer.output
