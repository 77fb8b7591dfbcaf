"""A real Prometheus scrapes a real node plugin and a real controller: no alert without a fault, then fault by fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import urllib3
import yaml

from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.prometheus import running
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.integration.test_fault_alerts import GROUPS
from tests.support.chart import install
from tests.support.controller import ControllerProcess
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.ports import kept_port
from tests.support.workloads import Workloads, request

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

SOON_S = 90.0
RIGHTS = "clusterrolebinding/tessera-controller"


@dataclass(frozen=True)
class Watched:
    """A cluster of one node, and the address of a Prometheus that scrapes plugin and controller."""

    workloads: Workloads
    plugin: PluginProcess
    controller: ControllerProcess
    prometheus: str

    def firing(self) -> set[str]:
        answer = urllib3.request("GET", f"{self.prometheus}/api/v1/alerts", timeout=10).json()
        assert answer["status"] == "success", answer
        return {alert["labels"]["alertname"] for alert in answer["data"]["alerts"] if alert["state"] == "firing"}

    def wait_firing(self, *alerts: str) -> None:
        wait_for(lambda: self.firing() == {*alerts}, SOON_S, f"exactly these alerts fire: {alerts}")


@pytest.fixture
def watched(prometheus_folder: Path, tmp_path: Path) -> Iterator[Watched]:
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster.start(Settings(name="fault-alerts", nodes=1), Progress()))
        install(cluster)
        targets = [f"127.0.0.1:{stack.enter_context(kept_port())}" for _ in range(2)]
        plugin = PluginProcess(cluster, cluster.nodes[0], PluginFlags("sim:h100-pcie-4", metrics_address=targets[0]))
        controller = ControllerProcess(cluster, flags=("--metrics-address", targets[1]))
        for process in (plugin, controller):
            process.start()
            stack.callback(process.stop)
        rules = tmp_path / "rules.yml"
        # As in the chart, but without waiting.
        groups = [{**group, "rules": [{**rule, "for": "1s"} for rule in group["rules"]]} for group in GROUPS]
        rules.write_text(yaml.safe_dump({"groups": groups}))
        configuration = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "tessera", "honor_labels": True, "static_configs": [{"targets": targets}]}],
        }
        address = stack.enter_context(running(prometheus_folder, tmp_path, configuration))
        yield Watched(Workloads(cluster), plugin, controller, address)


def test_no_alert_fires_while_all_is_well_and_each_fault_adds_its_own(watched: Watched) -> None:
    watched.wait_firing()
    watched.plugin.fault("lose", "--gpu", "0")
    watched.wait_firing("TesseraGpuFault")
    watched.workloads.cluster.kubectl("delete", RIGHTS)
    watched.workloads.claim("new", request("gpu-training"))
    watched.workloads.pod("new", "new")
    watched.wait_firing("TesseraGpuFault", "TesseraForbidden")
    watched.controller.stop()
    watched.wait_firing("TesseraGpuFault", "TesseraForbidden", "TesseraProcessDown", "TesseraNoLeader")
    watched.plugin.stop()
    wait_for(lambda: "TesseraGpuFault" not in watched.firing(), SOON_S, "series of the plugin are gone")
    assert {"TesseraProcessDown", "TesseraNoLeader"} <= watched.firing()
