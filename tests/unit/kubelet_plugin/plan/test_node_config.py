"""Following the configurations of nodes: what applies at once, what takes a restart, and what changes nothing."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from driver.config.node_configs import CONFIG_LABEL, NO_CONFIG, NodeConfig
from driver.kube.controller_heartbeat import SILENCE_TIMEOUT_SECONDS
from driver.kube.events import MESSAGE_BYTES
from driver.kube.types import GpuNodePlan, PlanMetadata
from driver.model.plan import PlanSpec
from kubelet_plugin.app import discovered_plugin
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.plan.node_config import ALONE_SPREAD_SECONDS, ConfigFollower, store_config, stored_config
from kubelet_plugin.settings import NodeSettings, node_settings
from tests.support.clock import FakeClock
from tests.support.faulty_api import kubeconfig_of
from tests.support.node import NodeUnderTest


@dataclass
class ConfiguredNode:
    """A node with labels, the configurations of its cluster, and a controller, as the test wants them."""

    node: NodeUnderTest
    flags: NodeSettings
    clock: FakeClock = field(default_factory=FakeClock)
    text: str | None = None
    node_labels: dict[str, str] | None = field(default_factory=lambda: {"gpu": "h100"})
    allowed: str = ""
    planned: tuple[str, ...] = ()
    is_led: bool = True
    changes: list[NodeChange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A new process."""
        notifier = ChangeNotifier()
        for change in (NodeChange.SETTINGS, NodeChange.LABEL):
            notifier.subscribe(change, partial(self.changes.append, change))
        settings = self.flags.configured(stored_config(self.flags.state_dir) or NO_CONFIG)
        self.settings, inventory = settings, self.node.node.inventory
        self.follower = ConfigFollower(self, settings, inventory, notifier, self.clock, lambda: 0.5)
        self.changes.clear()

    def plan(self) -> GpuNodePlan | None:
        return GpuNodePlan(PlanMetadata("node-a"), PlanSpec(held=self.planned, config_revision=self.allowed))

    def controller_is_alive(self) -> bool:
        return self.is_led

    def labels(self) -> dict[str, str] | None:
        return self.node_labels

    def configs(self) -> str | None:
        return self.text

    def edit(self, **settings: str) -> None:
        """The configuration of all nodes with this GPU now has these settings."""
        self.text = json.dumps([{"name": "h100", "nodeSelector": {"gpu": "h100"}, "settings": settings}])

    def follow(self) -> list[NodeChange]:
        """What the plugin does about the present state."""
        self.changes.clear()
        self.follower.follow()
        return self.changes

    @property
    def stored(self) -> NodeConfig | None:
        return stored_config(self.flags.state_dir)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A socket's path has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="tessera-") as directory:
        yield Path(directory)


@pytest.fixture
def configured(node: NodeUnderTest) -> ConfiguredNode:
    flags = node_settings(node_name="node-a", state_dir=node.root / "state", shares="all=2")
    store_config(flags.state_dir, NO_CONFIG)
    return ConfiguredNode(node, flags)


def test_nothing_happens_before_labels_and_configurations_are_known(configured: ConfiguredNode) -> None:
    assert configured.follow() == []
    configured.text, configured.node_labels = "[", None
    assert configured.follow() == []
    assert configured.follower.status.error == ""


def test_what_the_node_publishes_changes_at_once(configured: ConfiguredNode) -> None:
    assert configured.follower.publish() == "curated"
    configured.edit(publish="complete")
    assert configured.follow() == [NodeChange.LABEL]
    assert configured.follower.publish() == "complete"
    assert configured.follower.status.name == "h100"
    configured.start()  # also if the API server can't be reached then
    assert configured.follower.publish() == "complete"
    configured.text = ""
    configured.follow()
    assert configured.follower.publish() == "curated"
    assert configured.follower.status.name == ""


