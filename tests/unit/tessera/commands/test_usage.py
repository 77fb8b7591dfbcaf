"""``tessera usage`` as a command: pages of node plugins behind an API server, or read directly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from tessera.cli import main
from tessera.commands.usage import usage as command
from tests.support.api_server import SLICES, Exchange, HttpServer, ObjectApi
from tests.support.usage_pages import A100, GIB, GpuSeries, Held, usage_page
from tests.unit.tessera.test_cli import KUBECONFIG

PODS = "/api/v1/namespaces/tessera/pods"
ACTIVITY = {"sm_active_ratio": 0.25, "dram_active_ratio": 0.5, "idle_seconds": 0.0}
PAGE = usage_page(
    "node-1",
    [GpuSeries(), GpuSeries("gpu-1", A100, 8, "no activity counters on NVIDIA A100")],
    [
        Held(values={**ACTIVITY, "memory_used_bytes": 20 * GIB, "memory_total_bytes": 80 * GIB}),
        Held("team-b/serve", "gpu-1-1g-10gb-0", "gpu-1", 1, "gpu-inference"),
    ],
)
OTHER_PAGE = usage_page(
    "node-2", [GpuSeries()], [Held("team-b/idle", values={"sm_active_ratio": 0, "idle_seconds": 1e5})]
)


TABLE = (
    "allocated 17 of 24 slices, used 4 of 16 with known activity (25 %); idle 24 h: 1 claim\n"
    "activity unknown for 1 slice: no activity counters on NVIDIA A100\n"
    "\n"
    "NAMESPACE  CLAIMS  ALLOCATED  USED  USED %  MEMORY         IDLE 24 H  UNKNOWN\n"
    "team-b     2       9          0     0 %     -              1          1\n"
    "team-a     1       8          4     50 %    20.0/80.0 GiB  0          -\n"
)
"""What the documentation shows, too."""

DOCUMENTATION = Path(__file__).parents[4] / "docs" / "usage.md"


class UsageApi(ObjectApi):
    """Answers for pods as the API server's proxy does: ``pages`` by pod; a number is a status."""

    def __init__(self) -> None:
        self.pages: dict[str, str | int] = {}
        super().__init__()

    def _answer(self, exchange: Exchange) -> None:
        if not exchange.route.endswith(":9400/proxy/metrics"):
            return super()._answer(exchange)
        pod = exchange.route.split("/")[-3].removeprefix("http:").removesuffix(":9400")
        page = self.pages[pod]
        if isinstance(page, int):
            return exchange.refuse(page, f"error trying to reach service: {HTTPStatus(page).phrase} of pods/proxy")
        return exchange.send(200, page.encode(), "text/plain; version=0.0.4")

    def add_plugin(self, node: str, page: str | int, *, port: bool = True) -> None:
        pod = f"tessera-node-{node}"
        container: dict[str, Any] = {"ports": [{"name": "metrics", "containerPort": 9400}] if port else []}
        spec = {"serviceAccountName": "tessera-node", "nodeName": node, "containers": [container]}
        self.store(f"{PODS}/{pod}", spec=spec, status={"phase": "Running"})
        self.pages[pod] = page


@pytest.fixture
def api() -> Iterator[UsageApi]:
    with UsageApi() as server:
        server.add_plugin("node-1", PAGE)
        server.add_plugin("node-2", OTHER_PAGE)
        server.store(f"{PODS}/other", spec={"serviceAccountName": "default", "nodeName": "node-3"})
        yield server


@pytest.fixture
def kubeconfig(api: UsageApi, tmp_path: Path) -> Path:
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump({**KUBECONFIG, "clusters": [{"name": "c", "cluster": {"server": api.server.url}}]}))
    return file


def usage(kubeconfig: Path, *flags: str) -> Result:
    return CliRunner().invoke(main, ["usage", "--kubeconfig", str(kubeconfig), *flags])


def groups(kubeconfig: Path, *flags: str) -> dict[tuple[str | None, ...], dict[str, Any]]:
    answer = usage(kubeconfig, *flags, "-o", "json")
    assert answer.exit_code == 0, answer.output
    return {tuple(group["key"].values()): group for group in json.loads(answer.stdout)["groups"]}


def test_the_table_shows_who_uses_what_is_allocated(kubeconfig: Path) -> None:
    answer = usage(kubeconfig)
    assert answer.exit_code == 0, answer.output
    assert f"```\n{TABLE}```" in DOCUMENTATION.read_text()
    assert click.unstyle(answer.stdout) == TABLE


