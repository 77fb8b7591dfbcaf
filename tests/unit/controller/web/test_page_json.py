"""The page's content: the map and the reasons of a view, and changes that lead from one state to the next."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.eviction.recent_evictions import ANNOTATION, Eviction, Record
from controller.report.claim_explainer import Explainer
from controller.report.cluster_view import ClusterReads
from controller.settings import ControllerSettings
from controller.web import page_json
from controller.web.page_json import PageContent, content_of
from tests.support.api_server import ObjectApi
from tests.support.map_cluster import MapCluster, example
from tests.support.queues import request


def of(cluster: MapCluster, *, in_detail: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(content_of(cluster.view(), lambda: in_detail).complete("v")))
    return found


def test_the_nodes_are_those_of_the_map_with_the_place_of_each_gpu() -> None:
    found = of(example())
    hardware = [[gpu["pciBusId"] for gpu in node.pop("hardware")] for node in found["nodes"]]
    assert found["nodes"] == json.loads(msgspec.json.encode(example().map()))
    assert [len(each) for each in hardware] == [4, 4]
    assert found["classes"] == ["gpu-dev", "gpu-inference-1g-10gb", "gpu-inference-3g-40gb", "gpu-training"]
    assert [each["product"] for each in found["products"]] == ["NVIDIA H100 80GB HBM3"]


def full() -> MapCluster:
    """One GPU, which one claim holds and another one wants."""
    cluster = MapCluster().gpu("n", 0).holds("team/holder", "n", "gpu-0", device_class="any")
    cluster.situation.wants(request(), name="wanted")
    return cluster


def test_a_pending_claim_has_the_reason_the_holders_and_what_would_help() -> None:
    [expected] = Explainer(full().view()).pending()
    [found] = of(full())["pending"]
    assert (found["claim"], found["reason"], found["message"]) == ("default/wanted", expected.code, expected.message)
    assert found["holders"] == ["team/holder"]
    assert [each["text"] for each in found["changes"]] == [each.text for each in expected.changes]
    assert any("team/holder ended" in each["text"] for each in found["changes"])


@pytest.mark.parametrize(
    ("kind", "name", "workload"),
    [
        ("ReplicaSet", "web-5d8f", "Deployment default/web"),
        ("ReplicaSet", "web-77aa", "ReplicaSet default/web-77aa"),
        ("Job", "train", "Job default/train"),
        (None, "", None),
    ],
)
def test_a_pending_claim_names_the_workload_whose_pod_waits(kind: str | None, name: str, workload: str | None) -> None:
    cluster = MapCluster().gpu("n", 0)
    owners = [{"kind": kind, "name": name, "controller": True}] if kind else []
    metadata = {"ownerReferences": owners, "labels": {"pod-template-hash": "5d8f"}}
    cluster.situation.wants(request(count=2), name="wanted", metadata=metadata)
    assert [each["workload"] for each in of(cluster)["pending"]] == [workload]


@pytest.mark.parametrize("may_read", [True, False])
def test_the_evictions_of_a_day_are_those_that_the_controller_has_recorded(may_read: bool) -> None:
    with ObjectApi() as api:
        client = api.server.client()
        at = client.clock.now().timestamp() - 7200
        past = Eviction("uid", "dev/o", "n", at, "notebooks", "dev/notebook", "preemption", "team-a/serve", 1.5)
        record = msgspec.json.encode(Record((past,))).decode()
        path = "/api/v1/namespaces/tessera/configmaps/tessera-fence"
        api.store(path, metadata={"annotations": {ANNOTATION: record}})
        if not may_read:
            api.once("get", lambda exchange: exchange.refuse(403, "forbidden"))
        view = replace(MapCluster().gpu("n", 0).view(), reads=ClusterReads(client, ControllerSettings()))
        content = json.loads(gzip.decompress(content_of(view, lambda: True).complete("v")))
    row = ["uid", "dev/o", "n", at, "notebooks", "dev/notebook", "preemption", "team-a/serve", 1.5, ""]
    assert content["evictions"] == ([row] if may_read else [])


def test_without_time_for_what_would_help_the_reason_is_there_all_the_same() -> None:
    [full_text], [short] = of(full())["pending"], of(full(), in_detail=False)["pending"]
    assert (short["reason"], short["message"]) == (full_text["reason"], full_text["message"])
    assert (short["isExplained"], short["changes"], short["holders"]) == (False, [], [])


def test_a_claim_that_its_node_can_not_prepare_is_listed_and_marked_on_its_gpu() -> None:
    shown = of(MapCluster().gpu("n", 0).holds("team/a", "n", "gpu-0").fails("team/a", "n", "Node", "no space"))
    assert [(each["claim"], each["reason"]) for each in shown["pending"]] == [("team/a", "NotPrepared")]
    assert shown["pendingCount"] == 1
    [span] = shown["nodes"][0]["gpus"][0]["spans"]
    said = "node n can't prepare it since 2026-11-26T00:00:00Z, because of the node itself: no space"
    assert span["holder"]["problem"] == said


def test_long_lists_and_texts_of_tenants_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_json, "MAX_PENDING", 3)
    monkeypatch.setattr(page_json, "MAX_TEXT", 20)
    cluster = full()
    for number in range(4):
        cluster.situation.wants(request(), name=f"more-{number}")
    found = of(cluster)
    assert (len(found["pending"]), found["pendingCount"]) == (3, 5)
    assert {len(each["message"]) for each in found["pending"]} == {20 + len("...")}


def applied(state: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """What page.js does with a change."""
    nodes = {node["name"]: node for node in state["nodes"] if node["name"] not in change["removed"]}
    nodes |= {node["name"]: node for node in change["nodes"]}
    return {**state, **change, "nodes": [nodes[name] for name in sorted(nodes)], "removed": []}


situations = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["free", "held", "offered", "fault"]))


@given(before=situations, after=situations)
def test_the_changes_lead_from_one_state_to_the_next(before: dict[str, str], after: dict[str, str]) -> None:
    old, new = (content_of(_cluster(each).view(), lambda: True) for each in (before, after))
    assert applied(_parsed(old, "1"), json.loads(gzip.decompress(new.changes_since(old, "2")))) == _parsed(new, "2")


def test_only_what_differs_is_sent() -> None:
    old, new = (content_of(_cluster({"a": "free", "b": use}).view(), lambda: True) for use in ("free", "fault"))
    change = json.loads(gzip.decompress(new.changes_since(old, "2")))
    assert ([node["name"] for node in change["nodes"]], "pending" in change, "classes" in change) == (
        ["b"],
        False,
        False,
    )


def _parsed(found: PageContent, version: str) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(gzip.decompress(found.complete(version)))
    return state


def _cluster(uses: dict[str, str]) -> MapCluster:
    cluster = MapCluster()
    for name, use in sorted(uses.items()):
        cluster.gpu(name, 0, fault="XID 79" if use == "fault" else None)
        if use == "held":
            cluster.holds(f"team/{name}", name, "gpu-0")
        elif use == "offered":
            cluster.offers(name, "gpu-0")
    return cluster
