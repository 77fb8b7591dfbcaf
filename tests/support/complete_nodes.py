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
    """Whether all eight GPUs are published whole and in all their parts, without a taint, and as they are when idle.

    An idle node without a controller publishes the same devices, but with the MIG mode that its GPUs have now.
    """
    devices = node.devices().values()
    enabled = [each for each in devices if each["attributes"].get("migMode") == {"string": "enabled"}]
    return len(devices) == 8 * 26 and not enabled and not any("taints" in each for each in devices)


def differences(found: Any, wanted: Any, where: str = "") -> list[str]:
    """Each value in which two JSON documents differ, with its path."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        pairs = [(f"{where}.{key}", found.get(key), wanted.get(key)) for key in sorted({*found, *wanted})]
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = [(f"{where}[{index}]", *each) for index, each in enumerate(zip(found, wanted, strict=True))]
    else:
        return [] if found == wanted else [f"{where}: {found!r} instead of {wanted!r}"[:300]]
    return [line for path, one, other in pairs for line in differences(one, other, path)]
