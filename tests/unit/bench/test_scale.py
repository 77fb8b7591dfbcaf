"""``make bench-scale``: what it publishes and how it tells it, without a cluster."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from controller.cluster.fleet import Fleet
from driver.model.offer import SHARED, DeviceKind, OfferKind, Spot
from driver.slices.build import CLOSED, Content
from tests.bench.placement.trace import Request
from tests.bench.scale import plot, report
from tests.bench.scale.bulk import Etcd
from tests.bench.scale.layouts import PUBLISHING, Curated, Fitting, Layout
from tests.bench.scale.measure import Found
from tests.bench.scale.nodes import Division, held, loaded_fleet
from tests.bench.scale.pods import Burst
from tests.bench.scale.scheduler import Cost

SMALL = OfferKind(DeviceKind.PARTITION, "1g.10gb")
NODE = "node-0000"


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return loaded_fleet(2)


def devices(contents: Mapping[str, Content]) -> list[dict[str, Any]]:
    return [device for content in contents.values() for device in content.get("devices", ())]


@pytest.mark.parametrize("layout", PUBLISHING)
def test_whatever_claims_hold_is_published_in_every_layout_beside_offers(fleet: Fleet, layout: Layout) -> None:
    names = {device["name"] for device in devices(PUBLISHING[layout](fleet).contents(NODE))}
    on_node = {device.name for gpu in held(fleet) if gpu.node == NODE for device in gpu.devices}
    offering = {name.split("-")[1] for name in names - on_node}
    beside = {name for name in on_node if layout is not Layout.CURATED_BY_GPU or name.split("-")[1] in offering}
    assert beside <= names


@pytest.mark.parametrize("layout", PUBLISHING)
def test_devices_use_only_counters_that_there_are_and_slices_keep_the_apis_limits(fleet: Fleet, layout: Layout) -> None:
    contents = PUBLISHING[layout](fleet).contents(NODE)
    sets = [each for content in contents.values() for each in content.get("sharedCounters", ())]
    there = {each["name"]: each["counters"].keys() for each in sets}
    used = [consumed for device in devices(contents) for consumed in device["consumesCounters"]]
    assert all(consumed["counters"].keys() <= there[consumed["counterSet"]] for consumed in used)
    assert all(len(content.get("devices", ())) <= 64 for content in contents.values())


def test_the_peer_publishes_every_placement_of_every_profile_with_fourteen_counters_a_gpu(fleet: Fleet) -> None:
    contents = PUBLISHING[Layout.PEER](fleet).contents(NODE)
    assert len(devices(contents)) == 208
    sets = [each for content in contents.values() for each in content.get("sharedCounters", ())]
    assert [len(each["counters"]) for each in sets] == [14] * 8


def test_three_quarters_of_the_gpus_are_full_and_a_node_alone_offers_what_is_left(fleet: Fleet) -> None:
    published = [device["name"] for device in devices(PUBLISHING[Layout.FITTING](fleet).contents(NODE))]
    assert Counter(name.split("-")[1] for name in published) == {**{str(gpu): 7 for gpu in range(6)}, "6": 26, "7": 26}


@pytest.mark.parametrize("division", [Division.SHARES, Division.SHARED])
def test_ten_claims_fill_a_divided_gpu(division: Division) -> None:
    divided = loaded_fleet(1, division).nodes[NODE]
    assert [(len(gpu.held), gpu.state.free) for gpu in divided] == [(10, 0)] * 6 + [(0, 8)] * 2


def test_a_shared_gpu_takes_new_claims_until_it_is_full() -> None:
    fleet = loaded_fleet(1, Division.SHARED)
    publishing, gpu = Curated(fleet), fleet.nodes[NODE][7]
    publishing.changed({}, {Request(SHARED, gib=8): 3})
    shared = next(device for device in gpu.devices if device.shared)
    publishing.changed({gpu.gpu.uuid: [replace(shared, spot=Spot(SHARED, 8))]}, {})
    taints = {device["name"]: device.get("taints") for device in devices(publishing.contents(NODE))}
    assert taints["gpu-7-shared"] is None
    assert taints["gpu-0-shared"] == [CLOSED]


def test_an_allocation_takes_what_overlaps_it_out_of_the_slices_of_a_node_alone(fleet: Fleet) -> None:
    publishing, gpu = Fitting(fleet), fleet.nodes[NODE][7]
    taken = next(device for device in gpu.devices if device.name == "gpu-7-mig-4g40gb-0")
    publishing.changed({gpu.gpu.uuid: [taken]}, {})
    names = {device["name"] for device in devices(publishing.contents(NODE))}
    assert list(publishing.due()) == [NODE]
    assert taken.name in names
    assert "gpu-7" not in names
    assert "gpu-7-mig-1g10gb-0" not in names


def test_pods_that_wait_are_met_by_as_many_offers_and_nothing_is_written_for_those_that_have_one(fleet: Fleet) -> None:
    publishing = Curated(fleet)
    list(publishing.due())
    publishing.changed({}, {Request(SMALL): 9})
    written = list(publishing.due())
    offered = [d["name"] for node in fleet.nodes for d in devices(publishing.contents(node)) if "taints" not in d]
    free = [name for name in offered if "-mig-1g10gb-" in name and name.split("-")[1] in {"6", "7"}]
    assert len(free) >= 9
    assert written
    publishing.changed({}, {Request(SMALL): 9})
    assert list(publishing.due()) == []


def test_that_an_offer_was_taken_is_told_later(fleet: Fleet) -> None:
    publishing = Curated(fleet)
    publishing.changed({}, {Request(SMALL): 9})
    list(publishing.due())
    gpu = fleet.nodes[NODE][0]
    publishing.changed({gpu.gpu.uuid: gpu.held[:-1]}, {})
    assert list(publishing.due()) == []
    assert 0 < publishing.due_in_s() <= publishing.lag_s


class Gateway(BaseHTTPRequestHandler):
    """Keeps what etcd's HTTP gateway is asked."""

    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[HTTPServer]:
    Gateway.asked = []
    server = HTTPServer(("127.0.0.1", 0), Gateway)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def stored(asked: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    puts = [each["requestPut"] for each in asked["success"]]
    return {base64.b64decode(put["key"]).decode(): json.loads(base64.b64decode(put["value"])) for put in puts}


def test_objects_lie_in_etcd_where_the_api_server_looks_for_them_in_transactions_that_etcd_takes(
    gateway: HTTPServer,
) -> None:
    objects = [{"kind": "Pod", "metadata": {"name": f"p{number}", "namespace": "default"}} for number in range(150)]
    etcd = Etcd(f"http://127.0.0.1:{gateway.server_port}")
    etcd.put("pods", objects)
    etcd.close()
    assert [len(asked["success"]) for asked in Gateway.asked] == [100, 50]
    found = stored(Gateway.asked[0])
    assert "/registry/pods/default/p0" in found
    assert len({item["metadata"]["uid"] for item in found.values()}) == 100


def found(layout: Layout, rate: float, memory: float) -> Found:
    burst = Burst(300, int(rate * 10), 10.0, tessera_cpu_s=rate / 10, writes={"pods": round(rate * 30)})
    return Found(layout.value, 200, 1000, burst, burst, burst, 200, 5.0, 40, Cost(10.0, memory, memory))


@pytest.mark.long
def test_the_table_and_the_picture_set_every_layout_against_the_peer_of_the_same_run(tmp_path: Path) -> None:
    results = [found(Layout.PEER, 4.0, 900.0), found(Layout.CURATED, 48.0, 300.0)]
    line = report.table(results).splitlines()[-1]
    assert "48.0 (12.0 x)" in line
    assert "300 (0.33 x)" in line
    assert line.split()[-3:] == ["10.0", "3.0", "40"]
    plot.draw(results, tmp_path / "scale")
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg"}
