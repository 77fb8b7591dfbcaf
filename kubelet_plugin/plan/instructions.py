"""What a node watches: its plan, the heartbeat, labels of its Node, and the configurations of nodes.

The plan also has the cordons of the node's GPUs, which ``health.device_health`` reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from driver.config.node_configs import CONFIGS_KEY, NODE_CONFIGS
from driver.kube.client import KubeClient
from driver.kube.controller_heartbeat import HeartbeatWatch
from driver.kube.types import ConfigMap, GpuNodePlan, Node, PlanMetadata
from driver.kube.watch_cache import WatchCache
from driver.model.plan import COMPLETE, PATH, PUBLISH, PUBLISH_VALUES
from kubelet_plugin.changes import ChangeNotifier, NodeChange

NODES_PATH = "/api/v1/nodes"

NO_CRD = (
    "CustomResourceDefinition gpunodeplans is not installed: this node runs standalone and ignores `tessera cordon`; "
    "see docs/install.md"
)


class _PlanCache(WatchCache[GpuNodePlan, GpuNodePlan]):
    message_if_not_installed = NO_CRD


class NodeFacts(NamedTuple):
    """The labels of the Node, and whether a kubelet has written its status."""

    labels: Mapping[str, str]
    has_kubelet: bool


class Instructions(Protocol):
    """What is known at present. No method waits."""

    def plan(self) -> GpuNodePlan | None:
        """The node's plan; None if there is none, or none has been received yet."""

    def controller_is_alive(self) -> bool:
        """Whether the controller has renewed its heartbeat recently."""

    def has_controller(self) -> bool:
        """Whether there is or was a controller, or that is not known yet."""

    def lacks_plan(self) -> bool:
        """Whether there is no plan, and no controller that would create it."""

    def publishes_all(self) -> bool | None:
        """Whether the node publishes every device; None: not known yet."""


class WatchedInstructions:
    """``Instructions`` from watches. Run each of ``loops`` in a thread of its own.

    ``publish`` returns one of PUBLISH_VALUES, which applies if the Node has no label PUBLISH, or one that is not valid.
    """

    def __init__(
        self, client: KubeClient, namespace: str, node: str, publish: Callable[[], str], changes: ChangeNotifier
    ) -> None:
        self._publish = publish
        selector = {"fieldSelector": f"metadata.name={node}"}

        def plan_changed(*_: object) -> None:
            changes.report(NodeChange.PLAN)

        def node_changed(*_: object) -> None:
            changes.report(NodeChange.LABEL)

        self._plans = _PlanCache(client, PATH, GpuNodePlan, without_status, plan_changed, selector)
        self._heartbeat = HeartbeatWatch(client, namespace, on_change=plan_changed)
        self._nodes = WatchCache(client, NODES_PATH, Node, _node_facts, node_changed, selector)
        path, named = f"/api/v1/namespaces/{namespace}/configmaps", {"fieldSelector": f"metadata.name={NODE_CONFIGS}"}
        self._configs = WatchCache(client, path, ConfigMap, _configs_text, node_changed, named)
        self.controller_is_alive = self._heartbeat.alive
        self.loops: tuple[Callable[[threading.Event], None], ...] = (
            self._plans.run,
            self._heartbeat.run,
            self._nodes.run,
            self._configs.run,
        )

    @property
    def synced(self) -> bool:
        """Whether the first list of plans has been received, so that ``plan`` is reliable."""
        return self._plans.synced

    def plan(self) -> GpuNodePlan | None:
        return next(iter(self._plans.snapshot().values()), None)

    def has_controller(self) -> bool:
        return self._heartbeat.exists is not False

    def lacks_plan(self) -> bool:
        return self.synced and self.plan() is None and not self.has_controller()

    def publishes_all(self) -> bool | None:
        labels = self.labels()
        if labels is None:
            return None
        label = labels.get(PUBLISH, "")
        return (label if label in PUBLISH_VALUES else self._publish()) == COMPLETE

    def labels(self) -> Mapping[str, str] | None:
        """The labels of the Node; None: not known yet."""
        return next((facts.labels for facts in self._nodes.snapshot().values()), {}) if self._nodes.synced else None

    def configs(self) -> str | None:
        """The configurations of nodes as their ConfigMap has them; None: not known yet."""
        return next(iter(self._configs.snapshot().values()), "") if self._configs.synced else None

    def has_kubelet(self) -> bool | None:
        """Whether a kubelet has written the status of the Node; None: not known yet, or there is no Node."""
        return next((facts.has_kubelet for facts in self._nodes.snapshot().values()), None)

    def uninstalling(self) -> bool:
        return self._heartbeat.leaving


def _node_facts(node: Node) -> NodeFacts:
    return NodeFacts(node.metadata.labels, bool(node.status.node_info.kubelet_version))


def _configs_text(configs: ConfigMap) -> str:
    return configs.data.get(CONFIGS_KEY, "")


def without_status(plan: GpuNodePlan) -> GpuNodePlan:
    """The part of the plan that its node reads: a write of its own status must not count as a change."""
    metadata = plan.metadata
    return GpuNodePlan(PlanMetadata(metadata.name, uid=metadata.uid, generation=metadata.generation), plan.spec)
