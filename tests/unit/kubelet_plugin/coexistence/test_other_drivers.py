"""Others who hand out GPUs of the same node: who is seen, what is theirs, and that none of it is given out."""

from __future__ import annotations

import logging
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from driver.config.flag_values import NVIDIA_DRIVER
from driver.errors import ClaimError
from driver.model.reported_gpus import GpuReport
from kubelet_plugin.changes import ChangeNotifier
from kubelet_plugin.coexistence import other_drivers as neighbour_watch
from kubelet_plugin.coexistence.other_drivers import (
    NodeSigns,
    OtherDriverWatch,
    advice,
    find_other_drivers,
    owners_of,
)
from kubelet_plugin.inventory import scan
from kubelet_plugin.inventory.published_devices import PublishPolicy
from kubelet_plugin.settings import node_settings
from tests.harness.waiting import wait_for
from tests.support.api_server import SLICES
from tests.support.claims import NODE
from tests.support.faulty_api import FaultyApi, PluginOnApi
from tests.support.node import NodeUnderTest, start_node
from tests.support.running import in_thread

OURS = ("GPU-a", "GPU-b")
PLUGIN = NodeSigns(allocatable={"nvidia.com/gpu": "2", "cpu": "8"})
DRA = NodeSigns(published=frozenset({"GPU-b", "GPU-z"}))
MANAGER = NodeSigns(labels={"nvidia.com/mig.config": "all-1g.10gb", "nvidia.com/mig.config.state": "success"})
DRIVER = "gpu.tessera.dev"


def owned(signs: NodeSigns, excluded: int = 0, driver: str = DRIVER, *, trusting: bool = False) -> set[str]:
    return set(owners_of(find_other_drivers(signs, driver), OURS, excluded, trusting=trusting))


@pytest.mark.parametrize(
    ("signs", "named"),
    [
        (PLUGIN, "a device plugin (nvidia.com/gpu: 2 in the Node's status.allocatable)"),
        (NodeSigns(allocatable={"nvidia.com/mig-1g.10gb": "7"}), "a device plugin (nvidia.com/mig-1g.10gb: 7 in the"),
        (NodeSigns(allocatable={"nvidia.com/gpu.shared": "4"}), "a device plugin (nvidia.com/gpu.shared: 4 in the"),
        (
            NodeSigns(sockets=frozenset({"device-plugins/nvidia-gpu.sock"})),
            "a device plugin (it listens at device-plugins",
        ),
        (DRA, "the DRA driver gpu.nvidia.com (its ResourceSlices have 2 GPUs of this node)"),
        (
            NodeSigns(sockets=frozenset({"plugins_registry/gpu.nvidia.com-reg.sock"})),
            "the DRA driver gpu.nvidia.com (it li",
        ),
        (MANAGER, "mig-manager (nvidia.com/mig.config=all-1g.10gb, nvidia.com/mig.config.state=success on the Node)"),
    ],
)
def test_each_is_named_with_what_gave_it_away(signs: NodeSigns, named: str) -> None:
    [found] = find_other_drivers(signs, DRIVER)
    assert str(found).startswith(named)


@pytest.mark.parametrize(
    "signs",
    [
        NodeSigns(),
        NodeSigns(allocatable={"nvidia.com/gpu": "0", "nvidia.com/mig-1g.10gb": "0", "amd.com/gpu": "8"}),
        NodeSigns(labels={"nvidia.com/gpu.present": "true", "nvidia.com/mig.config": ""}),
        NodeSigns(labels={"nvidia.com/mig.config": "all-disabled", "nvidia.com/gpu.deploy.mig-manager": "false"}),
    ],
)
def test_what_was_there_once_or_is_something_else_is_no_neighbour(signs: NodeSigns) -> None:
    assert find_other_drivers(signs, DRIVER) == []


def test_who_is_called_as_nvidias_driver_is_not_its_own_neighbour() -> None:
    assert find_other_drivers(DRA, NVIDIA_DRIVER) == []
    assert len(find_other_drivers(PLUGIN, NVIDIA_DRIVER)) == 1


def test_a_driver_that_says_which_gpus_it_has_owns_those_and_no_others() -> None:
    assert owned(DRA) == owned(DRA, trusting=True) == {"GPU-b"}


