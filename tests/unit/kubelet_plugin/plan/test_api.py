"""A node that stands alone lets go of what a controller had fenced there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kubelet_plugin.plan.api import FenceRelease
from tests.support.api_server import ObjectApi
from tests.support.running import eventually, in_thread

CONFIG_MAPS = "/api/v1/namespaces/tessera/configmaps"
FENCED = {"node-a-gpu.tessera.dev": "gpu-0 gpu-1", "node-b-gpu.tessera.dev": "gpu-0"}


@dataclass
class Node:
    """node-a, standing alone in ``epoch`` or not."""

    api: ObjectApi
    epoch: str | None = None

    def __post_init__(self) -> None:
        self.fence = FenceRelease(self.api.server.client(), "tessera", "node-a-gpu.tessera.dev", lambda: self.epoch)

    def fenced(self) -> dict[str, str]:
        data: dict[str, str] = self.api.folder(CONFIG_MAPS)["tessera-fence"]["data"]
        return data


@pytest.fixture
def node() -> Iterator[Node]:
    with ObjectApi() as api:
        api.store(f"{CONFIG_MAPS}/tessera-fence", data=dict(FENCED))
        yield Node(api)


def test_alone_a_node_lifts_its_own_fence_and_no_other(node: Node) -> None:
    node.epoch = "e1"
    with in_thread(node.fence.run, node.fence.notify):
        node.fence.notify()
        eventually(lambda: node.fenced() == {"node-b-gpu.tessera.dev": "gpu-0"}, "its own is lifted")


def test_a_node_that_follows_a_plan_leaves_the_fence_alone(node: Node) -> None:
    node.fence._release()
    assert node.fenced() == FENCED


def test_it_asks_once_each_time_it_comes_to_stand_alone(node: Node) -> None:
    for epoch in ("e1", "e1", None, "e1", "e2", "e2"):
        node.epoch = epoch
        node.fence._release()
    assert node.api.count("PATCH") == 2


def test_where_nothing_was_ever_fenced_there_is_nothing_to_lift(node: Node) -> None:
    node.api.drop(f"{CONFIG_MAPS}/tessera-fence")
    node.epoch = "e1"
    node.fence._release()
    node.fence._release()
    assert node.api.count("PATCH") == 1


def test_a_fence_that_can_not_be_lifted_now_is_lifted_later(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.api.once("PATCH", lambda exchange: exchange.refuse(500, "etcd"))
    node.epoch = "e1"
    with in_thread(node.fence.run, node.fence.notify):
        node.fence.notify()
        eventually(lambda: len(node.fenced()) == 1, "its own is lifted")
    assert "trying again" in caplog.text
