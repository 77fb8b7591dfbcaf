"""The layout of the web page in a real Chromium, without a cluster: phones, claims of one workload, long lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from controller.web import feed
from tests.support.api_server import ObjectApi
from tests.support.map_cluster import MapCluster
from tests.support.queues import profile, request
from tests.support.web_page import WebPage, browser
from tests.unit.controller.web.test_server import Cluster, serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]
"""It needs root, for Debian's packages."""

MAX_ROWS = 100
PHONE = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
LONG = "l" * 200

SIZES = """
const wide = (each) => each.getBoundingClientRect().right > window.innerWidth + 1 && !each.closest('.scroll');
const found = [...document.querySelectorAll('body *')].filter(wide).map((each) => each.outerHTML);
return [document.documentElement.scrollWidth, found];
"""


def pod_of(kind: str, name: str, created: str, **labels: str) -> dict[str, Any]:
    owner = {"kind": kind, "name": name, "controller": True, "uid": name}
    return {"ownerReferences": [owner], "labels": labels, "creationTimestamp": created}


def cluster() -> MapCluster:
    """More nodes and claims than are shown at once, and names without a place to break them."""
    cluster = MapCluster().gpu(f"{'w' * 63}.example.com", 0, "NVIDIA H100 PCIe", fault=LONG)
    for number in range(MAX_ROWS + 20):
        cluster.gpu(f"n-{number:03}", 0, "NVIDIA RTX PRO 6000 Blackwell Server Edition")
    cluster.holds(f"team/{LONG}", "n-000", "gpu-0", device_class="k" * 200)
    wanted = request(selector=profile("9g.90gb"))
    for number in range(12):
        metadata = pod_of("ReplicaSet", "web-5d8f", f"2026-11-28T03:{number:02}:00Z", **{"pod-template-hash": "5d8f"})
        cluster.situation.wants(wanted, name=f"web-{number}", metadata=metadata)
    cluster.situation.wants(request("missing"), name="web-other", metadata=pod_of("Job", "web", "2026-11-28T03:30:00Z"))
    for number in range(MAX_ROWS + 10):
        cluster.situation.wants(wanted, name=f"{LONG}{number}", metadata={"creationTimestamp": "2026-11-28T04:00:00Z"})
    return cluster


@pytest.fixture(scope="module")
def page() -> Iterator[WebPage]:
    with pytest.MonkeyPatch.context() as patch, ObjectApi() as api:
        watched = Cluster()
        watched.put(cluster())
        patch.setattr(feed, "watch_cluster", watched.watch)
        with serving(api.server.client()) as port, browser() as driver:
            yield WebPage(driver, f"http://127.0.0.1:{port}/")


def test_on_a_phone_nothing_is_wider_than_the_screen(page: WebPage) -> None:
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    page.open_live()
    page.driver.execute_script("for (const each of document.querySelectorAll('details')) each.open = true")
    assert page.driver.execute_script(SIZES) == [PHONE["width"], []]
    page.open_detail("n-000")
    assert page.driver.execute_script(SIZES) == [PHONE["width"], []]
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_replicas_that_wait_for_the_same_reason_are_one_row_that_opens_and_the_search_finds_each(page: WebPage) -> None:
    page.open_live()
    first, other = page.find("#pending tr:nth-child(1)"), page.find("#pending tr:nth-child(2)")
    assert first.text.startswith("12 claims of Deployment default/web")
    assert "12 pods" in first.text
    assert other.text.startswith("default/web-other")
    assert "pod-of-web-11" not in first.text
    page.find("#pending summary").click()
    assert len(re.findall(r"default/web-\d+, pod default/pod-of-web-\d+, ", first.text)) == 12
    page.search("pod-of-web-11")
    page.wait(lambda shown: len(shown["pending"]) == 1, "one row matches")
    assert page.find("#pending-count").text == f"1 of {12 + 1 + MAX_ROWS + 10}"


def test_long_lists_say_how_many_more_rows_there_are_and_the_search_finds_those(page: WebPage) -> None:
    page.open_live()
    shown = page.shown()
    assert (len(shown["nodes"]), len(shown["pending"])) == (MAX_ROWS, MAX_ROWS)
    assert page.says("#more-nodes", "21 more nodes")
    assert page.says("#more-pending", "12 more rows")
    page.search("n-119")
    page.wait(lambda shown: [each["name"] for each in shown["nodes"]] == ["n-119"], "the last node")
    assert not page.find("#more-nodes").is_displayed()
    assert page.complaints() == []
