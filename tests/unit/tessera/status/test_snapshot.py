"""Output of ``tessera status``: where nothing runs, where Tessera is not, and of what may not be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click
import msgspec
import pytest
import yaml

from controller.eviction.recent_evictions import Eviction
from tessera.commands.status import CHECKS, as_json, as_text, run_checks
from tessera.status.snapshot import Listing, ReadFailure, StatusSnapshot
from tests.support.chart import manifests
from tests.unit.tessera.status.test_checks import DRIVER, NODE, SOUND, found, plan, pod, result

DAEMON_SET = next(yaml.safe_load_all(manifests()["node-plugin.yaml"]))
EMPTY = replace(SOUND, slices=[], plans={}, claims=[], daemon_set=DAEMON_SET)
"""The chart is there, and its node plugin runs nowhere."""


def test_an_install_whose_node_plugin_has_no_node_to_run_on_is_not_sound() -> None:
    [finding] = result(EMPTY, "node plugins").findings
    assert (finding.about, finding.message) == (
        "the DaemonSet tessera-node",
        "matches no node: no node has a label of NVIDIA GPUs",
    )
    assert finding.remedy == "kubectl label node NODE gpu.tessera.dev/node=true (or install Node Feature Discovery)"


def test_a_label_is_no_advice_where_the_daemon_set_does_not_go_by_it_or_it_is_there() -> None:
    """A simulated node needs none; a taint keeps the plugin off a node that has one."""
    simulated = next(yaml.safe_load_all(manifests({"gpus": "sim:dgx-h100"})["node-plugin.yaml"]))
    labelled = {"metadata": {"name": NODE, "labels": {"gpu.tessera.dev/node": "true"}}}
    for snapshot in (replace(EMPTY, daemon_set=simulated), replace(EMPTY, nodes=[labelled])):
        finding = result(snapshot, "node plugins").findings[0]
        assert "its node selector, affinity or tolerations exclude all" in finding.message
        assert finding.remedy == "kubectl -n tessera describe daemonset tessera-node"


def test_nobody_publishing_is_found_where_the_daemon_set_can_not_be_read() -> None:
    assert found(replace(EMPTY, daemon_set=None)) == {
        "node plugins": "nodes publish no GPU, and no pod of a node plugin exists"
    }


def test_a_plan_of_an_earlier_install_is_told_as_that() -> None:
    left = replace(EMPTY, plans={NODE: plan()})
    assert f"{NODE} no node plugin runs there, but a plan of an earlier one is left" in found(left)["node plugins"]
    assert "read its log" not in as_text(run_checks(left))
    told = "0 nodes follow the controller, 0 standalone, 1 plan of nodes that publish nothing"
    assert result(left, "mode").summary == told


def test_without_a_trace_of_tessera_there_is_one_finding() -> None:
    nowhere = StatusSnapshot(
        DRIVER,
        "tessera",
        SOUND.now,
        version=SOUND.version,
        nodes=SOUND.nodes,
        node_leases=SOUND.node_leases,
    )
    assert found(nowhere) == {"installation": "Tessera is not installed here"}
    left = replace(nowhere, plans={NODE: plan()})
    assert found(left) == {"installation": "Tessera is not installed here"}
    assert "1 GpuNodePlan left of an earlier one" in result(left, "installation").summary
    assert "installation" not in found(replace(nowhere, unreadable={Listing.PODS: ReadFailure("403", True)}))


def without(snapshot: StatusSnapshot, *whats: Listing) -> StatusSnapshot:
    """The same as somebody sees it who may not list these."""
    fields: dict[Listing, dict[str, Any]] = {
        Listing.NODES: {"nodes": []},
        Listing.SLICES: {"slices": [], "others": []},
        Listing.PLANS: {"plans": {}},
        Listing.CLAIMS: {"claims": []},
        Listing.CLASSES: {"classes": []},
        Listing.POLICIES: {"policies": []},
        Listing.BINDINGS: {"bindings": []},
        Listing.PODS: {"pods": []},
        Listing.LEASES: {"leases": {}},
        Listing.NODE_LEASES: {"node_leases": []},
        Listing.EVENTS: {"events": [], "node_events": []},
        Listing.PENDING: {"pending": []},
        Listing.EVICTIONS: {"evictions": []},
    }
    for what in whats:
        snapshot = replace(snapshot, **fields[what])
    return replace(snapshot, unreadable={what: ReadFailure("GET /x: 403: forbidden", True) for what in whats})


LISTINGS = [listing for listing in Listing if listing not in (Listing.DAEMON_SETS, Listing.DEPLOYMENTS)]
"""Those of all checks but that of a rollout (test_status_wait.py)."""


@pytest.mark.parametrize("what", LISTINGS)
def test_a_list_that_may_not_be_read_is_neither_good_news_nor_an_alarm(what: Listing) -> None:
    results = {each.check: each for each in run_checks(without(SOUND, what))}
    [finding] = results.pop("API server").findings
    assert finding.about == what
    assert "docs/soundness.md" in finding.remedy
    assert [each.findings for each in results.values() if each.findings] == []
    unread = {name for name, each in results.items() if each.state == "unread"}
    assert unread == {name for name, check in CHECKS.items() if what in (*check.needs, *check.uses)}
    assert unread
    assert all(f"{what} can't be listed" in results[name].summary for name in unread)


def test_who_may_read_nothing_hears_that_once_and_that_nothing_is_known() -> None:
    nothing = without(SOUND, *LISTINGS)
    assert found(nothing).keys() == {"API server"}
    for each in run_checks(nothing)[1:]:
        assert each.state == "unread"
    told = {each["check"]: (each["ok"], each["state"]) for each in as_json(run_checks(nothing))}
    assert told["devices"] == (False, "unread")
    text = click.unstyle(as_text(run_checks(nothing)))
    assert "every node offers whatever fits" not in text
    assert "No problems found." not in text
    assert "1 problem; 20 checks could not read everything." in text


def test_without_the_right_to_list_pods_nobody_says_that_there_is_none() -> None:
    silent = without(replace(SOUND, slices=[], claims=[], leases={}, plans={}), Listing.PODS)
    labelled = {"metadata": {"name": NODE, "labels": {"gpu.tessera.dev/node": "true"}}}
    assert found(replace(silent, nodes=[labelled]))["node plugins"] == f"{NODE} publishes nothing"
    assert result(silent, "controller").summary == "no Lease of one, pods can't be listed"


def test_without_the_right_to_list_leases_nobody_says_that_no_controller_is_there() -> None:
    unled = without(
        replace(SOUND, pods=[{**pod("x"), "spec": {"serviceAccountName": "tessera-controller"}}]), Listing.LEASES
    )
    assert result(unled, "controller").summary == "1 of 1 pod ready, Leases can't be listed"
    assert result(without(SOUND, Listing.LEASES), "controller").summary == "Leases can't be listed"


LOST = Eviction("uid-1", "dev/o", NODE, 0, "notebooks", "dev/notebook", "preemption", "team-a/serve-0", 3.25)
FAILED = Eviction("uid-2", "team-b/o", NODE, 60, name="team-b/train", trigger="failed-start")
OF_AN_EARLIER_VERSION = Eviction("uid-3", "dev/o", NODE, 120, "notebooks")


def test_what_was_evicted_within_a_day_is_listed_with_what_it_cost() -> None:
    results = run_checks(replace(SOUND, evictions=[LOST, FAILED, OF_AN_EARLIER_VERSION]))
    lines = [line.split() for line in click.unstyle(as_text(results)).splitlines()]
    start = lines.index(["EVICTED", "AT", "NODE", "FOR", "GPU", "HOURS", "TRIGGER", "POLICY"])
    assert lines[start + 1 : start + 4] == [
        ["uid-3", "1970-01-01T00:02:00Z", NODE, "-", "0.0", "-", "notebooks"],
        ["team-b/train", "1970-01-01T00:01:00Z", NODE, "-", "0.0", "failed-start", "-"],
        ["dev/notebook", "1970-01-01T00:00:00Z", NODE, "team-a/serve-0", "3.25", "preemption", "notebooks"],
    ]
    [check] = [check for check in as_json(results) if check["check"] == "evictions"]
    assert (check["state"], check["summary"]) == ("ok", "3 pods evicted within a day, 3.2 GPU hours lost")
    listed = check["evictions"]
    assert isinstance(listed, list)
    assert listed[0] == {
        "pod": "dev/notebook",
        "at": "1970-01-01T00:00:00Z",
        "node": NODE,
        "for": "team-a/serve-0",
        "gpuHours": 3.25,
        "trigger": "preemption",
        "policy": "notebooks",
    }


def test_of_many_evictions_the_newest_are_shown_and_the_others_counted() -> None:
    many = [msgspec.structs.replace(LOST, name=f"dev/notebook-{number}") for number in range(25)]
    text = click.unstyle(as_text(run_checks(replace(SOUND, evictions=many))))
    assert "dev/notebook-24 " in text
    assert "dev/notebook-5 " in text
    assert "dev/notebook-4 " not in text
    assert "and 5 earlier (-o json)" in text


def test_without_evictions_there_is_no_table_of_them() -> None:
    assert result(SOUND, "evictions").summary == "0 pods evicted within a day"
    assert "EVICTED" not in as_text(run_checks(SOUND))