@pytest.mark.parametrize("signs", [PLUGIN, MANAGER])
def test_who_does_not_say_which_gpus_it_has_owns_all_unless_a_line_is_drawn(signs: NodeSigns) -> None:
    assert owned(signs) == owned(signs, trusting=True) == set(OURS)
    assert owned(signs, excluded=2) == set()


def test_a_line_that_leaves_a_device_plugin_fewer_gpus_than_it_hands_out_is_none() -> None:
    assert owned(PLUGIN, excluded=1) == set(OURS)
    assert owned(PLUGIN, excluded=1, trusting=True) == set()
    shared = replace(PLUGIN, labels={"nvidia.com/gpu.replicas": "2"})
    assert owned(shared, excluded=1) == set()


def test_the_message_says_who_what_and_the_way_out() -> None:
    [plugin], [dra] = find_other_drivers(PLUGIN, DRIVER), find_other_drivers(DRA, DRIVER)
    message = advice(plugin, 2, 2, trusting=False)
    assert "owns all 2 GPUs because it does not publish which: nothing of them is offered" in message
    assert "--exclude-gpus" in message
    assert "owns 1 of 2 GPUs: nothing" in advice(dra, 1, 2, trusting=True)
    assert "--exclude-gpus" not in advice(dra, 1, 2, trusting=True)
    assert "owns none of the GPUs of Tessera" in advice(plugin, 0, 2, trusting=False)


@pytest.fixture
def node(tmp_path: Path) -> NodeUnderTest:
    return start_node(tmp_path)


def take(node: NodeUnderTest, gpu: int) -> str:
    uuid = node.node.inventory.gpus[gpu].uuid
    assert node.node.inventory.set_reserved({uuid: "mig-manager (a label) owns it"})
    return uuid


def state(node: NodeUnderTest, gpu: int) -> GpuReport:
    return node.node.inventory.states()[gpu]


def test_nothing_of_a_neighbours_gpu_is_offered_and_the_controller_is_told(node: NodeUnderTest) -> None:
    take(node, 1)
    assert node.offered(1) == set()
    assert node.offered(0)
    assert state(node, 1).fault == "mig-manager (a label) owns it"
    assert node.node.inventory.set_reserved({})
    assert "gpu-1" in node.offered(1)


def test_what_was_published_before_a_neighbour_came_stays_closed_to_new_claims(node: NodeUnderTest) -> None:
    take(node, 1)
    entry = node.node.inventory.published(PublishPolicy(kept=frozenset({"gpu-1", "gpu-0"})))[1]
    assert [device.name for device in entry.offers] == ["gpu-1"]
    assert entry.closed == {"gpu-1"}


