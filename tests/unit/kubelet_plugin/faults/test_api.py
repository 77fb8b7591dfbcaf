"""Every request of the node plugin to the API server fails, in every way: answers are never lost, all is well later.

The whole plugin runs here, with threads and sockets, against a small real HTTP server. ``make test-fast`` lets the
first request of every kind fail at once; the slow tests each kind alone, and three times in a row.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from driver.kube import client as transport
from driver.kube import watch_cache
from kubelet_plugin.inventory import scan
from tests.harness.waiting import wait_for
from tests.support.api_server import SLICES
from tests.support.faulty_api import STALE, ApiFault, ApiTrouble, FaultyApi, PluginOnApi, ask, until_well
from tests.support.invariants import leftovers, violations

SLOW = pytest.mark.slow
PARTITION = "gpu-0-mig-1g10gb-6"
KINDS = [
    "DELETE resourceslices",
    "PATCH configmaps",
    "PATCH gpunodeplans/status",
    "PATCH resourceclaims/status",
    "POST events",
    "POST resourceslices",
    "PUT resourceslices",
    "get nodes",
    "get resourceclaims",
    "list configmaps",
    "list gpunodeplans",
    "list leases",
    "list nodes",
    "list resourceslices",
    "watch configmaps",
    "watch gpunodeplans",
    "watch leases",
    "watch nodes",
    "watch resourceslices",
]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timeouts of a third of a second instead of 10 s, watches of a second or two instead of some minutes."""
    monkeypatch.setattr(transport, "REQUEST_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(watch_cache, "WATCH_SECONDS", (1, 2))
    monkeypatch.setattr(watch_cache, "SILENCE_TIMEOUT_SECONDS", 2.3)
    monkeypatch.setattr(scan, "SCAN_INTERVAL_SECONDS", 0.3)
    monkeypatch.setattr(scan, "EVENT_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(scan, "MIN_SCAN_INTERVAL_SECONDS", 0.1)


def live(root: Path, trouble: ApiTrouble | None) -> FaultyApi:
    """A node plugin starts, publishes, prepares a claim, tells of it, unprepares it; says which requests it made."""
    with FaultyApi(trouble) as api:
        plugin = PluginOnApi(root, api)
        with plugin.running() as kubelet:
            claim = plugin.allocate("infer", PARTITION)
            errors = until_well(kubelet, "Prepare", claim)
            assert all("resourceclaims/infer" in error or "default/infer" in error for error in errors), errors
            assert violations(plugin.facts()) == []
            wait_for(lambda: PARTITION in plugin.published(), 60, "the held device was published", 0.01)
            wait_for(lambda: "gpu-0" not in plugin.published(), 60, "what it takes was withdrawn", 0.01)
            wait_for(lambda: plugin.told("infer"), 60, "the claim's status told of its device", 0.01)
            wait_for(lambda: STALE not in api.folder(SLICES), 60, "the stale slice was deleted", 0.01)
            assert until_well(kubelet, "Unprepare", claim) == []
            assert leftovers(plugin.facts()) == []
            wait_for(lambda: "gpu-0" in plugin.published(), 60, "the whole GPU was offered again", 0.01)
            wait_for(lambda: api.kinds["watch resourceslices"] > 1, 60, "a second watch", 0.01)
            wait_for(lambda: api.kinds["PATCH gpunodeplans/status"], 60, "the plan's status was written", 0.01)
    return api


@pytest.mark.long
def test_the_kinds_of_requests_are_known(root: Path) -> None:
    """A new kind has to be added here, and is tried by the others then."""
    seen = set(live(root, None).kinds)
    print(f"{len(seen)} kinds of requests, {len(ApiFault)} faults of each: {', '.join(sorted(seen))}")
    assert sorted(seen) == KINDS


FAST = (ApiFault.HANG_UP, ApiFault.CONFLICT)
"""The others are slow tests."""


@pytest.mark.long
@pytest.mark.parametrize("fault", [*FAST, *(pytest.param(f, marks=SLOW) for f in ApiFault if f not in FAST)])
def test_when_the_first_request_of_every_kind_fails_all_is_well_later(
    root: Path, fault: ApiFault, caplog: pytest.LogCaptureFixture
) -> None:
    live(root, ApiTrouble(fault))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR and record.exc_info]


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(ApiFault))
@pytest.mark.parametrize("kind", KINDS)
def test_when_three_requests_of_a_kind_fail_all_is_well_later(
    root: Path, kind: str, fault: ApiFault, caplog: pytest.LogCaptureFixture
) -> None:
    live(root, ApiTrouble(fault, frozenset({kind}), times=3))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR and record.exc_info]


SAMPLE = (ApiFault.HANG_UP, ApiFault.BROKEN)
"""For the fast tests; the others are slow."""


@pytest.mark.long
@pytest.mark.parametrize("fault", [*SAMPLE, *(pytest.param(f, marks=SLOW) for f in ApiFault if f not in SAMPLE)])
def test_a_prepare_that_cannot_read_its_claim_leaves_nothing_and_the_others_of_the_call_get_theirs(
    root: Path, fault: ApiFault
) -> None:
    with FaultyApi(ApiTrouble(fault, frozenset({"get resourceclaims"}), times=2)) as api:
        plugin = PluginOnApi(root, api)
        with plugin.running() as kubelet:
            claims = [plugin.allocate(f"c{index}", f"gpu-0-mig-1g10gb-{index}") for index in range(4)]
            answers = ask(kubelet, "Prepare", *claims)
            failed = [name for name, error in answers.items() if error]
            assert all(f"resourceclaims/{name}" in answers[name] or name in answers[name] for name in failed)
            assert len(plugin.facts().records) == len(claims) - len(failed)
            assert violations(plugin.facts()) == []
            for claim in claims:
                until_well(kubelet, "Prepare", claim)
            assert len(plugin.facts().records) == len(claims)
            assert set(ask(kubelet, "Unprepare", *claims).values()) == {""}
            assert leftovers(plugin.facts()) == []


@pytest.mark.long
def test_while_the_api_server_refuses_every_connection_claims_can_still_be_given_back(root: Path) -> None:
    with FaultyApi() as api:
        plugin = PluginOnApi(root, api)
        with plugin.running() as kubelet:
            first, second = (plugin.allocate(f"c{index}", f"gpu-0-mig-1g10gb-{index}") for index in range(2))
            until_well(kubelet, "Prepare", first)
            api.down()
            [error] = ask(kubelet, "Prepare", second).values()
            assert "resourceclaims/c1: no answer from http://127.0.0.1" in error
            assert ask(kubelet, "Unprepare", first) == {"c0": ""}
            assert leftovers(plugin.facts()) == []
            api.up()
            until_well(kubelet, "Prepare", second)
            wait_for(lambda: "gpu-0-mig-1g10gb-1" in plugin.published(), 60, "what is held was published", 0.01)
            assert ask(kubelet, "Unprepare", second) == {"c1": ""}
            assert leftovers(plugin.facts()) == []
