"""How soon pending claims have their reasons on a fleet, what the reasons cost, and how long the commands take."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from driver.kube.types import Key, ObjectMeta
from tests.bench.fleet.live import Live
from tests.bench.fleet.watching import Usage
from tests.bench.placement.measures import percentile
from tests.bench.placement.replay import pod
from tests.bench.watching import Watched, watched
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
    "why POD": ("why", "pod/burst-0"),
    "status": ("status",),
    "map": ("map",),
}


@dataclass
class Explained:
    """Seconds from the creation of a pod to its claim's first Event, as a client sees it.

    For claims that come one after the other, and for as many that come at once with a selector each (``burst``). The
    shares are of one core, over a minute in which nothing changes: without pending claims, and with those of the burst.
    ``commands`` takes seconds by command.
    """

    nodes: int
    claims: int
    p50_s: float
    worst_s: float
    burst_p50_s: float
    burst_worst_s: float
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
    """``claims`` pods of all KINDS, one after the other, and then as many at once; those stay pending."""
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

            def is_told(there: Mapping[Key, Event], name: str = name) -> bool:
                return name in _told(there)

            seconds.append(events.wait(f"an Event on claim {name}", is_told, TOLD_S) - began)
        for name in names:
            live.client.delete(f"{PODS}/{name}")
            live.client.delete(f"{CLAIMS}/{name}")
        time.sleep(SETTLED_S)
        burst = _burst(live, events, claims, in_use)
    seconds.sort()
    time.sleep(SETTLED_S)
    timings = (percentile(seconds, 0.5), seconds[-1], percentile(burst, 0.5), burst[-1])
    found = Explained(live.nodes, claims, *timings, without, _share(live))
    for what, arguments in COMMANDS.items():
        began = time.perf_counter()
        command = [TESSERA, *arguments, "--kubeconfig", str(live.cluster.kubeconfig)]
        subprocess.run(command, capture_output=True, timeout=COMMAND_S, check=False)
        found.commands[what] = time.perf_counter() - began
    return found


def _burst(live: Live, events: Watched[Event], count: int, in_use: Sequence[str]) -> list[float]:
    """Sorted seconds of ``count`` pods that are created as fast as the API server takes them."""
    created: dict[str, float] = {}
    for number in range(count):
        name = f"burst-{number}"
        selector = (
            f"{A}.memorySlices < {1000 + number}",
            f'{A}.productName == "H{number}"',
            f"{A}.absent{number} == 1",
        )
        body = pod(name)
        if number % 3 == 0:
            body["spec"]["affinity"] = _only(in_use[number])
        live.client.create(CLAIMS, claim(name, asked("gpu-training", selector[number % 3], count=8)))
        created[name] = time.perf_counter()
        live.client.create(PODS, body)
    seconds: dict[str, float] = {}

    def are_told(there: Mapping[Key, Event]) -> bool:
        now = time.perf_counter()
        seconds.update({name: now - created[name] for name in _told(there) & created.keys() - seconds.keys()})
        return len(seconds) == count

    events.wait("an Event on each claim", are_told, TOLD_S)
    return sorted(seconds.values())


def _told(there: Mapping[Key, Event]) -> set[str]:
    """The claims that have an Event."""
    return {each.involved_object.name for each in there.values() if each.involved_object.kind == "ResourceClaim"}


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
