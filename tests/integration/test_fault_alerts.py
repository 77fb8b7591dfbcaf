"""A real promtool evaluates the rules of the chart: each alert about faults fires for its fault, and only for it.

``tests/unit/deploy/test_alerts.py`` shows that the processes serve these series.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.support.chart import CHART

pytestmark = pytest.mark.integration

FILES = [CHART / "rules" / name for name in ("processes.yaml", "controller.yaml")]
GROUPS = [group for file in FILES for group in yaml.safe_load(file.read_text())["groups"]]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
MINUTES = 180
PLUGIN = 'namespace="tessera", pod="tessera-node-1", node="n1", instance="10.0.0.1:9400"'
LEADER = 'namespace="tessera", pod="tessera-controller-1", instance="10.0.0.2:9400"'


class Fault(NamedTuple):
    """A series, its values while all is well and during the fault, and the labels of the alert that fires for it.

    Values are promtool's: ``0x9`` is ten times 0, ``0+1x9`` counts up, ``_x9`` is no sample. ``after`` is how many
    minutes after the beginning of the fault the alert fires at the latest, besides what it waits.
    """

    alert: str
    series: str
    well: str
    ill: str
    labels: dict[str, str]
    after: int = 2


OF_NODE = {"pod": "tessera-node-1", "node": "n1", "instance": "10.0.0.1:9400"}
OF_LEADER = {"namespace": "tessera", "pod": "tessera-controller-1", "instance": "10.0.0.2:9400"}
CONSTANT, GROWING = ("0x180", "1x180"), ("5x180", "5+1x180")
SETS = 'kube_daemonset_status_number_unavailable{namespace="tessera", daemonset="tessera-node"}'
HEARTBEATS = f'tessera_api_requests_total{{verb="patch", resource="leases", code="200", {LEADER}}}'
EVICTED = f'tessera_evictions_total{{trigger="failed-start", outcome="evicted", {LEADER}}}'
DECIDED = f'tessera_unprepared_claims{{cause="GPU", {LEADER}}}'
PENDING = "tessera_oldest_pending_claim_age_seconds"

FAULTS = {
    "a plugin is down": Fault(
        "TesseraProcessDown", f'up{{job="tessera/tessera", {PLUGIN}}}', "1x180", "0x180", OF_NODE
    ),
    "a process without a pod is down": Fault(
        "TesseraProcessDown", 'up{job="tessera", instance="n2:9400"}', "1x180", "0x180", {"instance": "n2:9400"}
    ),
    "a pod of a plugin is not ready": Fault(
        "TesseraNodePluginUnavailable", SETS, *CONSTANT, {"namespace": "tessera", "daemonset": "tessera-node"}
    ),
    **{
        f"a node is {condition}": Fault(
            "TesseraNodeUnfit",
            f'tessera_node_conditions{{type="{condition}", {PLUGIN}}}',
            *CONSTANT,
            {**OF_NODE, "type": condition},
        )
        for condition in ("Unable", "Unregistered", "DriverFilesChanged")
    },
    **{
        f"a GPU is {kind}": Fault(
            "TesseraGpuFault", f'tessera_gpu_faults{{kind="{kind}", {PLUGIN}}}', *CONSTANT, {**OF_NODE, "kind": kind}
        )
        for kind in ("xid", "unavailable", "recovery", "failing", "lost", "stuck", "mps-lost")
    },
    "claims use more memory than they have": Fault(
        "TesseraClaimsAboveMemory", f"tessera_claims_above_memory{{{PLUGIN}}}", *CONSTANT, OF_NODE
    ),
    "claims can not be prepared": Fault(
        "TesseraPreparationsFailing",
        f'tessera_prepare_duration_seconds_count{{result="error", {PLUGIN}}}',
        *GROWING,
        OF_NODE,
    ),
    "a right is missing": Fault(
        "TesseraForbidden",
        f'tessera_api_requests_total{{verb="list", resource="nodes", code="403", {LEADER}}}',
        *GROWING,
        {**OF_LEADER, "verb": "list", "resource": "nodes"},
    ),
    "nobody leads": Fault("TesseraNoLeader", DECIDED, "0x180", "_x180", {"cause": "GPU"}, after=7),
    "the leader sends no heartbeat": Fault("TesseraPlansOutdated", HEARTBEATS, "5+6x180", "5x180", OF_LEADER),
    "a claim is pending for hours": Fault(
        "TesseraClaimsPending",
        f'{PENDING}{{class="gpu-training", namespace="team-a"}}',
        "600x180",
        "0+60x180",
        {"class": "gpu-training", "namespace": "team-a"},
        after=62,
    ),
    "pods are evicted": Fault(
        "TesseraPodsEvicted", EVICTED, "0x180", "0 1x179", {"trigger": "failed-start", "outcome": "evicted"}
    ),
    "claims wait for what is in pieces": Fault(
        "TesseraFragmented",
        f'tessera_pending_claims{{class="gpu-training", reason="Fragmented", {LEADER}}}',
        *CONSTANT,
        {"class": "gpu-training"},
    ),
}

WELL = {fault.series: fault.well for fault in FAULTS.values()}
"""A cluster in which nothing is wrong, though a GPU is cordoned and a claim pends for another reason."""
WELL |= {
    f'tessera_gpu_faults{{kind="cordoned", {PLUGIN}}}': "1x180",
    f'tessera_pending_claims{{class="gpu-dev", reason="AllHeld", {LEADER}}}': "3x180",
    f'tessera_api_requests_total{{verb="get", resource="nodes", code="404", {LEADER}}}': "0+1x180",
    f'tessera_prepare_duration_seconds_count{{result="success", {PLUGIN}}}': "0+1x180",
}


def minutes(duration: str) -> int:
    return int(duration.removesuffix("m"))


def evaluate(promtool: Path, folder: Path, series: dict[str, str], expected: dict[int, list[dict[str, str]]]) -> str:
    """What promtool says if other alerts fire than ``expected``, by minute; else nothing."""
    tests = [
        {
            "expr": 'ALERTS{alertstate="firing"}',
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": sample_of(labels), "value": 1} for labels in alerts],
        }
        for minute, alerts in expected.items()
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    test: dict[str, Any] = {"interval": "1m", "input_series": inputs, "promql_expr_test": tests}
    file = folder / "test.yaml"
    rules = [str(rule_file) for rule_file in FILES]
    file.write_text(yaml.safe_dump({"rule_files": rules, "evaluation_interval": "1m", "tests": [test]}))
    answer = subprocess.run(
        [str(promtool), "test", "rules", str(file)], capture_output=True, text=True, check=False, timeout=60
    )
    return answer.stdout + answer.stderr if answer.returncode else ""


def sample_of(labels: dict[str, str]) -> str:
    pairs = {**labels, "alertstate": "firing", "severity": ALERTS[labels["alertname"]]["labels"]["severity"]}
    return f"ALERTS{{{', '.join(f'{name}={json.dumps(value)}' for name, value in pairs.items())}}}"


@pytest.fixture
def promtool(prometheus_folder: Path) -> Path:
    return prometheus_folder / "promtool"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_promtool_accepts_the_rules(promtool: Path, file: Path) -> None:
    command = [str(promtool), "check", "rules", "--lint=all", "--lint-fatal", str(file)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_no_alert_fires_while_all_is_well(promtool: Path, tmp_path: Path) -> None:
    assert evaluate(promtool, tmp_path, WELL, {minute: [] for minute in range(0, MINUTES, 20)}) == ""


def test_every_alert_has_a_fault() -> None:
    assert {fault.alert for fault in FAULTS.values()} == ALERTS.keys()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_an_alert_fires_for_its_fault_and_for_no_other(promtool: Path, tmp_path: Path, fault: Fault) -> None:
    firing = {"alertname": fault.alert, **fault.labels}
    fires = minutes(ALERTS[fault.alert]["for"]) + fault.after
    expected = {minutes(ALERTS[fault.alert]["for"]) - 1: [], fires: [firing]}
    assert evaluate(promtool, tmp_path, {**WELL, fault.series: fault.ill}, expected) == ""
