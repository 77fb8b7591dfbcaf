"""The controller's web page in a real Chromium: what it shows is what the objects of the API server say.

``TESSERA_SCREENSHOTS=DIR`` keeps the screenshots of docs/web.md there.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from controller.eviction.recent_evictions import ANNOTATION
from tests.harness.cluster import Cluster
from tests.harness.readiness import http_ok
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess
from tests.support.nic_driver import NIC_DRIVER, nic_slice
from tests.support.plugin import DRIVER, SLICES, PluginProcess, bare_node
from tests.support.ports import kept_port
from tests.support.scheduling import asked
from tests.support.web_cluster import DGX, MIXED, NODES, Place, node
from tests.support.web_page import SOON_S, Shown, WebPage, browser, devices_in

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400), pytest.mark.needs("shared counters")]

PCIE = 'device.attributes["gpu.tessera.dev"].productName == "NVIDIA H100 PCIe"'
SXM = 'device.attributes["gpu.tessera.dev"].productName == "NVIDIA H100 80GB HBM3"'
SMALL = "gpu-inference-1g-10gb"
MARKUP = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
LONG = "-".join(["very-long-name"] * 16)
"""As long as the API server allows: 239 characters."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("web") as running:
        yield running


@pytest.fixture(scope="module")
def running(cluster: Cluster) -> Iterator[Place]:
    with ExitStack() as stack:
        ports = [stack.enter_context(kept_port()) for _ in range(2)]
        install(cluster, {"controller": {"enabled": False, "webAddress": f":{ports[1]}"}})
        plugins = [PluginProcess(cluster, bare_node(cluster, name), flags) for name, flags in NODES.items()]
        for plugin in plugins:
            plugin.spawn()
        for plugin in plugins:
            plugin.wait_published()
        cluster.apply(nic_slice(DGX, plugins[0].host_root))
        local = ControllerProcess(cluster, flags=("--web-address", f"127.0.0.1:{ports[0]}"))
        guarded = ControllerProcess(cluster, "standby", ("--web-address", f"0.0.0.0:{ports[1]}"))
        local.start()
        plans = ["Planned"] * len(NODES)
        wait_for(lambda: [plan.get("status", {}).get("mode") for plan in local.plans().values()] == plans,
                 SOON_S, "all nodes follow the controller")  # fmt: skip
        guarded.start()
        urls = [f"http://127.0.0.1:{port}/" for port in ports]
        for url in urls:
            wait_for(http_ok(url), SOON_S, f"a controller serves its page at {url}")
        yield Place(cluster, local, WebPage(stack.enter_context(browser()), urls[0]), urls[1])
        for process in (local, guarded):
            process.stop()
            assert process.refused() == []
        for plugin in plugins:
            plugin.stop()


@pytest.fixture
def place(running: Place) -> Iterator[Place]:
    running.page.open_live()
    running.page.complaints()
    found = Place(running.cluster, running.local, running.page, running.guarded_url)
    yield found
    found.clean()


def holds_nothing(place: Place, shown: Shown) -> None:
    assert [(each["name"], len(each["gpus"]), each["states"]) for each in shown["nodes"]] == [
        (DGX, 8, []),
        (MIXED, 4, []),
    ]
    assert (devices_in(shown, "held"), shown["nothingPending"]) == ({}, True)
    assert [(row[0], row[1], row[3], row[4]) for row in shown["products"]] == [
        ("NVIDIA H100 80GB HBM3", "1", "8", "8"),
        ("NVIDIA H100 PCIe", "1", "4", "3"),
    ]


def holds_one(kind: str) -> Callable[[Place, Shown], None]:
    def check(place: Place, shown: Shown) -> None:
        [(where, claim)] = devices_in(shown, "held").items()
        [title] = [
            span["title"]
            for gpu in node(shown, where[0])["gpus"]
            for span in gpu["spans"]
            if span["state"] == "held"
        ]  # fmt: skip
        assert claim == "default/wanted"
        assert title.startswith(f"{kind} held by default/wanted, gpu-")

    return check


def waits_for_the_holder(place: Place, shown: Shown) -> None:
    [row] = shown["pending"]
    assert (row["claim"], row["pods"], row["reason"]) == ("default/wanted", "default/wanted", "AllHeld")
    assert any(text.startswith("claim default/holder ended") for text in row["changes"])
    assert row["holders"] == ["default/holder"]


def is_cordoned(place: Place, shown: Shown) -> None:
    assert place.cluster.api.get(f"/api/v1/nodes/{MIXED}")["spec"]["unschedulable"] is True
    assert (node(shown, MIXED)["states"], node(shown, DGX)["states"]) == (["cordoned"], [])


def has_its_reason(reason: str) -> Callable[[Place, Shown], None]:
    def check(place: Place, shown: Shown) -> None:
        assert node(shown, DGX)["notes"] == [f"gpu-1: cordoned: {reason}"]
        [gpu] = [gpu for gpu in node(shown, DGX)["gpus"] if gpu["number"] == 1]
        assert {span["state"] for span in gpu["spans"]} == {"unavailable"}

    return check


