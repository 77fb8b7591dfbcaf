"""The node plugin is killed while a GPU leaves its slices, and while it comes back: what is held is never left out."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from controller.cluster.claim_index import PoolDevice
from driver.errors import CONFLICT, ApiError
from driver.kube.client import KubeClient, load_configuration
from driver.kube.controller_heartbeat import Heartbeat
from driver.model.plan import API_VERSION, KIND, PATH
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.allocations import Allocations
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.invariants import published
from tests.support.kill_matrix import see_killed
from tests.support.kill_node import SHARES, SOON_S, KillNode, Wanted
from tests.support.killable import Point, zygote
from tests.support.plugin import DRIVER, SLICES
from tests.support.running import in_thread

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.needs("shared counters")]

NODE = "kill-plan"
HELD, UNKNOWN, OFFERED = "gpu-0-mig-1g10gb-6", "gpu-0-mig-1g10gb-5", "gpu-0-mig-1g10gb-0"
"""Claims have HELD, which is prepared, and UNKNOWN, which is not: plans that offer something lack it, as those of a
controller that does not know the claim, so that only the node's own memory brings it back."""


class PlannedNode:
    """A killable node that follows plans which the test writes."""

    def __init__(self, cluster: Cluster, node: KillNode, allocations: Allocations) -> None:
        self.node = node
        self.allocations = allocations
        self._api = cluster.api
        self._path = f"{PATH}/{NODE}"
        try:
            self._api.post(PATH, {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": NODE}, "spec": {}})
        except ApiError as error:
            if error.status != CONFLICT:  # the node has created its plan already
                raise
        self._epoch = str(wait_for(lambda: self._status().get("epoch"), SOON_S, "the node reports its epoch"))
        self._uuid = next(line.split()[1].rstrip(":") for line in self._status()["gpus"] if line.startswith("gpu-0 "))
        self.plan(offers=True)
        wait_for(lambda: self._status()["mode"] == "Planned", SOON_S, "the node follows its plan")

    def plan(self, *, offers: bool) -> None:
        """OFFERED is offered, or it is withdrawn and all that claims have is known; everything else is withdrawn."""
        others = published(self._slices(), NODE) - {HELD, UNKNOWN, *([OFFERED] if offers else [])}
        spec = {
            "epoch": self._epoch,
            "held": [f"{name} default/claim" for name in ([HELD] if offers else [HELD, UNKNOWN])],
            "offers": [f"{self._uuid}/1g.10gb@0"] if offers else [],
            "withdrawn": sorted(others),
            "publishHeld": "BesideOffers",
        }
        self._api.patch(self._path, {"spec": spec})

    def wait_published(self, *names: str) -> None:
        def as_wanted() -> bool:
            self.check()
            return published(self._slices(), NODE) == {*names} and self._sets() == (
                {"gpu-0", "gpu-1"} if names else set()
            )

        wait_for(as_wanted, SOON_S, f"published: {', '.join(names) or 'nothing'}")

    def check(self) -> None:
        """What was written so far broke no promise, and neither do the slices now."""
        assert self.allocations.touched == []
        assert not self.allocations.missing()

    def _sets(self) -> set[str]:
        return {each["name"] for item in self._slices() for each in item["spec"].get("sharedCounters") or ()}

    def _status(self) -> dict[str, Any]:
        found: dict[str, Any] = self._api.get(self._path).get("status", {})
        return found

    def _slices(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._api.get(f"{SLICES}?fieldSelector=spec.nodeName%3D{NODE}")["items"]
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("kill-plan") as running:
        install(running)
        yield running


@pytest.fixture(scope="module")
def planned(cluster: Cluster) -> Iterator[PlannedNode]:
    root = Path(tempfile.mkdtemp(prefix="tk-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root)
        node = KillNode(cluster, stack.enter_context(zygote(cluster)), NODE, root)
        stack.callback(node.close)
        allocations, stop = Allocations(cluster, str(root / "two-h100.yaml"), shares=SHARES), threading.Event()
        stack.callback(stop.set)
        allocations.start(stop)
        node.allocate([Wanted([HELD]), Wanted([UNKNOWN])])
        node.kubelet.prepare(node.claims[:1])
        heartbeat = Heartbeat(KubeClient(load_configuration(cluster.kubeconfig), "test"), "tessera", "test")
        stack.enter_context(in_thread(heartbeat.run))
        yield PlannedNode(cluster, node, allocations)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("leaves", [True, False], ids=["it leaves", "it comes back"])
def test_a_plugin_killed_while_a_gpu_leaves_or_comes_back_never_leaves_out_what_is_held(
    planned: PlannedNode, moment: str, number: int, leaves: bool
) -> None:
    """Each transition writes two slices: devices and counter sets."""
    states: dict[bool, tuple[str, ...]] = {True: (HELD, UNKNOWN, OFFERED), False: ()}
    planned.plan(offers=leaves)
    planned.wait_published(*states[leaves])
    seen = planned.allocations
    wait_for(lambda: seen.published() == {*map(device, states[leaves])}, SOON_S, "the watch has brought it, too")
    before = seen.unpublished, seen.republished
    planned.node.plugin.forget()
    planned.node.plugin.order(Point("write-slice", moment, number))
    planned.plan(offers=not leaves)
    see_killed(planned.node)
    planned.check()
    planned.node.start()
    planned.wait_published(*states[not leaves])
    after = before[0] + leaves, before[1] + (not leaves)
    wait_for(lambda: (seen.unpublished, seen.republished) == after, SOON_S, "one transition was seen")
    planned.check()


def device(name: str) -> PoolDevice:
    return PoolDevice(f"{NODE}-{DRIVER}", name)