def test_the_key_can_be_the_class_the_claim_or_a_label_of_the_namespace(api: UsageApi, kubeconfig: Path) -> None:
    def allocated(*flags: str) -> dict[tuple[str | None, ...], float]:
        return {key: group["allocated"] for key, group in groups(kubeconfig, *flags).items()}

    api.store("/api/v1/namespaces/team-a", metadata={"name": "team-a", "labels": {"cost/centre": "42"}})
    api.store("/api/v1/namespaces/other")
    assert allocated("--by", "class") == {("gpu-training",): 16, ("gpu-inference",): 1}
    assert allocated("--by", "claim") == {("team-a", "train"): 8, ("team-b", "idle"): 8, ("team-b", "serve"): 1}
    assert allocated("--by", "label=cost/centre") == {("42",): 8, (None,): 9}


def test_a_label_of_a_namespace_is_no_formula_in_a_spreadsheet(api: UsageApi, kubeconfig: Path) -> None:
    api.store("/api/v1/namespaces/team-a", metadata={"name": "team-a", "labels": {"team": "-1"}})
    lines = usage(kubeconfig, "--by", "label=team", "-o", "csv").stdout.splitlines()
    assert [line.split(",")[:2] for line in lines] == [["team", "allocated"], ["", "9"], ["'-1", "8"]]


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        pytest.param(
            lambda api: api.add_plugin("node-2", 503), "node-2 can't be read: GET ", id="no answer"
        ),
        pytest.param(
            lambda api: api.add_plugin("node-2", "tessera_gpus 8\n"),
            "node-2 serves no usage metrics; start its plugin with --usage-interval",
            id="not measured",
        ),
        pytest.param(
            lambda api: api.add_plugin("node-2", OTHER_PAGE, port=False),
            "node-2 publishes devices, but no pod of a node plugin with a metrics port",
            id="no port",
        ),
        pytest.param(
            lambda api: api.drop(f"{PODS}/tessera-node-node-2"),
            "node-2 publishes devices, but no pod of a node plugin",
            id="no pod",
        ),
    ],
)  # fmt: skip
def test_a_node_without_usage_is_named_and_the_exit_code_is_1(
    change: Any, warning: str, api: UsageApi, kubeconfig: Path
) -> None:
    slices = {"driver": "gpu.tessera.dev", "nodeName": "node-2", "pool": {"name": "p", "resourceSliceCount": 1}}
    api.store(f"{SLICES}/one", spec=slices)
    change(api)
    answer = usage(kubeconfig)
    assert answer.exit_code == 1
    assert f"warning: {warning}" in answer.stderr
    assert answer.stdout.startswith("allocated 9 of 16 slices")


def test_an_account_without_the_right_is_told_which(api: UsageApi, kubeconfig: Path) -> None:
    api.add_plugin("node-1", 403)
    answer = usage(kubeconfig)
    assert answer.exit_code == 1
    assert "403" in answer.stderr
    assert "docs/usage.md" in answer.stderr


def test_a_cluster_without_plugins_is_an_error(kubeconfig: Path) -> None:
    answer = usage(kubeconfig, "--namespace", "elsewhere")
    assert answer.exit_code == 3
    assert "no pod of a node plugin in namespace elsewhere" in answer.stderr


def test_pages_can_be_read_without_a_cluster() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.send(200, PAGE.encode(), "text/plain") if exchange.route == "/metrics" else exchange.refuse(404, "no")

    with HttpServer(answer) as server:
        read = CliRunner().invoke(main, ["usage", "--node-metrics", f"{server.url}/metrics", "-o", "json"])
        missed = CliRunner().invoke(main, ["usage", "--node-metrics", f"{server.url}/other"])
    assert json.loads(read.stdout)["total"]["allocated"] == 9
    assert (read.exit_code, missed.exit_code) == (0, 3)
    assert "/other" in missed.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--by", "pod"], "--by pod: must be namespace, class, claim or label=KEY"),
        (["--by", "label="], "--by label=: must be"),
        (["--by", "label=-x"], "--by label=-x: must be"),
        (["--since", "1d"], "--since and --prometheus-token-file need --prometheus"),
        (["--prometheus", "http://x", "--since", "soon"], "--since soon: must be a duration from 1m to 5 years"),
        (["--prometheus", "http://x", "--since", "9s"], "--since 9s: must be a duration from 1m to 5 years"),
        (["--idle", "9999w"], "--idle 9999w: must be a duration"),
        (["--prometheus", "http://x", "--node-metrics", "http://y"], "are two sources"),
        (["--node-metrics", "y:9400"], "--node-metrics: is no address"),
        (["--prices", "/nowhere"], "--prices /nowhere: can't be read"),
    ],
)
def test_wrong_flags_are_refused_with_what_is_accepted(flags: list[str], said: str) -> None:
    answer = CliRunner().invoke(main, ["usage", *flags])
    assert answer.exit_code == 2
    assert said in answer.stderr


def test_every_flag_is_documented() -> None:
    text = DOCUMENTATION.read_text()
    flags = {option for each in command.params for option in each.opts if option.startswith("--")}
    common = {"--namespace", "--kubeconfig", "--driver-name", "--output"}
    assert {flag for flag in flags - common if f"`{flag}`" not in text} == set()