def is_only_text(place: Place, shown: Shown) -> None:
    has_its_reason(MARKUP)(place, shown)
    script = "return [document.title, document.querySelectorAll('img, iframe, body script, [onerror]').length]"
    assert place.page.driver.execute_script(script) == ["Tessera", 0]
    [row] = shown["pending"]
    assert (row["claim"], row["reason"]) == (f"default/{LONG}", "NoSuchClass")
    wide = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert place.page.driver.execute_script(wide), "a long name makes the page wider than its window"


@dataclass(frozen=True)
class Scenario:
    """What happens while the page is open, and what it shows then in addition to all holders, offers and reasons."""

    happens: Callable[[Place], object]
    check: Callable[[Place, Shown], None]
    shows: Callable[[Shown], object] = lambda _: True
    """True as soon as the page shows that it has happened."""


def wanted(*requests: dict[str, Any]) -> Callable[[Place], None]:
    return lambda place: place.hold("wanted", *requests)


def all_held(place: Place) -> None:
    place.hold("holder", asked("gpu-training", SXM))
    place.ask("wanted", asked("gpu-training", SXM, count=8))


def hostile(place: Place) -> None:
    place.cordon_gpu(MARKUP)
    place.ask(LONG, asked(LONG))


def evicted(place: Place) -> None:
    """The controller's record, as after a preemption two hours ago."""
    at = time.time() - 7230
    record = [["uid", "dev/o", DGX, at, "notebooks", "dev/notebook", "preemption", "team-a/serve", 1.5]]
    name, namespace = "tessera-fence", "tessera"
    metadata = {"name": name, "annotations": {ANNOTATION: json.dumps({"evictions": record})}}
    place.cluster.apply([{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {**metadata, "namespace": namespace}}])
    path = f"/api/v1/namespaces/{namespace}/configmaps/{name}"
    place.undo.append(lambda: place.cluster.api.patch(path, {"metadata": {"annotations": {ANNOTATION: None}}}))


def is_listed(place: Place, shown: Shown) -> None:
    [row] = shown["evictions"]
    assert row == ["dev/notebook", "2 hours", DGX, "team-a/serve", "1.5", "preemption, policy notebooks"]
    assert place.page.find("#evictions-title").is_displayed()


def lists_no_eviction(place: Place, shown: Shown) -> None:
    holds_nothing(place, shown)
    assert not place.page.find("#evictions-title").is_displayed()


