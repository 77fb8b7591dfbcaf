"""How soon pending claims have their reasons on a fleet, what the reasons cost, and how long the commands take."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from driver.kube.types import Key, ObjectMeta
from tests.bench.fleet.live import Live
from tests.bench.fleet.watching import Usage
from tests.bench.placement.measures import percentile
from tests.bench.placement.replay import pod
from tests.bench.watching import watched
from tests.support.plugin import COMMAND_S, TESSERA
from tests.support.scheduling import asked
from tests.support.workloads import CLAIMS, PODS

EVENTS = "/api/v1/namespaces/default/events"
MEASURED_S, TOLD_S = 60.0, 60.0
SETTLED_S = 10.0
"""After the last claim has come."""

A = 'device.attributes["gpu.tessera.dev"]'

KINDS: Mapping[str, dict[str, Any]] = {
    "whole": asked("gpu-training", count=8),
    "many": asked("gpu-training", count=9),
    "class": asked("gpu-traning"),
    "product": asked("gpu-training", f'{A}.productName == "NVIDIA H100"'),
    "fails": asked("gpu-training", f'{A}.prodName == "x"'),
    "pinned": asked("gpu-training", count=4),
}
"""Requests that do not fit. ``pinned`` has a node selector that matches no node, ``whole`` one node that is in use."""

COMMANDS = {
    "why -A": ("why", "-A"),
    "why POD": ("why", "pod/whole-0"),
    "status": ("status",),
    "map": ("map",),
}


@dataclass
class Explained:
    """Seconds from the creation of a pod to its claim's first Event, as a client sees it.

    The shares are of one core, over a minute in which nothing changes: without pending claims, and with them.
    ``commands`` takes seconds by command.
    """

    nodes: int
    claims: int
    p50_s: float
    worst_s: float
    share_without: float
    share_with: float
    commands: dict[str, float] = field(default_factory=dict)


class About(msgspec.Struct, frozen=True):
    kind: str
    name: str


class Event(msgspec.Struct, frozen=True, rename="camel"):
    """An Event of the controller."""

    metadata: ObjectMeta
    involved_object: About


def explained(live: Live, claims: int = 60) -> Explained:
    """``claims`` pods of all KINDS, one after the other; all of them stay pending."""
    without = _share(live)
    names = [f"{kind}-{number}" for number in range(-(-claims // len(KINDS))) for kind in KINDS][:claims]
    in_use = _nodes_in_use(live)
    seconds: list[float] = []
    with watched(live.cluster, EVENTS, Event, fieldSelector="reportingComponent=tessera-controller") as events:
        for name in names:
            body, kind = pod(name), name.rpartition("-")[0]
            if kind == "pinned":
                body["spec"]["nodeSelector"] = {"no-node": "has-this"}
            if kind == "whole":
                body["spec"]["affinity"] = _only(in_use[len(seconds)])
            live.client.create(CLAIMS, claim(name, KINDS[kind]))
            began = time.perf_counter()
            live.client.create(PODS, body)
            about = About("ResourceClaim", name)

            def is_told(there: Mapping[Key, Event], about: About = about) -> bool:
                return any(each.involved_object == about for each in there.values())

            seconds.append(events.wait(f"an Event on claim {name}", is_told, TOLD_S) - began)
    seconds.sort()
    time.sleep(SETTLED_S)
    found = Explained(live.nodes, claims, percentile(seconds, 0.5), seconds[-1], without, _share(live))
    for what, arguments in COMMANDS.items():
        began = time.perf_counter()
        command = [TESSERA, *arguments, "--kubeconfig", str(live.cluster.kubeconfig)]
        subprocess.run(command, capture_output=True, timeout=COMMAND_S, check=False)
        found.commands[what] = time.perf_counter() - began
    return found


def _nodes_in_use(live: Live) -> list[str]:
    claims = live.client.get_object("/apis/resource.k8s.io/v1/resourceclaims")["items"]
    results = (each["status"]["allocation"]["devices"]["results"][0] for each in claims if each.get("status"))
    return sorted({each["pool"].removesuffix(f"-{each['driver']}") for each in results})


def _only(node: str) -> dict[str, Any]:
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def claim(name: str, request: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [request]}},
    }


def _share(live: Live) -> float:
    """The share of a core that the controller takes from now on."""
    usage = Usage(live.controller_pid).start()
    time.sleep(MEASURED_S)
    return usage.core_share
