"""Dashboards and alerts ask for nothing but what docs/metrics.md lists, and the chart ships them where wanted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import pytest
import yaml

from kubelet_plugin.metrics.usage import CLAIM_LABELS
from tests.support.chart import CHART, rendered
from tests.support.workloads import PROJECT

BOARDS = {file.name: json.loads(file.read_text()) for file in sorted((CHART / "dashboards").glob("*.json"))}
PANELS = {(file, panel["title"]): panel for file, board in BOARDS.items() for panel in board["panels"]}
GROUPS = [group for file in sorted((CHART / "rules").iterdir()) for group in yaml.safe_load(file.read_text())["groups"]]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
QUERIES = [
    *(target["expr"] for panel in PANELS.values() for target in panel["targets"]),
    *(rule["expr"] for rule in ALERTS.values()),
]

ROW = re.compile(r"^\| `((?:tessera|process)_\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)
NAME = re.compile(r"\b(?:tessera|process|kube)_\w+|\bup\b")
SELECTOR = re.compile(r"\b((?:tessera|process|kube)_\w+|up)\{([^}]*)\}")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
BY = re.compile(r"(?:by|on) \(([^)]*)\)")
LEGEND = re.compile(r"\{\{(\w+)\}\}")
VARIABLE = re.compile(r"\$(\w+)")

SCRAPED = {"namespace", "pod", "node", "instance"}
"""Labels that Prometheus adds to what a PodMonitor scrapes."""

OF_OTHERS = {"up": {"job"}, "kube_daemonset_status_number_unavailable": {"namespace", "daemonset"}}
"""Series of Prometheus itself and of kube-state-metrics, and their labels."""


def rows(text: str) -> Iterator[tuple[str, set[str]]]:
    """Each series of the tables in ``text``, and the names in its third cell."""
    for name, kind, cell in ROW.findall(text):
        names = set(re.findall(r"`([\w-]+)`", cell))
        if kind == "histogram":
            yield from ((f"{name}_bucket", names | {"le"}), (f"{name}_sum", names), (f"{name}_count", names))
        else:
            yield name, names


@pytest.fixture(scope="module")
def documented() -> dict[str, set[str]]:
    """The label names of every series, by the name of the series; other tests compare docs/metrics.md with the code."""
    text = (PROJECT / "docs" / "metrics.md").read_text()
    before, header, rest = text.partition("| usage metric |")
    of_claims, _, after = rest.partition("\n\n")
    assert header
    return OF_OTHERS | dict(rows(before + "\n" + after)) | {name: set(CLAIM_LABELS) for name, _ in rows(of_claims)}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_series_and_labels_that_are_documented(query: str, documented: dict[str, set[str]]) -> None:
    names = NAME.findall(query)
    assert names
    assert set(names) <= documented.keys()
    known = SCRAPED.union(*(documented[name] for name in names))
    for name, selector in SELECTOR.findall(query):
        assert set(LABEL.findall(selector)) <= documented[name] | SCRAPED, name
    for labels in BY.findall(query):
        assert {label.strip() for label in labels.split(",")} <= known


@pytest.mark.parametrize("panel", PANELS.values(), ids=map("/".join, PANELS))
def test_a_legend_shows_labels_that_its_query_leaves(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        left = {name.strip() for names in BY.findall(target["expr"]) for name in names.split(",")} | SCRAPED
        assert set(LEGEND.findall(target["legendFormat"])) <= left


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_every_variable_of_a_query_is_one_that_the_viewer_chooses(board: dict[str, Any]) -> None:
    own = {each["name"] for each in board["templating"]["list"]}
    used = {name for panel in board["panels"] for each in panel["targets"] for name in VARIABLE.findall(each["expr"])}
    assert {name for name in used if not name.startswith("__")} == own - {"datasource"}


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_panels_do_not_lie_on_each_other(board: dict[str, Any]) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own


def test_dashboards_can_be_told_apart() -> None:
    for name in ("uid", "title"):
        assert len({board[name] for board in BOARDS.values()}) == len(BOARDS)


@pytest.mark.parametrize("rule", ALERTS.values(), ids=ALERTS)
def test_an_alert_says_what_happened_where_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["for"]
    assert rule["labels"]["severity"] in ("info", "warning")
    assert rule["annotations"]["summary"].endswith(".")
    left = {name.strip() for names in BY.findall(rule["expr"]) for name in names.split(",")}
    shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["description"]))
    assert shown <= left
    assert left == shown or {"namespace", "claim", "node"} <= shown
    file, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.*)$", (PROJECT / file).read_text(), re.MULTILINE)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


def objects(kind: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of dashboards and alerts."""
    names = ("tessera-dashboards", "tessera")
    return [each for each in rendered(values) if each["kind"] == kind and each["metadata"]["name"] in names]


def test_the_chart_ships_the_dashboards_only_where_they_are_wanted() -> None:
    assert objects("ConfigMap", {}) == []
    [found] = objects("ConfigMap", {"dashboards": {"enabled": True, "labels": {"grafana_dashboard": "yes"}}})
    assert {name: json.loads(text) for name, text in found["data"].items()} == BOARDS
    assert found["metadata"]["labels"]["grafana_dashboard"] == "yes"


def test_the_chart_ships_the_alerts_only_where_they_are_wanted() -> None:
    assert objects("PrometheusRule", {}) == []
    [found] = objects("PrometheusRule", {"prometheusRules": {"enabled": True, "labels": {"release": "prometheus"}}})
    assert found["apiVersion"] == "monitoring.coreos.com/v1"
    assert sorted(found["spec"]["groups"], key=itemgetter("name")) == sorted(GROUPS, key=itemgetter("name"))
    assert found["metadata"]["labels"]["release"] == "prometheus"


def test_without_a_controller_no_alert_says_that_none_leads() -> None:
    [found] = objects("PrometheusRule", {"prometheusRules": {"enabled": True}, "controller": {"enabled": False}})
    assert {group["name"] for group in found["spec"]["groups"]} == {"tessera-processes", "tessera-usage"}
