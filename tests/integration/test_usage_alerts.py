"""A real Prometheus scrapes real processes: every panel of the usage dashboards shows something, every alert fires."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

import driver.simulator
from driver.simulator.node import SimulatedNode
from driver.simulator.state.gpu_load import SimulatedActivity, constant
from kubelet_plugin.checkpoint.records import ClaimRecord, decode_record
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.prometheus import running
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import CHART, install
from tests.support.controller import ControllerProcess
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.ports import kept_port
from tests.support.workloads import Workloads, request

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

INTERVAL = "1s"
SOON_S = 60.0
GIB = 1 << 30
SIMULATED_NODES = Path(driver.simulator.__file__).parent / "data" / "nodes"
RULES = CHART / "rules" / "usage.yaml"
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
BOARDS = [json.loads(file.read_text()) for file in sorted((CHART / "dashboards").glob("usage-*.json"))]
PANELS = {f"{board['title']}: {panel['title']}": panel for board in BOARDS for panel in board["panels"]}
VARIABLES = {"__rate_interval": "10s", "__range": "1m", "price": "2.5", "node": ".*", "namespace": ".*"}

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
FIRING = {
    "TesseraClaimIdle": {"namespace": "default", "claim": "idle", "node": "node-0"},
    "TesseraGpuMemoryBound": {"namespace": "default", "claim": "bound", "node": "node-0"},
    "TesseraPartitionFull": {"namespace": "default", "claim": "full", "node": "node-0"},
    "TesseraSlicesStranded": {"product": H100},
}
"""The only alerts of the scenario, each with labels of its only instance."""


@dataclass(frozen=True)
class Watched:
    """A cluster with eight H100 and one A100, a controller, and the address of a Prometheus that scrapes all."""

    workloads: Workloads
    hopper: PluginProcess
    ampere: PluginProcess
    prometheus: str

    def get(self, path: str, **fields: str) -> Any:
        answer = urllib3.request("GET", f"{self.prometheus}/api/v1/{path}", fields=fields, timeout=10).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, query: str) -> list[float]:
        return [float(each["value"][1]) for each in self.get("query", query=query)["result"]]

    def alerts(self) -> list[dict[str, Any]]:
        """Pending and firing ones."""
        found: list[dict[str, Any]] = self.get("alerts")["alerts"]
        return found

    def evaluated_since(self, moment: float) -> bool:
        """Whether every rule was evaluated after this moment, without error."""
        rules = [rule for group in self.get("rules")["groups"] for rule in group["rules"]]
        assert len(rules) == len(FIRING)
        assert not [rule for rule in rules if rule.get("lastError")]
        return all(_seconds(rule["lastEvaluation"]) > moment for rule in rules)

    def start(self, claim: str, device_class: str, product: str, count: int = 1) -> None:
        wanted = request(device_class, selector=f'device.attributes["gpu.tessera.dev"].productName == "{product}"')
        wanted["exactly"]["count"] = count
        self.workloads.claim(claim, wanted)
        self.workloads.pod(claim, claim)


def _seconds(timestamp: str) -> float:
    """RFC 3339 with nanoseconds, in UTC or not, as seconds since 1970."""
    return datetime.fromisoformat(timestamp).timestamp()


def plugin_of(cluster: Cluster, index: int, description: str, gpus: int, address: str) -> PluginProcess:
    """A plugin with the first ``gpus`` GPUs of a simulated node."""
    content = yaml.safe_load((SIMULATED_NODES / f"{description}.yaml").read_text())
    file = cluster.directory / f"{description}.yaml"
    file.write_text(yaml.safe_dump({**content, "gpus": content["gpus"][:gpus]}))
    flags = PluginFlags(f"sim:{file}", usage_interval=INTERVAL, metrics_address=address)
    return PluginProcess(cluster, cluster.nodes[index], flags)


def configuration(targets: list[str], folder: Path) -> Mapping[str, Any]:
    """The chart's rules, but without waiting, and the scraping that docs/usage.md describes, but often."""
    rules = folder / "rules.yml"
    groups = [{**group, "rules": [{**rule, "for": "1s"} for rule in group["rules"]]} for group in GROUPS]
    rules.write_text(yaml.safe_dump({"groups": groups}))
    job = {"job_name": "tessera", "honor_labels": True, "static_configs": [{"targets": targets}]}
    often = {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
    return {"global": often, "rule_files": [str(rules)], "scrape_configs": [job]}


@pytest.fixture(scope="module")
def watched(prometheus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """With a claim that nothing uses yet."""
    folder = tmp_path_factory.mktemp("prometheus")
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster.start(Settings(name="usage-alerts", nodes=2), Progress()))
        install(cluster, {"nodePlugin": {"usageInterval": INTERVAL}})
        targets = [f"127.0.0.1:{stack.enter_context(kept_port())}" for _ in range(3)]
        plugins = (
            plugin_of(cluster, 0, "dgx-h100", 8, targets[0]),
            plugin_of(cluster, 1, "dgx-a100", 1, targets[1]),
        )
        for plugin in plugins:
            plugin.start()
            stack.callback(plugin.stop)
        controller = ControllerProcess(cluster, flags=("--metrics-address", targets[2], "--offers", "1"))
        controller.start()
        stack.callback(controller.stop)
        address = stack.enter_context(running(prometheus_folder, folder, configuration(targets, folder)))
        found = Watched(Workloads(cluster), *plugins, address)
        found.start("idle", "gpu-training", H100)
        found.workloads.running("idle")
        yield found
        assert not [line for process in (*plugins, controller) for line in process.refused()]


@pytest.fixture(scope="module")
def alerts_of_fresh_start(watched: Watched) -> list[dict[str, Any]]:
    """After everything was measured and every rule evaluated."""
    wait_for(lambda: watched.values("sum(up)") == [3], SOON_S, "all processes are scraped")
    for metric in ("tessera_claim_idle_seconds", "tessera_claim_memory_used_bytes", 'tessera_slices{state="held"} > 0'):
        wait_for(lambda metric=metric: watched.values(metric), SOON_S, metric)  # type: ignore[misc]
    measured = time.time()
    wait_for(lambda: watched.evaluated_since(measured), SOON_S, "the rules are evaluated")
    return watched.alerts()


def record_of(plugin: PluginProcess, claim: str) -> ClaimRecord:
    [found] = [each for path in plugin.records() if (each := decode_record(path.read_bytes(), path)).name == claim]
    return found


def load(plugin: PluginProcess, claim: str, activity: SimulatedActivity, memory: int) -> None:
    [device] = record_of(plugin, claim).devices
    simulated = SimulatedNode.attach(plugin.host_root)
    simulated.put_load(device.uuid or device.gpu_uuid, constant(activity, memory))


def age(plugin: PluginProcess, claim: str, seconds: float) -> None:
    """Let the plugin believe that a claim was last active longer ago, by its own file."""
    plugin.stop()
    file, uid = plugin.state_dir / "usage.json", record_of(plugin, claim).uid
    content = json.loads(file.read_text())
    for totals in content["claims"][uid].values():
        totals["activeAt"] -= seconds
    file.write_text(json.dumps(content))
    plugin.start()


@pytest.fixture(scope="module")
def scenario(watched: Watched, alerts_of_fresh_start: list[dict[str, Any]]) -> Watched:
    """A program limited by memory on a full GPU, a full partition, a GPU of unknown activity, a claim that has been
    idle for hours, one that waits for a GPU, and halves of GPUs held: their other halves are stranded where the
    controller offers nothing.
    """
    age(watched.hopper, "idle", 7200)
    watched.start("bound", "gpu-training", H100)
    watched.start("full", "gpu-inference-4g-40gb", H100)
    watched.start("halves", "gpu-inference-4g-40gb", H100, count=5)
    watched.start("unknown", "gpu-training", A100)
    watched.workloads.running("bound", "full", "halves", "unknown")
    watched.start("waiting", "gpu-training", H100)
    traffic = {"nvlink": 1e9, "pcie": 1e9}
    load(watched.hopper, "bound", SimulatedActivity.of(0.1, dram=0.9, tensor=0.05, occupancy=0.1, **traffic), 20 * GIB)
    [size] = wait_for(
        lambda: watched.values('tessera_claim_memory_total_bytes{claim="full"}'), SOON_S, "the partition is measured"
    )
    load(watched.hopper, "full", SimulatedActivity.of(0.5, dram=0.3), int(0.98 * size))
    load(watched.ampere, "unknown", SimulatedActivity.of(0.5), 20 * GIB)
    return watched


def test_promtool_accepts_the_rules(prometheus_folder: Path) -> None:
    promtool = [str(prometheus_folder / "promtool"), "check", "rules", "--lint=all", "--lint-fatal", str(RULES)]
    answer = subprocess.run(promtool, capture_output=True, text=True, check=False, timeout=SOON_S)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_no_alert_fires_when_a_claim_has_just_started(alerts_of_fresh_start: list[dict[str, Any]]) -> None:
    assert alerts_of_fresh_start == []


def test_each_alert_fires_once_and_says_for_what(scenario: Watched) -> None:
    def all_fire() -> bool:
        return {each["labels"]["alertname"] for each in scenario.alerts() if each["state"] == "firing"} >= FIRING.keys()

    wait_for(all_fire, SOON_S, "all alerts fire")
    alerts = scenario.alerts()
    found = {each["labels"]["alertname"]: each for each in alerts}
    assert len(found) == len(alerts)
    for name, labels in FIRING.items():
        assert labels.items() <= found[name]["labels"].items()
        description = found[name]["annotations"]["description"]
        claim = f"{labels['namespace']}/{labels['claim']}" if "claim" in labels else labels["product"]
        assert claim in description
        assert labels.get("node", "") in description


@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_each_query_of_a_panel_has_data(scenario: Watched, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        query = target["expr"]
        for name, value in VARIABLES.items():
            query = query.replace(f"${name}", value)

        def shown(query: str = query) -> bool:
            return any(value > 0 and math.isfinite(value) for value in scenario.values(query))

        wait_for(shown, SOON_S, f"{query} is more than zero")
