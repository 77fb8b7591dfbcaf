"""Counting what there is: on the GPUs, on disk, in the process, at the API server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driver.simulator.node import SimulatedNode, describe
from tests.bench.usage import memory_mb
from tests.support.plugin import SLICES, PluginProcess
from tests.support.workloads import CLAIMS, PODS

EVENTS = "/api/v1/namespaces/default/events"
OURS = "tessera"
"""What the names of our components begin with, in the Events that they write."""


@dataclass(frozen=True)
class Things:
    """What is there because of claims; all are 0 when no claim is left."""

    partitions: int
    specs: int
    records: int
    claims: int
    pods: int


@dataclass(frozen=True)
class Census:
    """One count. ``alive``: claims that may have had something meanwhile."""

    at_s: float
    alive: int
    things: Things
    pid: int
    rss_mib: float
    threads: int
    fds: int
    slices: int
    events: int


def count_things(plugin: PluginProcess) -> Things:
    node = SimulatedNode.attach(plugin.host_root)
    api = plugin.cluster.api
    return Things(
        partitions=sum(len(gpu["migDevices"]) for gpu in describe(node, {})),
        specs=len(plugin.cdi_specs()),
        records=len(plugin.records()),
        claims=len(api.get(CLAIMS)["items"]),
        pods=len(api.get(PODS)["items"]),
    )


def take(plugin: PluginProcess, at_s: float, alive: Callable[[], int]) -> Census | None:
    """Count everything now, ``alive`` last; None while the plugin is being started again."""
    try:
        pid = plugin.pid
        process = Path(f"/proc/{pid}")
        threads, fds = (sum(1 for _ in (process / what).iterdir()) for what in ("task", "fd"))
        rss = memory_mb(pid)
    except (OSError, RuntimeError):
        return None
    api = plugin.cluster.api
    slices = [item for item in api.get(SLICES)["items"] if item["spec"].get("nodeName") == plugin.node.name]
    events = sum(1 for event in api.get(EVENTS)["items"] if _source(event).startswith(OURS))
    things = count_things(plugin)
    return Census(at_s, alive(), things, pid, rss, threads, fds, len(slices), events)


def _source(event: dict[str, Any]) -> str:
    return str(event.get("reportingComponent") or event.get("source", {}).get("component") or "")
