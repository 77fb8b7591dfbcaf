"""``tessera status`` as a command, against a server that speaks the API's wire protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from controller.eviction.recent_evictions import ANNOTATION, Eviction, Record
from driver.kube.lease import leases
from driver.model.plan import PATH
from tessera.cli import main
from tessera.status import snapshot
from tests.support.api_server import SLICES, Exchange, ObjectApi
from tests.unit.tessera.status.test_checks import NOW, item, lease
from tests.unit.tessera.test_cli import KUBECONFIG

NODES = "/api/v1/nodes"
DAEMON_SETS = "/apis/apps/v1/namespaces/{}/daemonsets/tessera-node"


class StatusApi(ObjectApi):
    """With a version, and resources that are unknown or that nobody may list."""

    def __init__(self) -> None:
        self.forbidden: set[str] = set()
        self.unknown: set[str] = set()
        super().__init__()

    def _answer(self, exchange: Exchange) -> None:
        if exchange.route == "/version":
            return exchange.send_json({"gitVersion": "v1.37.1"})
        parts = set(exchange.route.split("/"))
        if parts & self.forbidden:
            return exchange.refuse(403, "forbidden: User x cannot list this")
        return exchange.refuse(404, "page not found") if parts & self.unknown else super()._answer(exchange)


@pytest.fixture
def api() -> Iterator[StatusApi]:
    with StatusApi() as server:
        server.store("/api/v1/namespaces/default")
        server.store(f"{NODES}/node-a")
        yield server


@pytest.fixture
def kubeconfig(api: StatusApi, tmp_path: Path) -> Path:
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump({**KUBECONFIG, "clusters": [{"name": "c", "cluster": {"server": api.server.url}}]}))
    return file


def status(kubeconfig: Path, *flags: str) -> Result:
    return CliRunner().invoke(main, ["status", "--kubeconfig", str(kubeconfig), *flags])


def checks(kubeconfig: Path, *flags: str) -> dict[str, dict[str, Any]]:
    return {each["check"]: each for each in json.loads(status(kubeconfig, "-o", "json", *flags).output)}


def test_a_cluster_without_tessera_gets_one_finding(api: StatusApi, kubeconfig: Path) -> None:
    api.unknown.add("gpunodeplans")
    answer = status(kubeconfig)
    assert answer.exit_code == 1
    assert "installation: Tessera is not installed here\n    -> helm install tessera" in answer.output
    assert answer.output.endswith("1 problem.\n")


@pytest.mark.parametrize("trace", [DAEMON_SETS.format("gpus"), f"{leases('gpus')}/tessera-controller"])
def test_a_namespace_that_is_not_tesseras_is_a_mistake_and_the_right_one_is_named(
    api: StatusApi, kubeconfig: Path, trace: str
) -> None:
    api.store(trace, spec={})
    for name in ("nope", "default"):
        answer = status(kubeconfig, "--namespace", name)
        assert answer.exit_code == 2, answer.output
        told = f"--namespace {name}: Tessera is not installed there; it is in --namespace gpus"
        assert told in answer.output
    assert status(kubeconfig, "--namespace", "gpus").exit_code == 1


def test_a_namespace_that_is_not_there_is_a_mistake_even_if_tessera_is_nowhere_to_be_seen(
    api: StatusApi, kubeconfig: Path
) -> None:
    api.forbidden.add("daemonsets")
    api.store(f"{SLICES}/a", spec=msgspec.to_builtins(item().spec))
    answer = status(kubeconfig, "--namespace", "nope")
    assert answer.exit_code == 2
    assert "--namespace nope: the namespace does not exist" in answer.output


def test_a_namespace_that_may_not_be_looked_into_is_no_mistake(api: StatusApi, kubeconfig: Path) -> None:
    api.store(DAEMON_SETS.format("gpus"))
    api.forbidden |= {"pods", "leases"}
    answer = status(kubeconfig, "--namespace", "nope")
    assert answer.exit_code == 1
    assert "Leases, pods can't be listed" in answer.output


def test_what_may_not_be_listed_is_unread_and_the_exit_code_says_that_not_all_is_known(
    api: StatusApi, kubeconfig: Path
) -> None:
    for name in ("tessera-controller", "tessera-controller-heartbeat"):
        api.store(f"{leases('tessera')}/{name}", **{k: v for k, v in lease(name, "c").items() if k != "metadata"})
    api.store(f"{PATH}/node-a", spec={}, status={})
    api.forbidden |= {"resourceslices", "events"}
    told = checks(kubeconfig)
    assert told["slices"]["summary"] == "ResourceSlices can't be listed"
    assert {told[name]["state"] for name in ("slices", "devices", "claims", "health", "mode")} == {"unread"}
    assert not told["slices"]["ok"]
    [finding] = told["API server"]["findings"]
    assert finding["about"] == "pending claims, ResourceSlices, Events"
    assert "403" in finding["message"]
    assert status(kubeconfig).exit_code == 1


@pytest.mark.parametrize(
    ("may_read", "pods"), [pytest.param(True, ["dev/notebook"], id="allowed"), pytest.param(False, [], id="forbidden")]
)
def test_the_pods_that_were_evicted_are_those_that_the_controller_has_recorded(
    api: StatusApi, kubeconfig: Path, may_read: bool, pods: list[str]
) -> None:
    api.store(f"{leases('tessera')}/tessera-controller", spec={})
    now = datetime.now(UTC).timestamp()
    past = [
        Eviction(name, "dev/o", "n", at, name=name) for name, at in (("dev/old", 0.0), ("dev/notebook", now - 7200))
    ]
    text = msgspec.json.encode(Record(tuple(past))).decode()
    api.store("/api/v1/namespaces/tessera/configmaps/tessera-fence", metadata={"annotations": {ANNOTATION: text}})
    api.forbidden |= set() if may_read else {"configmaps"}
    check = checks(kubeconfig)["evictions"]
    assert [eviction["pod"] for eviction in check["evictions"]] == pods
    assert check["state"] == ("ok" if may_read else "unread")
    assert may_read or check["summary"] == "evicted pods can't be listed"


def test_each_list_is_read_once(api: StatusApi, kubeconfig: Path) -> None:
    api.store(f"{PATH}/node-a", spec={}, status={})
    api.store(f"{SLICES}/a", spec=msgspec.to_builtins(item().spec))
    checks(kubeconfig)
    assert api.repeated_lists() == []


@pytest.mark.parametrize("ahead", [-3600, 0, 3600])
def test_the_age_of_the_heartbeat_is_that_by_the_api_servers_clock(
    api: StatusApi, kubeconfig: Path, ahead: float
) -> None:
    api.server.ahead_seconds = ahead
    ago = NOW - datetime.now(UTC) - timedelta(seconds=ahead)
    for name in ("tessera-controller", "tessera-controller-heartbeat"):
        api.store(f"{leases('tessera')}/{name}", **lease(name, "controller-1", ago_s=ago.total_seconds()))
    api.store(f"{PATH}/node-a", spec={}, status={})
    found = checks(kubeconfig)
    assert (found["controller"]["findings"], found["clocks"]["findings"]) == ([], [])


def test_a_plan_that_its_node_follows_meanwhile_is_read_again(
    api: StatusApi, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.store(f"{SLICES}/a", spec=msgspec.to_builtins(item().spec))
    api.store(f"{PATH}/node-a", metadata={"name": "node-a", "generation": 2}, spec={}, status={"mode": "Planned"})

    def follow(_: float) -> None:
        """The node reports the version 2 while somebody writes the next one."""
        metadata = {"name": "node-a", "generation": 3}
        api.store(f"{PATH}/node-a", metadata=metadata, spec={}, status={"mode": "Planned", "observedGeneration": 2})

    monkeypatch.setattr("time.sleep", follow)
    assert checks(kubeconfig)["mode"]["findings"] == []


def test_a_node_that_does_not_follow_its_plan_is_a_finding(
    api: StatusApi, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "LAG_SECONDS", 1.0)
    api.store(f"{SLICES}/a", spec=msgspec.to_builtins(item().spec))
    api.store(f"{PATH}/node-a", metadata={"name": "node-a", "generation": 2}, spec={}, status={"mode": "Planned"})
    [finding] = checks(kubeconfig)["mode"]["findings"]
    assert finding["message"] == "is 2 versions of its plan behind"
