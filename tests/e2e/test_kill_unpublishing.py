"""The node plugin is killed while a GPU leaves its slices, and while it comes back: what is held is never left out."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from driver.kube.client import KubeClient, load_configuration
from driver.kube.controller_heartbeat import Heartbeat
from driver.model.plan import API_VERSION, KIND, PATH
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.invariants import published
from tests.support.kill_matrix import see_killed
from tests.support.kill_node import SOON_S, KillNode, Wanted
from tests.support.killable import Point, zygote
from tests.support.plugin import SLICES
from tests.support.running import in_thread

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NODE = "kill-plan"
HELD, OFFERED = "gpu-0-mig-1g10gb-6", "gpu-0-mig-1g10gb-0"


class PlannedNode:
    """A killable node that follows plans which the test writes."""

    def __init__(self, cluster: Cluster, node: KillNode) -> None:
        self.node = node
        self._api = cluster.api
        self._path = f"{PATH}/{NODE}"
        self._api.post(PATH, {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": NODE}, "spec": {}})
        self._epoch = str(wait_for(lambda: self._status().get("epoch"), SOON_S, "the node reports its epoch"))
        self._uuid = next(line.split()[1].rstrip(":") for line in self._status()["gpus"] if line.startswith("gpu-0 "))
        self.plan(offers=True)
        wait_for(lambda: self._status()["mode"] == "Planned", SOON_S, "the node follows its plan")

    def plan(self, *, offers: bool) -> None:
        """HELD is held; OFFERED is offered or withdrawn, and everything else is withdrawn."""
        offered = [f"{self._uuid}/1g.10gb@0"] if offers else []
        others = published(self._slices(), NODE) - {HELD, *([OFFERED] if offers else [])}
        spec = {"epoch": self._epoch, "held": [f"{HELD} default/claim"], "offers": offered, "withdrawn": sorted(others)}
        self._api.patch(self._path, {"spec": {**spec, "publishHeld": "BesideOffers"}})

    def wait_published(self, *names: str) -> None:
        def as_wanted() -> bool:
            self.check()
            return published(self._slices(), NODE) == {*names} and self._sets() == ({"gpu-0"} if names else set())

        wait_for(as_wanted, SOON_S, f"published: {', '.join(names) or 'nothing'}")

    def check(self) -> None:
        """The invariant, and that no device refers to a missing counter set."""
        devices = [device for item in self._slices() for device in item["spec"].get("devices") or ()]
        names = {device["name"] for device in devices}
        assert HELD in names or OFFERED not in names
        assert {used["counterSet"] for device in devices for used in device["consumesCounters"]} <= self._sets()

    def _sets(self) -> set[str]:
        return {each["name"] for item in self._slices() for each in item["spec"].get("sharedCounters") or ()}

    def _status(self) -> dict[str, Any]:
        found: dict[str, Any] = self._api.get(self._path).get("status", {})
        return found

    def _slices(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._api.get(f"{SLICES}?fieldSelector=spec.nodeName%3D{NODE}")["items"]
        return found


@pytest.fixture(scope="module")
def planned() -> Iterator[PlannedNode]:
    root = Path(tempfile.mkdtemp(prefix="tk-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root)
        cluster = stack.enter_context(control_plane("kill-plan"))
        install(cluster)
        node = KillNode(cluster, stack.enter_context(zygote(cluster)), NODE, root)
        stack.callback(node.close)
        node.allocate([Wanted([HELD])])
        node.kubelet.prepare(node.claims)
        heartbeat = Heartbeat(KubeClient(load_configuration(cluster.kubeconfig), "test"), "tessera", "test")
        stack.enter_context(in_thread(heartbeat.run))
        yield PlannedNode(cluster, node)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("leaves", [True, False], ids=["it leaves", "it comes back"])
def test_a_plugin_killed_while_a_gpu_leaves_or_comes_back_never_leaves_out_what_is_held(
    planned: PlannedNode, moment: str, number: int, leaves: bool
) -> None:
    """Each transition writes two slices: devices and counter sets."""
    states: dict[bool, tuple[str, ...]] = {True: (HELD, OFFERED), False: ()}
    planned.plan(offers=leaves)
    planned.wait_published(*states[leaves])
    planned.node.plugin.forget()
    planned.node.plugin.order(Point("write-slice", moment, number))
    planned.plan(offers=not leaves)
    see_killed(planned.node)
    planned.check()
    planned.node.start()
    planned.wait_published(*states[not leaves])
