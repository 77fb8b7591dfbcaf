"""The node's configuration: the one in force, which outlives the process, and the one that it should have.

A change that needs no restart applies at once. For any other the plugin ends, and its process starts again: when the
controller allows this node to, or after a random delay if no controller is alive (``controller.config_rollout``). A
configuration that the node can't have changes nothing, and the plan's status says why.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from driver.clock import Clock
from driver.config.node_configs import (
    CONFIGS_KEY,
    NO_CONFIG,
    NODE_CONFIGS,
    PARSERS,
    NodeConfig,
    chosen_config,
    read_configs,
)
from driver.errors import ApiError, StateError, UsageError
from driver.kube.client import KubeClient, load_configuration
from driver.kube.controller_heartbeat import SILENCE_TIMEOUT_SECONDS
from driver.kube.events import shortened
from driver.kube.get_and_list import config_map_text
from driver.kube.types import GpuNodePlan
from driver.kube.work_loop import Loop
from driver.model.device import Device
from driver.model.plan import ConfigStatus
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.checkpoint.files import write_atomically
from kubelet_plugin.inventory.inventory import Inventory
from kubelet_plugin.inventory.standalone_offers import check_layouts
from kubelet_plugin.plan.instructions import NODES_PATH
from kubelet_plugin.settings import NodeSettings

log = logging.getLogger(__name__)

COALESCE_SECONDS = 0.2

CHECK_INTERVAL_SECONDS = 5.0
"""While a restart is not allowed: nothing reports that the controller is gone."""

ALONE_SPREAD_SECONDS = 120.0
"""Range of the random delay after which a node without a controller restarts its plugin."""


class ConfigFile(msgspec.Struct, frozen=True):
    """The content of ``node-config.json``: the configuration in force, values as flags have them, by flag."""

    name: str
    settings: dict[str, str]


CONFIG_FILE = msgspec.json.Decoder(ConfigFile)


def stored_config(state_dir: Path) -> NodeConfig | None:
    """The configuration that was in force last; None if none is stored, or it can't be read."""
    path = _path(state_dir)
    try:
        file = CONFIG_FILE.decode(path.read_bytes())
        for flag, value in file.settings.items():
            PARSERS[flag](value)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, LookupError, ValueError) as error:
        log.warning("can't read the stored configuration", extra={"error": f"{path}: {error}"})
        return None
    return NodeConfig(file.name, file.settings)


def store_config(state_dir: Path, config: NodeConfig) -> None:
    """Raises StateError."""
    file = ConfigFile(config.name, dict(config.settings))
    write_atomically(_path(state_dir), msgspec.json.encode(file), durable=True)


def store_first_config(settings: NodeSettings, user_agent: str) -> None:
    """Read and store the configuration of a node that has none yet, so that its plugin need not start twice.

    If that fails, the plugin starts with its flags, and ``ConfigFollower`` reports why. Raises EnvironmentFault.
    """
    if stored_config(settings.state_dir) is not None:
        return
    client = KubeClient(load_configuration(settings.kubeconfig, in_own_process=True), user_agent)
    try:
        text = config_map_text(client, settings.namespace, NODE_CONFIGS, CONFIGS_KEY)
        labels = (client.find(f"{NODES_PATH}/{settings.node_name}") or {}).get("metadata", {}).get("labels") or {}
        store_config(settings.state_dir, chosen_config(read_configs(text), labels))
    except (ApiError, StateError, UsageError) as error:
        log.warning("the node's configuration is not known yet: the flags apply", extra={"error": str(error)})


def store_without_layout(state_dir: Path, error: UsageError) -> None:
    """Remove the layout of the stored configuration, which the GPUs can't have; its other settings stay in force: a GPU
    that it excludes must not be offered. Raises StateError, and ``error`` if there is none to remove."""
    config = stored_config(state_dir) or NO_CONFIG
    if not config.settings or config.settings.get("layout") == "":
        raise error
    log.error("the node's GPUs have no layout for now: they can't have theirs", extra={"error": str(error)})
    store_config(state_dir, NodeConfig(config.name, {**config.settings, "layout": ""}))


def _path(state_dir: Path) -> Path:
    return state_dir / "node-config.json"


class ConfigInstructions(Protocol):
    """What is known about the node's configuration (``WatchedInstructions``). No method waits."""

    def plan(self) -> GpuNodePlan | None:
        """The node's plan."""

    def controller_is_alive(self) -> bool:
        """Whether the controller has renewed its heartbeat recently."""

    def labels(self) -> Mapping[str, str] | None:
        """The labels of the Node; None: not known yet."""

    def configs(self) -> str | None:
        """The configurations of nodes as their ConfigMap has them; None: not known yet."""