def test_other_settings_wait_for_the_controller_and_a_restart(configured: ConfiguredNode) -> None:
    configured.edit(shares="all=4")
    assert configured.follow() == []
    assert configured.stored == NO_CONFIG
    configured.allowed = NodeConfig("", {"shares": "all=4"}).revision
    assert configured.follow() == [NodeChange.SETTINGS]
    configured.start()
    assert configured.settings.shares.of(configured.node.node.inventory.gpus[0]) == 4
    assert configured.follow() == []
    assert configured.follower.status.revision == configured.allowed


def test_a_controller_that_allows_it_need_not_have_renewed_its_heartbeat_yet(configured: ConfiguredNode) -> None:
    configured.is_led = False
    configured.edit(shares="all=4")
    configured.allowed = NodeConfig("", {"shares": "all=4"}).revision
    assert configured.follow() == [NodeChange.SETTINGS]


def test_a_node_that_could_not_read_its_first_configuration_restarts_as_soon_as_it_can(
    configured: ConfiguredNode,
) -> None:
    (configured.flags.state_dir / "node-config.json").unlink()
    configured.start()
    configured.edit(excludeGpus="0")
    assert configured.follow() == [NodeChange.SETTINGS]
    configured.start()
    configured.edit(excludeGpus="0,1")
    assert configured.follow() == []  # from then on the controller allows it


def test_settings_that_a_configuration_no_longer_has_are_those_of_the_flags_again(configured: ConfiguredNode) -> None:
    store_config(configured.flags.state_dir, NodeConfig("h100", {"shares": "all=4"}))
    configured.start()
    configured.edit()
    configured.allowed = NO_CONFIG.revision
    assert configured.follow() == [NodeChange.SETTINGS]
    configured.start()
    assert configured.settings.shares.of(configured.node.node.inventory.gpus[0]) == 2


def test_without_a_controller_the_node_restarts_after_a_random_delay(configured: ConfiguredNode) -> None:
    configured.is_led = False
    configured.edit(shares="all=4")
    assert configured.follow() == []
    configured.clock.advance(SILENCE_TIMEOUT_SECONDS + ALONE_SPREAD_SECONDS / 2 - 1)
    assert configured.follow() == []
    configured.clock.advance(1)
    assert configured.follow() == [NodeChange.SETTINGS]


@pytest.mark.parametrize(
    ("text", "labels", "said"),
    [
        ("[", {}, "tessera-node-configs: configs.json: "),
        ([{"name": "h100", "settings": {"shares": "x"}}], {}, "nodeConfigs[0].settings.shares"),
        ([], {CONFIG_LABEL: "missing"}, "no such configuration; accepted: none"),
        ([{"name": "h100", "nodeSelector": {}, "settings": {"layout": "0=4g.40gb,4g.40gb", "shares": ""}}], {}, "fit"),
        ([{"name": "h100", "nodeSelector": {}, "settings": {"layout": "0=9g.40gb", "shares": ""}}], {}, "9g.40gb"),
    ],
)
def test_a_mistake_changes_nothing_and_is_reported(
    configured: ConfiguredNode, text: Any, labels: dict[str, str], said: str
) -> None:
    configured.edit(publish="complete")
    configured.follow()
    configured.text, configured.node_labels = text if isinstance(text, str) else json.dumps(text), labels
    assert configured.follow() == []
    assert configured.follower.publish() == "complete"
    assert said in configured.follower.status.error
    assert configured.follower.status.name == "h100"
    configured.edit(publish="complete")
    configured.node_labels = {"gpu": "h100"}
    configured.follow()
    assert configured.follower.status.error == ""


def test_many_mistakes_do_not_make_the_status_of_the_plan_too_large(configured: ConfiguredNode) -> None:
    configured.text = json.dumps([{"name": "h100", "settings": {"share": "0=2"}}] * 1000)
    configured.follow()
    assert "nodeConfigs[0].settings.share" in configured.follower.status.error
    assert len(configured.follower.status.error.encode()) <= MESSAGE_BYTES