def test_a_claim_that_has_a_device_keeps_it_and_a_new_one_gets_none(node: NodeUnderTest) -> None:
    small, next_to_it = "gpu-1-mig-1g10gb-0", "gpu-1-mig-1g10gb-1"
    held = node.api.allocate("held", small)
    node.preparer.prepare(held)
    late = node.api.allocate("late", next_to_it)
    take(node, 1)
    node.preparer.prepare(held)
    assert node.held(1) == {small}
    with pytest.raises(ClaimError, match=r"gpu-1-mig-1g10gb-1.* is reserved for another driver: mig-manager"):
        node.preparer.prepare(late)
    assert len(node.partitions(1)) == 1
    node.preparer.unprepare(held)
    assert node.partitions(1) == []


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short: below it are unix sockets."""
    monkeypatch.setattr(neighbour_watch, "DIRECTORY_CHECK_INTERVAL_SECONDS", 0.2)
    monkeypatch.setattr(scan, "EVENT_TIMEOUT_SECONDS", 0.3)
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


def store_node(api: FaultyApi, **allocatable: str) -> None:
    api.store(f"/api/v1/nodes/{NODE}", status={"allocatable": {f"nvidia.com/{k}": v for k, v in allocatable.items()}})


def their_slice(*uuids: str) -> dict[str, Any]:
    pool = {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    devices = [{"name": f"gpu-{n}", "attributes": {"uuid": {"string": uuid}}} for n, uuid in enumerate(uuids)]
    return {"nodeName": NODE, "driver": NVIDIA_DRIVER, "pool": pool, "devices": devices}


def uuid_of(device: str, api: FaultyApi) -> str:
    specs = [item["spec"] for item in list(api.folder(SLICES).values())]
    found = next(d for spec in specs for d in spec.get("devices") or () if d["name"] == device)
    return str(found["attributes"]["uuid"]["string"])


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(record)["why"] for record in caplog.records if record.getMessage() == "found another GPU driver"]


def ours(plugin: PluginOnApi) -> set[str]:
    items = [item["spec"] for item in list(plugin.api.folder(SLICES).values())]
    return {d["name"] for spec in items if spec["driver"] == DRIVER for d in spec.get("devices") or ()}


@pytest.mark.long
def test_a_plugin_beside_a_device_plugin_publishes_nothing_until_that_is_gone(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FaultyApi() as api, caplog.at_level(logging.INFO):
        plugin = PluginOnApi(root, api)
        store_node(api, gpu="1")
        with plugin.running():
            wait_for(lambda: told(caplog), 60, "the neighbour is named")
            wait_for(lambda: "00000-stale" not in api.folder(SLICES), 60, "slices are published")
            assert ours(plugin) == set()
            assert "owns all 1 GPUs" in told(caplog)[0]
            store_node(api, gpu="0")
            wait_for(lambda: "gpu-0" in ours(plugin), 60, "the GPU is offered")


def test_a_slice_of_nvidias_driver_takes_its_gpu_away_from_new_claims(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FaultyApi() as api, caplog.at_level(logging.INFO):
        plugin = PluginOnApi(root, api)
        with plugin.running():
            wait_for(lambda: "gpu-0" in ours(plugin), 60, "the GPU is offered")
            api.store(f"{SLICES}/theirs", spec=their_slice(uuid_of("gpu-0", api)))

            def closed() -> bool:
                specs = [item["spec"] for item in list(api.folder(SLICES).values())]
                devices = [d for s in specs if s["driver"] == DRIVER for d in s.get("devices") or ()]
                return all(any(t["key"].endswith("/not-offered") for t in d.get("taints", ())) for d in devices)

            wait_for(closed, 60, "what is published is closed to new claims")
            assert "the DRA driver gpu.nvidia.com" in told(caplog)[-1]


@pytest.mark.long
def test_a_socket_counts_while_somebody_listens_at_it(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = root / "k" / "device-plugins"
    folder.mkdir(parents=True)
    with FaultyApi() as api, caplog.at_level(logging.INFO):
        plugin = PluginOnApi(root, api)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(folder / "nvidia-gpu.sock"))
            server.listen()
            with plugin.running():
                wait_for(lambda: told(caplog), 60, "the neighbour is named")
                assert "listens at device-plugins/nvidia-gpu.sock" in told(caplog)[0]
                server.close()
                wait_for(lambda: "gpu-0" in ours(plugin), 60, "the GPU is offered")


def test_readiness_is_asked_for_in_the_moment_in_which_a_neighbour_is_found(root: Path) -> None:
    """The page would tell people of a defect instead of a neighbour."""
    heard: list[str | None] = []
    with FaultyApi() as api:
        store_node(api)

        class Teller:
            def node(self, *_: object) -> None:
                heard.append(watch.not_ready())

        settings = node_settings(node_name=NODE, driver_name=DRIVER, kubelet_dir=root)
        inventory: Any = SimpleNamespace(gpus=[SimpleNamespace(uuid="GPU-a")], set_reserved=lambda _: False)
        excluded: Any = SimpleNamespace(excluded_count=0)
        watch = OtherDriverWatch(api.server.client(), settings, inventory, excluded, ChangeNotifier(), Teller())
        with in_thread(watch.cache.run, api.end_watches), in_thread(watch.run, watch.wake):
            wait_for(lambda: watch.not_ready() is None, 20, "nobody is there")
            store_node(api, gpu="1")
            wait_for(lambda: watch.not_ready() is not None, 20, "somebody is")
    assert heard
    assert heard[0] is not None
    assert "a device plugin (nvidia.com/gpu: 1" in heard[0]
