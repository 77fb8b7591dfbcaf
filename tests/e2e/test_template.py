"""What `tessera template` prints is what a new node publishes, and the API server and the scheduler take it as such."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from driver.model.plan import COMPLETE, PATH, PUBLISH, PlanMode
from tests.bench.kubelet import Kubelet, allocated_claim
from tests.harness.cluster import Cluster
from tests.harness.waiting import DeadlineError, wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import plugins
from tests.support.plugin import SLICES, TESSERA, PluginFlags, PluginProcess
from tests.support.published import DRIVER, devices_in
from tests.support.scheduling import Scheduling, asked

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NODES = "/api/v1/nodes"


@dataclass(frozen=True)
class Kind:
    gpus: str
    shares: str = ""

    @property
    def node(self) -> str:
        return f"live-{self.gpus}"

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--gpus", f"sim:{self.gpus}", *(("--shares", self.shares) if self.shares else ()))

    def __str__(self) -> str:
        return self.gpus


KINDS = (Kind("dgx-h100"), Kind("dgx-a100"), Kind("gb200-nvl72-tray", "all=4"), Kind("l40s-8", "0=10"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("template") as running:
        install(running)
        yield running


@pytest.fixture(scope="module", params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="module")
def live(cluster: Cluster, kind: Kind) -> Iterator[PluginProcess]:
    """A complete node of which a device is held; its plan is empty, and there for its report."""
    with plugins(cluster, [kind.node], PluginFlags(gpus=f"sim:{kind.gpus}", shares=kind.shares)) as [found]:
        cluster.api.patch(
            f"{NODES}/{kind.node}", {"metadata": {"labels": {"example.com/rack": "7", PUBLISH: COMPLETE}}}
        )
        wait_for(lambda: mode_of(cluster, kind.node) == PlanMode.COMPLETE, 60, "everything is published")
        kubelet = Kubelet(found.socket).connect()
        device = next((name for name in sorted(found.devices()) if "-mig-1g" in name), "gpu-0")
        kubelet.prepare(allocated_claim(cluster, kind.node, kind.node, device))
        kubelet.close()
        assert found.records()
        yield found


def mode_of(cluster: Cluster, node: str) -> str | None:
    mode: str | None = cluster.api.get(f"{PATH}/{node}").get("status", {}).get("mode")
    return mode


def printed(cluster: Cluster, *flags: str) -> list[dict[str, Any]]:
    command = [TESSERA, "template", "--kubeconfig", str(cluster.kubeconfig), "-o", "json", *flags]
    objects: list[dict[str, Any]] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return objects


def without_identity(slices: list[dict[str, Any]], node: str) -> list[Any]:
    """Names and contents with a word for the node's name, for UUIDs in their order, and for the domain of NVLink."""
    text = json.dumps([{"name": item["metadata"]["name"], "spec": item["spec"]} for item in slices])
    text = re.sub(rf"\b{node}\b", "NODE", text)
    text = re.sub(r'[0-9a-f-]{36}\.(\d+)"', r'FABRIC.\1"', text)
    for number, uuid in enumerate(dict.fromkeys(re.findall(r"GPU-[0-9a-f-]{36}", text))):
        text = text.replace(uuid, f"GPU-{number}")
    found: list[Any] = json.loads(text)
    return found


def test_it_prints_what_a_new_node_publishes(cluster: Cluster, live: PluginProcess, kind: Kind) -> None:
    def published() -> list[Any]:
        return without_identity([*live.slices(), *live.monitor_slices()], kind.node)

    for flags in (kind.flags, ("--like", kind.node)):
        [node, *slices] = printed(cluster, "--name", "new-1", *flags)
        expected = without_identity(slices, "new-1")
        with suppress(DeadlineError):  # the assertion shows what differs
            wait_for(lambda: published() == expected, 60, "all of it is published")  # noqa: B023
        assert published() == expected, flags
        assert node["metadata"]["name"] == node["metadata"]["labels"]["kubernetes.io/hostname"] == "new-1"
        pools = Counter((item["spec"]["pool"]["name"], item["spec"]["pool"]["resourceSliceCount"]) for item in slices)
        count = len(slices) - 1
        assert pools == {(f"new-1-{DRIVER}", count): count, (f"new-1-{DRIVER}-monitor", 1): 1}


def test_nothing_in_it_is_of_the_node_that_it_was_read_from(cluster: Cluster, live: PluginProcess, kind: Kind) -> None:
    objects = printed(cluster, "--name", "new-1", "--like", kind.node)
    text = json.dumps(objects)
    attributes = [device["attributes"] for device in live.devices().values()]
    uuids = {each["uuid"]["string"] for each in attributes if "uuid" in each}
    assert uuids
    assert not [uuid for uuid in uuids if uuid in text]
    assert kind.node not in text
    assert objects[0]["metadata"]["labels"]["example.com/rack"] == "7"


def test_the_scheduler_takes_its_pool_for_complete(cluster: Cluster, kind: Kind) -> None:
    name = f"new-{kind.gpus}"
    [node, *slices] = printed(cluster, "--name", name, *kind.flags)
    paths = [f"{NODES}/{name}", *(f"{SLICES}/{item['metadata']['name']}" for item in slices)]
    try:
        cluster.api.post(NODES, node)
        for item in slices:
            stored = cluster.api.post(SLICES, item)
            assert stored["spec"] == item["spec"]
        asking = Scheduling(cluster, name)
        asking.ask(asked("gpu-training", count=2), nodeSelector={"kubernetes.io/hostname": name})
        given = asking.given()
        asking.forget()
    finally:
        for path in reversed(paths):
            cluster.api.request("DELETE", path)
    assert [each.pool for each in given] == [f"{name}-{DRIVER}"] * 2
    assert {each.device for each in given} <= {device["name"] for device in devices_in(slices)}