def test_a_gpu_stays_managed_while_a_claim_has_a_device_of_it(configured: ConfiguredNode) -> None:
    node = configured.node
    claim = node.api.allocate("infer", "gpu-0-mig-1g10gb-6")
    node.preparer.prepare(claim)
    configured.edit(excludeGpus="0")
    configured.allowed = NodeConfig("", {"exclude_gpus": "0"}).revision
    assert configured.follow() == []
    assert "gpu-0-mig-1g10gb-6" in configured.follower.status.error
    node.preparer.unprepare(claim)
    assert configured.follow() == [NodeChange.SETTINGS]


def test_a_gpu_stays_managed_while_a_claim_that_nvidias_driver_prepared_holds_it(configured: ConfiguredNode) -> None:
    inventory = configured.node.node.inventory
    inventory.hold_adopted("uid", {inventory.gpus[0].uuid: "claim default/old holds it until its pod ends"})
    configured.edit(excludeGpus="0")
    configured.allowed = NodeConfig("", {"exclude_gpus": "0"}).revision
    assert configured.follow() == []
    assert "would not be managed, and claim default/old holds it" in configured.follower.status.error
    inventory.release("uid")
    assert configured.follow() == [NodeChange.SETTINGS]


def test_a_gpu_stays_managed_while_a_claim_that_is_not_prepared_yet_has_a_device_of_it(
    configured: ConfiguredNode,
) -> None:
    configured.planned = ("gpu-0-mig-1g10gb-6 default/infer",)
    configured.edit(excludeGpus="0")
    configured.allowed = NodeConfig("", {"exclude_gpus": "0"}).revision
    assert configured.follow() == []
    assert "gpu-0-mig-1g10gb-6" in configured.follower.status.error
    configured.is_led = False  # the plan of a controller that is gone names claims that have ended
    assert configured.follow() == [NodeChange.SETTINGS]


def test_a_gpu_stays_managed_if_a_claim_is_prepared_on_it_before_the_plugin_has_ended(
    configured: ConfiguredNode,
) -> None:
    configured.edit(publish="complete")
    configured.follow()
    configured.edit(excludeGpus="0")
    configured.allowed = NodeConfig("", {"exclude_gpus": "0"}).revision
    assert configured.follow() == [NodeChange.SETTINGS]
    claim = configured.node.api.allocate("infer", "gpu-0-mig-1g10gb-6")
    configured.node.preparer.prepare(claim)
    configured.follower.check_stored()
    configured.start()
    assert configured.settings.manages(configured.node.node.inventory.gpus[0])
    assert configured.follower.publish() == "complete"


@pytest.mark.parametrize("flags", [{}, {"layout": "all=1g.10gb"}])
def test_a_stored_layout_that_the_gpus_can_not_have_offers_no_gpu_that_the_configuration_excludes(
    short_path: Path, flags: dict[str, str]
) -> None:
    kubeconfig = short_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(kubeconfig_of("https://127.0.0.1:1")))
    paths = {name: short_path / name for name in ("kubelet_dir", "cdi_dir", "state_dir", "host_root", "driver_root")}
    paths["state_dir"].mkdir()
    settings = node_settings(node_name="node-a", gpus="sim:dgx-h100", kubeconfig=kubeconfig, **paths, **flags)
    own = {"shares": "all=2"} if flags else {"layout": "all=9g.90gb"}
    store_config(settings.state_dir, NodeConfig("h100", {"exclude_gpus": "0", **own}))
    plugin = discovered_plugin(settings, threading.Event())
    assert plugin is not None
    plugin.stop()
    stored = stored_config(settings.state_dir)
    assert stored is not None
    assert stored.settings == {"exclude_gpus": "0", **own, "layout": ""}


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"name": "a", "settings": {"shares": "x"}}', b'{"name": "a"}'])
def test_a_stored_configuration_that_can_not_be_read_counts_as_none(
    configured: ConfiguredNode, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (configured.flags.state_dir / "node-config.json").write_bytes(content)
    assert configured.stored is None
    assert "can't read the stored configuration" in caplog.text