class ConfigFollower:
    """Call ``notify`` after a change of the configurations, the Node's labels or its plan. ``status`` is the present
    state, for the plan's status."""

    def __init__(
        self,
        instructions: ConfigInstructions,
        settings: NodeSettings,
        inventory: Inventory,
        changes: ChangeNotifier,
        clock: Clock | None = None,
        spread: Callable[[], float] = random.random,
    ) -> None:
        self._instructions, self._settings, self._inventory = instructions, settings, inventory
        self._changes, self._clock, self._spread = changes, clock or Clock(), spread
        self._config = settings.config
        self._is_first = stored_config(settings.state_dir) is None
        """Whether it could not be read before the start: then what it excludes is published until the restart."""
        self._alone_until: float | None = None
        self.status = ConfigStatus(settings.config.name, settings.config.revision)
        self._loop = Loop("following the node's configuration", self.follow, COALESCE_SECONDS)
        self.notify, self.run = self._loop.notify, self._loop.run

    def publish(self) -> str:
        """What the node publishes unless its label says something else: one of PUBLISH_VALUES."""
        return self._settings.configured(self._config).publish

    def follow(self) -> float | None:
        """Returns after how many seconds to call again. Raises StateError."""
        labels, text = self._instructions.labels(), self._instructions.configs()
        if labels is None or text is None:
            return None
        try:
            config = chosen_config(read_configs(text), labels)
            self._check(self._settings.configured(config))
        except UsageError as fault:
            error = shortened(str(fault))
            if error != self.status.error:
                log.error("the node keeps its configuration", extra={"config": self.status.name, "error": error})
            self._report(ConfigStatus(self.status.name, self.status.revision, error))
            return None
        if config.revision != self._config.revision:
            return self._restart_if_allowed(config)
        if self._is_first or (config.name, config.settings) != (self._config.name, self._config.settings):
            store_config(self._settings.state_dir, config)
            self._config, self._is_first = config, False
            log.info("the node has a configuration", extra={"config": config.name or "none"})
            self._changes.report(NodeChange.LABEL)
        self._report(ConfigStatus(config.name, config.revision))
        return None

    def check_stored(self) -> None:
        """Call it when the plugin has ended: a claim may have been prepared since the configuration was stored.

        Raises StateError.
        """
        try:
            self._check(self._settings.configured(stored_config(self._settings.state_dir) or NO_CONFIG))
        except UsageError as error:
            log.error("the node keeps its configuration", extra={"config": self.status.name, "error": str(error)})
            store_config(self._settings.state_dir, self._config)

    def _check(self, settings: NodeSettings) -> None:
        """Raises UsageError if the node can't have ``settings`` now."""
        check_layouts(settings.layout, settings.shares, self._inventory.gpus)
        allocated = self._allocated()
        for gpu in self._inventory.gpus:
            devices = [*self._inventory.held_on(gpu), *(device for device in allocated if device.gpu.uuid == gpu.uuid)]
            if reason := settings.reason_against(gpu, {device.name for device in devices}):
                raise UsageError(f"{reason}: waits for their end")
            if (adopted := self._inventory.adopted_reason(gpu)) and not settings.manages(gpu):
                raise UsageError(f"GPU {gpu.index} would not be managed, and {adopted}")

    def _allocated(self) -> list[Device]:
        """The devices that claims have by the plan, prepared or not; none if nobody keeps the plan up to date."""
        plan = self._instructions.plan()
        names = plan.spec.held_devices if plan is not None and self._instructions.controller_is_alive() else ()
        return [device for name in names if (device := self._inventory.device(name)) is not None]

    def _restart_if_allowed(self, config: NodeConfig) -> float | None:
        plan, now = self._instructions.plan(), self._clock.monotonic()
        if self._instructions.controller_is_alive():
            self._alone_until = None
        elif self._alone_until is None:
            self._alone_until = now + SILENCE_TIMEOUT_SECONDS + ALONE_SPREAD_SECONDS * self._spread()
        is_allowed = self._is_first or (plan is not None and plan.spec.config_revision == config.revision)
        if not is_allowed and (self._alone_until is None or now < self._alone_until):
            self._report(ConfigStatus(self.status.name, self.status.revision))
            return CHECK_INTERVAL_SECONDS
        store_config(self._settings.state_dir, config)
        log.info("restarting with another configuration", extra={"config": config.name, "revision": config.revision})
        self._changes.report(NodeChange.SETTINGS)
        return None

    def _report(self, status: ConfigStatus) -> None:
        if status != self.status:
            self.status = status
            self._changes.report(NodeChange.CONDITION)
