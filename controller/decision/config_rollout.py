"""The rollout of changed configurations: which nodes may restart their plugins with their new settings, and when.

A node finds its configuration by itself and restarts once its plan names the new revision. Here each configuration has
at most a tenth of its nodes restart at a time, those without claims first, and none after one that did not become
ready. It reads what the last decision was made from, and writes one field of plans that decisions leave alone.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from controller.cluster.cache import Snapshot
from controller.cluster.node_views import UNREACHABLE_TAINTS
from driver.clock import Clock
from driver.config.node_configs import CONFIGS_KEY, NODE_CONFIGS, NodeConfig, chosen_config, read_configs
from driver.errors import UsageError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import config_map_text
from driver.kube.types import GpuNodePlan
from driver.kube.work_loop import Loop
from driver.model.plan import PATH, NodeConditionType

log = logging.getLogger(__name__)

SHARE_AT_ONCE = 0.1

READY_TIMEOUT_SECONDS = 180.0
"""Time in which a plugin starts again and reports its settings; then no other node of its configuration restarts."""

TURN_SECONDS, IDLE_SECONDS = 0.5, 5.0
"""Intervals while a rollout is in progress, and otherwise."""

STARTS_PER_TURN = 5
"""Limits the load of the API server: a restart is two writes, the permission and the node's report."""


@dataclass(frozen=True, slots=True)
class ConfiguredNode:
    """A node, its plan, the number of its held devices, and the configuration that it should have."""

    name: str
    plan: GpuNodePlan
    held: int
    config: NodeConfig

    @property
    def is_done(self) -> bool:
        return self.plan.status.config.revision == self.config.revision

    @property
    def may_start(self) -> bool:
        return self.plan.spec.config_revision == self.config.revision

    @property
    def is_held_back(self) -> bool:
        """Whether the plan is paused, or the node would not become ready, because it waits for its driver."""
        conditions = self.plan.status.conditions
        return self.plan.metadata.paused or any(item.type == NodeConditionType.UNABLE for item in conditions)


class ConfigRollout:
    """``snapshot`` returns what the last decision was made from; None: none has been made yet."""

    def __init__(
        self, client: KubeClient, namespace: str, snapshot: Callable[[], Snapshot | None], clock: Clock | None = None
    ) -> None:
        self._client, self._namespace, self._snapshot, self._clock = client, namespace, snapshot, clock or Clock()
        self._started: dict[tuple[str, str], float] = {}
        """By node and revision, since when the node may start."""
        self._stopped: set[tuple[str, str]] = set()
        """Configurations, by name and revision, with which a node did not become ready."""
        self.loop = Loop("rolling out configurations of nodes", self.turn, 0.0)

    def turn(self) -> float:
        """Let the next nodes start. Returns after how many seconds to call again. Raises ApiError."""
        snapshot = self._snapshot()
        if snapshot is None:
            return TURN_SECONDS
        try:
            configs = read_configs(config_map_text(self._client, self._namespace, NODE_CONFIGS, CONFIGS_KEY))
        except UsageError:  # each node keeps its configuration and reports why
            return IDLE_SECONDS
        nodes_of: dict[tuple[str, str], list[ConfiguredNode]] = defaultdict(list)
        for node in configured_nodes(snapshot, configs):
            nodes_of[node.config.name, node.config.revision].append(node)
        ready = [node for config, of_config in nodes_of.items() for node in self._next(config, of_config)]
        for node in ready[:STARTS_PER_TURN]:
            self._client.patch_existing(f"{PATH}/{node.name}", {"spec": {"configRevision": node.config.revision}})
            self._started[node.name, node.config.revision] = self._clock.monotonic()
        nodes = (node for of_config in nodes_of.values() for node in of_config)
        pending = {(node.name, node.config.revision) for node in nodes if not node.is_done}
        self._started = {start: at for start, at in self._started.items() if start in pending}
        return TURN_SECONDS if pending else IDLE_SECONDS

    def _next(self, config: tuple[str, str], nodes: Sequence[ConfiguredNode]) -> list[ConfiguredNode]:
        """The nodes of one configuration that may start now."""
        pending = [node for node in nodes if not node.is_done and not node.plan.status.config.error]
        starting = [node for node in pending if node.may_start or (node.name, config[1]) in self._started]
        failed = [node.name for node in starting if self._seconds_since_start(node) > READY_TIMEOUT_SECONDS]
        if failed:
            if config not in self._stopped:
                log.error("a configuration is not rolled out further", extra={"config": config[0], "node": failed[0]})
            self._stopped.add(config)
            return []
        self._stopped.discard(config)
        waiting = [node for node in pending if node not in starting and not node.is_held_back]
        waiting.sort(key=lambda node: (node.held, node.name))
        return waiting[: max(0, math.ceil(SHARE_AT_ONCE * len(nodes)) - len(starting))]

    def _seconds_since_start(self, node: ConfiguredNode) -> float:
        """How long ago the node was allowed to start, by what this leader has seen."""
        now = self._clock.monotonic()
        return now - self._started.setdefault((node.name, node.config.revision), now)


def configured_nodes(snapshot: Snapshot, configs: Sequence[NodeConfig]) -> Iterator[ConfiguredNode]:
    """The nodes that report a configuration, with the one that each should have.

    Left out are nodes with a wrong label, unreachable nodes, which would stop the rollout, and those of an earlier
    version, which report none.
    """
    held = {node.name: len(node.held) for node in snapshot.views}
    for node in snapshot.cluster.nodes:
        plan = snapshot.plans.get(node.metadata.name)
        is_unreachable = any(taint.key in UNREACHABLE_TAINTS for taint in node.spec.taints)
        if plan is None or not plan.status.config.revision or is_unreachable:
            continue
        try:
            config = chosen_config(configs, node.metadata.labels)
        except UsageError:
            continue
        yield ConfiguredNode(node.metadata.name, plan, held.get(node.metadata.name, 0), config)
