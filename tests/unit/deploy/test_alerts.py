"""What the rules of alerts ask for is what the processes serve: metrics, labels, and values of labels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from controller.explain.reason import ReasonCode
from controller.metrics import ControllerMetrics
from driver.common_metrics import ApiMetrics
from driver.kube.controller_heartbeat import HEARTBEAT
from driver.kube.lease import leases
from tests.support.gpus import H100
from tests.support.queues import Situation, fleet_gpu, request
from tests.unit.controller.test_metrics import reported
from tests.unit.deploy.test_dashboard import ALERTS, BY, OF_OTHERS, SCRAPED, SELECTOR
from tests.unit.kubelet_plugin.metrics.test_metrics import Measured

MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
SERIES = re.compile(r"\btessera_\w+")
MATCHES: Mapping[str, Callable[[str, str], bool]] = {
    "=": lambda value, pattern: value == pattern,
    "!=": lambda value, pattern: value != pattern,
    "=~": lambda value, pattern: bool(re.fullmatch(pattern, value)),
    "!~": lambda value, pattern: not re.fullmatch(pattern, value),
}

OF_USAGE = "tessera_claim_"
"""Beginning of the metrics of claims that use devices; tests/integration/test_usage_alerts.py fires their alerts."""


def of_controller() -> Iterable[Metric]:
    """What a leader serves that has one pending claim and sends its heartbeat, though it may not read Nodes."""
    registry, situation = CollectorRegistry(), Situation([fleet_gpu("n", 0, H100, "full")])
    metrics, requests = ControllerMetrics(registry), ApiMetrics(registry)
    created = {"creationTimestamp": "2026-01-01T12:00:00Z"}
    situation.claim("one", request(), metadata=created)
    situation.pod("pod", "one", metadata=created)
    queue, reasons = situation.queue, {"default/one": ReasonCode.FRAGMENTED.value}
    metrics.decision_made(queue, queue.feasibility.fleet, (), reasons, reported({}))
    requests.observe("PATCH", f"{leases('tessera')}/{HEARTBEAT}", None, 200, 0.1)
    requests.observe("GET", "/api/v1/nodes", None, 403, 0.1)
    return registry.collect()


@pytest.fixture
def served(tmp_path: Path) -> Mapping[str, list[Mapping[str, str]]]:
    """The labels of every series of both processes, by its name."""
    labels: dict[str, list[Mapping[str, str]]] = {}
    for family in (*of_controller(), *Measured(tmp_path).metrics.registry.collect()):
        for sample in family.samples:
            labels.setdefault(sample.name, []).append(sample.labels)
    return labels


@pytest.mark.parametrize(
    "query", [rule["expr"] for rule in ALERTS.values() if OF_USAGE not in rule["expr"]], ids=lambda query: query[:60]
)
def test_every_series_that_an_alert_asks_for_is_served_with_these_labels(
    query: str, served: Mapping[str, list[Mapping[str, str]]]
) -> None:
    names = SERIES.findall(query)
    assert set(names) <= served.keys()
    present = {label for name in names for labels in served[name] for label in labels}
    for labels in BY.findall(query):
        asked = {label.strip() for label in labels.split(",")}
        assert asked <= present | SCRAPED | set().union(*OF_OTHERS.values())
    for name, selector in SELECTOR.findall(query):
        matchers = MATCHER.findall(selector)
        assert name in OF_OTHERS or any(
            all(MATCHES[operator](labels[label], value) for label, operator, value in matchers)
            for labels in served[name]
        ), f"no series of {name} has {selector}"