SCENARIOS = {
    "empty cluster": Scenario(
        lambda _: None, lists_no_eviction, lambda shown: [row[4] for row in shown["products"]] == ["8", "3"]
    ),
    "partition": Scenario(wanted(asked(SMALL)), holds_one("1g.10gb")),
    "full GPU": Scenario(wanted(asked("gpu-training", PCIE)), holds_one("full")),
    "share": Scenario(wanted(asked("gpu-dev")), holds_one("share")),
    "pending claim": Scenario(all_held, waits_for_the_holder),
    "cordoned node": Scenario(
        lambda place: place.cordon_node(), is_cordoned, lambda shown: node(shown, MIXED)["states"] == ["cordoned"]
    ),
    "cordoned GPU": Scenario(
        lambda place: place.cordon_gpu("fan"),
        has_its_reason("fan"),
        lambda shown: node(shown, DGX)["notes"] == ["gpu-1: cordoned: fan"],
    ),
    "an eviction": Scenario(evicted, is_listed, lambda shown: shown["evictions"]),
    "hostile texts": Scenario(
        hostile, is_only_text, lambda shown: node(shown, DGX)["notes"] == [f"gpu-1: cordoned: {MARKUP}"]
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_page_follows_what_happens_and_equals_the_objects(place: Place, name: str) -> None:
    scenario = SCENARIOS[name]
    scenario.happens(place)
    place.page.wait(scenario.shows, name)
    scenario.check(place, place.wait_equal())
    assert place.page.complaints() == []


def test_a_claim_that_ends_is_gone_without_loading_the_page_again(place: Place) -> None:
    place.hold("wanted", asked(SMALL))
    place.wait_equal()
    place.page.driver.execute_script("window.sameDocument = true")
    place.clean()
    assert devices_in(place.wait_equal(), "held") == {}
    assert place.page.driver.execute_script("return window.sameDocument") is True


def test_the_detail_of_a_node_has_the_pcie_roots_of_gpus_and_nics(place: Place) -> None:
    roots: dict[str, dict[str, str]] = {DRIVER: {}, NIC_DRIVER: {}}
    for spec in (item["spec"] for item in place.cluster.api.get(SLICES)["items"]):
        for device in (spec.get("devices") or ()) if spec["nodeName"] == DGX else ():
            root = device["attributes"]["resource.kubernetes.io/pcieRoot"]["string"]
            roots[spec["driver"]][re.sub("-mig-.*|-share-.*|-monitor", "", device["name"])] = root
    place.page.open_detail(DGX)
    shown = place.page.wait(lambda shown: any(each["others"] for each in shown["detail"]), "the NICs")
    assert {name: each["root"] for each in shown["detail"] for name in each["others"]} == roots[NIC_DRIVER]
    of_gpus = {f"gpu-{number}": each["root"] for each in shown["detail"] for number in each["gpus"]}
    assert len(of_gpus) == 8
    assert of_gpus.items() >= roots[DRIVER].items()
    assert any(each["gpus"] and each["others"] for each in shown["detail"]), "no GPU shares its PCIe root with a NIC"
    assert "NVLink 0-7" in place.page.find("#detail-content").text
    place.page.close_detail()


def test_search_finds_claims_nodes_and_products_from_the_keyboard(place: Place) -> None:
    place.hold("needle", asked("gpu-training", PCIE))
    place.wait_equal()
    place.page.find("body").send_keys("/")
    assert place.page.driver.switch_to.active_element.get_attribute("id") == "search"
    for text, expected in (
        ("needle", [MIXED]),
        ("dgx", [DGX]),
        ("hbm3", [DGX]),
        ("gpu-training pcie", [MIXED]),
        ("nothing", []),
        ("", [DGX, MIXED]),
    ):
        place.page.search(text)
        place.page.wait(lambda shown, names=expected: [each["name"] for each in shown["nodes"]] == names, text)


def test_the_page_says_that_the_connection_is_lost_and_recovers(place: Place) -> None:
    place.local.stop()
    place.page.wait(lambda shown: shown["connection"] == "lost", "the loss of the connection is shown")
    assert len(place.page.shown()["nodes"]) == len(NODES), "the last known state stays"
    place.local.start()
    place.page.wait(lambda shown: shown["connection"] == "live", "the page is live again")
    place.hold("wanted", asked(SMALL))
    place.wait_equal()


def account(cluster: Cluster, name: str, *rules: dict[str, Any]) -> str:
    """The token of a new ServiceAccount with these rights."""
    group, metadata = "rbac.authorization.k8s.io", {"name": f"web-{name}"}
    cluster.apply(
        [
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": "default"}},
            {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": metadata, "rules": list(rules)},
            {
                "apiVersion": f"{group}/v1",
                "kind": "ClusterRoleBinding",
                "metadata": metadata,
                "roleRef": {"apiGroup": group, "kind": "ClusterRole", **metadata},
                "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "default"}],
            },
        ]
    )
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    answer = cluster.api.post(f"/api/v1/namespaces/default/serviceaccounts/{name}/token", body)
    return str(answer["status"]["token"])


CORE = {"apiGroups": [""], "resources": ["pods", "nodes"], "verbs": ["list"]}
OF_CLAIMS = {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["list"]}


def test_beyond_the_machine_the_page_shows_the_cluster_only_for_a_token_with_the_rights(place: Place) -> None:
    place.hold("wanted", asked(SMALL))
    some, every = account(place.cluster, "some", CORE), account(place.cluster, "every", CORE, OF_CLAIMS)
    page = WebPage(place.page.driver, place.guarded_url)
    page.open()
    for token, problem in (
        ("", "needs a bearer token"),
        ("forged", "does not accept this token"),
        (some, "system:serviceaccount:default:some may not list resourceclaims.resource.k8s.io"),
        (every, ""),
    ):
        if token:
            page.find("#token").send_keys(token)
            page.find("#token-form button").click()
        if problem:
            wait_for(partial(page.says, "#token-problem", problem), SOON_S, problem)
            assert page.shown()["nodes"] == []
    page.wait(lambda shown: devices_in(shown, "held") == place.held(), "the cluster is shown")
    stored = "return [localStorage.length, sessionStorage.length, document.cookie, location.search, location.hash]"
    assert page.driver.execute_script(stored) == [0, 0, "", "", ""]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_has_the_colours_that_the_viewer_prefers(place: Place, scheme: str, tmp_path: Path) -> None:
    place.hold("train", asked("gpu-training", SXM, count=2))
    place.hold("chat", asked("gpu-inference-3g-40gb", SXM))
    place.hold("serve", asked(SMALL, PCIE, count=5))
    place.hold("notebook", asked("gpu-dev"))
    place.cordon_gpu("fan replacement on Friday")
    place.ask("big-job", asked("gpu-training", SXM, count=7))
    place.page.colours(scheme)
    place.page.wait(lambda shown: node(shown, DGX)["notes"], "the cordon")
    place.wait_equal()
    background = "return getComputedStyle(document.body).backgroundColor"
    assert (
        place.page.driver.execute_script(background)
        == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]
    )
    file = Path(os.environ.get("TESSERA_SCREENSHOTS", tmp_path)) / f"web-{scheme}.png"
    assert place.page.driver.save_screenshot(str(file))
    assert file.stat().st_size < 300_000
    place.page.colours("")
