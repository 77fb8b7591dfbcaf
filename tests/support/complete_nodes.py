"""Nodes that publish every device, as tests set and see them."""

from __future__ import annotations

from typing import Any

from driver.model.plan import PUBLISH
from tests.harness.cluster import Cluster
from tests.support.plugin import PluginProcess


def label(cluster: Cluster, node: str, value: str | None) -> None:
    cluster.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": {PUBLISH: value}}})


def specs(node: PluginProcess) -> list[dict[str, Any]]:
    return [item["spec"] for item in node.slices()]


def is_complete(node: PluginProcess) -> bool:
    """Whether all eight GPUs are published whole and in all their parts, without a taint."""
    devices = node.devices()
    return len(devices) == 8 * 26 and not any("taints" in device for device in devices.values())
