"""The Grafana dashboard asks for nothing that the processes don't export, and the chart ships it where it is wanted."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from driver.common_metrics import ApiMetrics, process_registry
from kubelet_plugin.metrics.metrics import Metrics, NodeGauges
from tests.support.chart import CHART, rendered
from tests.support.node import start_node

FILE = CHART / "dashboards" / "tessera.json"
BOARD = json.loads(FILE.read_text())
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]

NAME = re.compile(r"\b(?:tessera|process)_\w+")
SELECTOR = re.compile(r"\b((?:tessera|process)_\w+)\{([^}]*)\}")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
BY = re.compile(r"by \(([^)]*)\)")
LEGEND = re.compile(r"\{\{(\w+)\}\}")

SCRAPED = {"namespace", "pod"}
"""Labels that Prometheus adds to what a PodMonitor scrapes."""


def labels_of(registry: CollectorRegistry) -> dict[str, set[str]]:
    """The label names of every series that a registry has, by the name of the series."""
    found: dict[str, set[str]] = {}
    for family in registry.collect():
        kinds = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}.get(family.type, ("",))
        for suffix in kinds:
            found.setdefault(family.name + suffix, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What a node plugin and a controller export."""
    metrics = Metrics()
    node = start_node(tmp_path_factory.mktemp("node"))
    metrics.registry.register(NodeGauges(node.node, lambda: {"gpu-0"}, lambda _: None, lambda: {"xid": 1}))
    controller = process_registry()
    ApiMetrics(controller).observe("PATCH", "/apis/gpu.tessera.dev/v1alpha1/gpunodeplans/n", None, 200, 0.1)
    node_side, other = labels_of(metrics.registry), labels_of(controller)
    return {name: node_side.get(name, set()) | other.get(name, set()) for name in node_side.keys() | other.keys()}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_series_and_labels_that_are_exported(query: str, exported: dict[str, set[str]]) -> None:
    assert set(NAME.findall(query)) <= exported.keys()
    known = SCRAPED.union(*(exported[name] for name in NAME.findall(query)))
    for name, selector in SELECTOR.findall(query):
        assert set(LABEL.findall(selector)) <= exported[name] | SCRAPED, name
    for names in BY.findall(query):
        assert {name.strip() for name in names.split(",")} <= known


def test_a_legend_shows_labels_that_its_query_leaves() -> None:
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            left = {name.strip() for names in BY.findall(target["expr"]) for name in names.split(",")} | SCRAPED
            assert set(LEGEND.findall(target["legendFormat"])) <= left, panel["title"]


def test_panels_do_not_lie_on_each_other() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own


def config_maps(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        item for item in rendered(values) if item["kind"] == "ConfigMap" and "dashboards" in item["metadata"]["name"]
    ]


def test_the_chart_ships_the_dashboard_only_where_it_is_wanted() -> None:
    assert config_maps({}) == []
    [found] = config_maps({"dashboards": {"enabled": True, "labels": {"grafana_dashboard": "yes"}}})
    assert json.loads(found["data"]["tessera.json"]) == BOARD
    assert found["metadata"]["labels"]["grafana_dashboard"] == "yes"
